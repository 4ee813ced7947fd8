"""The product x W^T by the fastest kernel: all matrix products with weights go through here.

On AMD CPUs MKL's float32 kernels use half of the vector width and oneDNN's all of it: 100 against 230 GFLOP/s a core of
an EPYC 9005, also in the products of both gradients. An EPYC 9004 computes all vectors in halves: both have the same
rate there, and MKL needs no transposed copies for the gradient of a weight. A weight that serves many steps is *packed*
into the order in which our own kernel reads it (`realhf.cpu.products`). On an EPYC 9004 it reaches about its full rate
at 8 rows; oneDNN's, with weights in its own order, reaches 0.9 of it at 64 rows, and half of it at 8.
`benchmarks/generation.py` measures it beside torch's, in bfloat16 also those of training, and what AMX adds.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from realhf.cpu.products import PackedWeight

# Below this many rows MKL's matrix-vector kernels win over oneDNN's.
_FEWEST_ROWS = 4
# Above this many rows oneDNN's blocks of rows and columns win over our kernel, although oneDNN packs the weight first.
_MOST_OWN_ROWS = 256
# A weight's gradient sums over the rows; a block of this many rows stays in a core's cache while it is read.
_GRADIENT_ROWS = 512


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, packed: PackedWeight | None = None) -> Tensor:
    """x W^T + bias, differentiable; device, dtype and the number of rows alone decide which kernel computes it.

    Args:
        x: [rows, in].
        weight: [out, in].
        bias: [out].
        packed: `realhf.cpu.products.pack` of the present weight, if it was kept; used in passes without gradients.

    Returns:
        [rows, out].
    """
    if packed is not None and takes_packed(x, weight):
        return packed.product(x, bias)
    takes_gradient = _takes_gradient(x, weight)
    if not _has_product(x):
        return F.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias) if takes_gradient else _product(x, weight, bias)


def takes_packed(x: Tensor, *weights: Tensor) -> bool:
    """Whether products of x [rows, in] with `weights` should use their packed form."""
    return x.shape[0] <= _MOST_OWN_ROWS and not _takes_gradient(x, *weights)


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """grad^T x [out, in], the gradient of the weight of `linear`, from grad [rows, out] and x [rows, in]."""
    if _is_widened(x):
        return weight_gradient(grad.float(), x.float()).to(x.dtype)
    if not _has_product(x) or computes_in_halves():
        return grad.t() @ x
    # oneDNN is 500 times slower on rows that are not contiguous, such as the input of a slice.
    grad, x = grad.contiguous(), x.contiguous()
    total = None
    for grad_rows, x_rows in zip(grad.split(_GRADIENT_ROWS), x.split(_GRADIENT_ROWS), strict=True):
        part = _product(grad_rows.t(), x_rows.t(), None)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


def add_weight_gradient(total: Tensor, grad: Tensor, x: Tensor) -> None:
    """Adds `weight_gradient` to a total [out, in] of any dtype; where none is rounded, within the product."""
    if total.dtype == x.dtype and x.dtype.itemsize >= 4 and not _has_product(x):
        total.addmm_(grad.t(), x)
    else:
        total.add_(weight_gradient(grad, x))


def _takes_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _has_product(x: Tensor) -> bool:
    """Whether `_product` computes x W^T, and both gradients."""
    if x.device.type != "cpu" or x.dim() != 2 or x.shape[0] < _FEWEST_ROWS:
        return False
    return _is_widened(x) or (x.dtype == torch.float32 and _has_onednn(x.dtype))


def _is_widened(x: Tensor) -> bool:
    """Whether x is multiplied in float32: without oneDNN torch has no fast products of bfloat16."""
    return x.device.type == "cpu" and x.dtype == torch.bfloat16 and not _has_onednn(x.dtype)


@lru_cache(maxsize=1)
def computes_in_halves(processor: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this processor computes 512 bits as twice 256: AMD's family 25 (Zen 4, and Zen 3 without AVX-512). There
    a weight's gradient of 1,088 rows had 95 GFLOP/s a core by MKL and 75 by oneDNN, which transposes both operands."""
    try:
        lines = processor.read_text().splitlines()
    except OSError:
        return False
    fields = dict(line.replace("\t", "").split(": ", 1) for line in lines if ": " in line)  # the last processor wins
    return fields.get("vendor_id") == "AuthenticAMD" and fields.get("cpu family") == "25"


def _has_onednn(dtype: torch.dtype) -> bool:
    """oneDNN refuses bfloat16 on processors that have neither AVX-512 nor AVX-NE-CONVERT."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if _is_widened(x):
        return torch.ops.realhf.linear_in_float32(x, weight, bias)
    # The operator that torch's compiler uses for a linear layer on the CPU.
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _in_float32(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


# An operator, so that recomputation keeps its result (`realhf.models.recomputation`), and not that in float32.
_operators = torch.library.Library("realhf", "DEF")
_operators.define("linear_in_float32(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_operators.impl("linear_in_float32", _in_float32, "CPU")


class _Linear(torch.autograd.Function):
    """`_product` has no derivative of its own; both gradients are products of the same kind."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            _product(grad, weight.t(), None) if needs_x else None,  # [rows, in]
            weight_gradient(grad, x) if needs_weight else None,  # [out, in]
            grad.sum(0) if needs_bias else None,
        )
