"""How a model is computed: choices that change time and memory, not the result."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from realhf.base.errors import UserError

DataParallel = Literal["zero1", "fsdp"]
Recomputation = Literal["off", "selective", "full"]


@dataclass(frozen=True, kw_only=True)
class ComputeConfig:
    """How a model is computed in its home.

    Sequence parallelism and recomputation are for training alone: inference and generation keep no activations and do
    not divide tokens.

    data_parallel: the state that the ranks of a data-parallel group divide. "zero1": optimizer states (ZeRO-1); every
        rank has all parameters and gradients. "fsdp": parameters and gradients too (ZeRO-3, fully sharded data
        parallelism); a layer is gathered for its forward pass and again for its backward pass, and freed after each.
    sequence_parallel: tensor-parallel ranks divide norms and residual sums along the tokens.
    recomputation: the activations that the backward pass computes again instead of keeping them. "selective": all but
        the results of matrix products and attention. "full": all but the inputs of layers.
    """

    data_parallel: DataParallel = "zero1"
    sequence_parallel: bool = False
    recomputation: Recomputation = "off"

    def __post_init__(self) -> None:
        _check("data_parallel", self.data_parallel, DataParallel)
        _check("recomputation", self.recomputation, Recomputation)


def _check(field: str, value: str, known: Any) -> None:
    if value not in get_args(known):
        raise UserError(f"{field}={value!r} is not known; choose one of {', '.join(get_args(known))}")
