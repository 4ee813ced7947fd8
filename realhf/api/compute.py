"""How a model's training is computed: choices that change time and memory, not the result."""

from dataclasses import dataclass
from typing import Literal, get_args

from realhf.api.errors import UserError

Recomputation = Literal["off", "selective", "full"]
Backend = Literal["native", "megatron"]


@dataclass(frozen=True, kw_only=True)
class ComputeConfig:
    """Of training; inference and generation keep no activations, and do not divide tokens.

    sequence_parallel: norms and residual sums are divided over the tensor-parallel ranks along the tokens. Without
        tensor parallelism nothing changes.
    recomputation: what the backward pass computes again instead of keeping it. "selective": all but matrix products
        and attention; "full": whole layers, of which only the input is kept.
    backend: what computes layers in passes with gradients: the decoder of this project, or megatron-core, on GPUs.
    """

    sequence_parallel: bool = False
    recomputation: Recomputation = "off"
    backend: Backend = "native"

    def __post_init__(self) -> None:
        if self.recomputation not in get_args(Recomputation):
            known = ", ".join(get_args(Recomputation))
            raise UserError(f"recomputation={self.recomputation!r} is not known; choose one of {known}")
        if self.backend not in get_args(Backend):
            raise UserError(f"backend={self.backend!r} is not known; choose one of {', '.join(get_args(Backend))}")
