"""Weights whose gradient a backward pass adds to `grad` itself, without autograd."""

from torch import Tensor

_SINK = "realhf_gradient_sink"


def let_add_to_grad(parameter: Tensor) -> None:
    """Lets operations add a large gradient of `parameter` to `parameter.grad` directly, and return none to autograd.

    `parameter.grad` must then be there in every backward pass. Autograd would hold the gradient of each use of the
    parameter, their sum, and the sum in the dtype of `grad`: for an embedding of 76,000 rows half a GiB and five passes
    over it. Megatron-LM's fused gradient accumulation saves the same.
    """
    setattr(parameter, _SINK, True)


def gradient_sink(parameter: Tensor) -> Tensor | None:
    """`parameter.grad` where gradients may be added to it; None: the gradient goes to autograd."""
    return parameter.grad if getattr(parameter, _SINK, False) else None
