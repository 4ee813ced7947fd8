"""Weights that operations read and whose gradients they add up without autograd: where autograd would hold too much."""

from collections.abc import Callable

from torch import Tensor

_SINK, _USE = "realhf_gradient_sink", "realhf_before_use"


def let_add_to_grad(parameter: Tensor) -> None:
    """Lets operations add a large gradient of `parameter` to `parameter.grad` directly, and return none to autograd.

    `parameter.grad` must then be there in every backward pass. Autograd would hold the gradient of each use of the
    parameter, their sum, and the sum in the dtype of `grad`: for an embedding of 76,000 rows half a GiB and five passes
    over it. Megatron-LM's fused gradient accumulation saves the same.
    """
    setattr(parameter, _SINK, True)


def give_on_use(parameter: Tensor, use: Callable[[], None], sink: Callable[[], Tensor]) -> None:
    """Operations that read `parameter` part by part call `use` first, and in the backward pass add its gradient to the
    tensor that `sink` returns. So each slice can have memory for its use alone."""
    setattr(parameter, _USE, use)
    setattr(parameter, _SINK, sink)


def before_use(parameter: Tensor) -> None:
    """To be called before the values of `parameter` are read."""
    use = getattr(parameter, _USE, None)
    if use is not None:
        use()


def gradient_sink(parameter: Tensor) -> Tensor | None:
    """Where the gradient of `parameter` may be added now; None: it goes to autograd."""
    sink = getattr(parameter, _SINK, False)
    return parameter.grad if sink is True else sink() if sink else None
