"""Where a backward pass may add the gradient of a large weight by itself."""

from torch import Tensor

_SINK = "realhf_gradient_sink"


def let_add_to_grad(parameter: Tensor) -> None:
    """From now on operations whose gradient of `parameter` is large may add it to `parameter.grad`, which must be there
    in every backward pass, and return none to autograd.

    Autograd would hold the gradient in the parameter's dtype, that of a second use of the parameter, their sum, and
    that in the dtype of `grad`: of an embedding with 76,000 rows half a GiB, and five passes over it (as Megatron-LM's
    fusion of gradient accumulation saves them).
    """
    setattr(parameter, _SINK, True)


def gradient_sink(parameter: Tensor) -> Tensor | None:
    """`parameter.grad` where gradients may be added to it; None: the gradient goes to autograd."""
    return parameter.grad if getattr(parameter, _SINK, False) else None
