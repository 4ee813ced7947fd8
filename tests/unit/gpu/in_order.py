"""The kernels of GPUs in Triton's interpreter, in place of the CPU's, where sums have one order."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from triton.runtime import interpreter

import realhf.engine.generate.choice as choice
import realhf.models.attention as attention
import realhf.models.ordered_layers as ordered_layers
from realhf.architecture.model import DecoderConfig
from realhf.cpu import fused
from realhf.engine.generate import paged_attention
from realhf.parallel import ordered
from tests.unit.models.flash import WITH_TRITON


@contextmanager
def as_on_gpu() -> Iterator[pytest.MonkeyPatch]:
    """Within it tensors of the CPU are computed as those of a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (ordered, attention, ordered_layers, choice):
            patch.setattr(module, "on_gpu", lambda x: True)
        for name in ("takes", "trains"):
            patch.setattr(fused, name, lambda *tensors: False)
        patch.setattr(ordered_layers, "check_in_order", lambda threads: None)
        patch.setattr(paged_attention, "machine", lambda device: WITH_TRITON)
        multiply_in_order(patch)
        yield patch


def multiply_in_order(patch: pytest.MonkeyPatch) -> None:
    """The interpreter would multiply by BLAS, in which a sum may depend on its place in a tile; and of bfloat16 the
    bits, as whole numbers."""
    builder = interpreter.InterpreterBuilder
    short, wide = interpreter.tl.bfloat16, interpreter.tl.float32

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        left, right = ((self.create_fp_ext(x, wide) if x.dtype.scalar == short else x).data for x in (a, b))
        total = d.data.copy()
        for k in range(left.shape[-1]):
            total += left[..., :, k, None] * right[..., k, None, :]
        return interpreter.TensorHandle(total, d.dtype.scalar)

    patch.setattr(builder, "create_dot", create_dot)


def in_whole_vectors(**changes: object) -> DecoderConfig:
    """A small model whose tensors have whole vectors: behind these torch computes on the CPU by other instructions."""
    small = DecoderConfig(
        hidden_size=64, intermediate_size=128, num_heads=4, num_kv_heads=2, vocab_size=96, num_layers=1,
        attention_head_dim=32,
    )  # fmt: skip
    return replace(small, **changes)
