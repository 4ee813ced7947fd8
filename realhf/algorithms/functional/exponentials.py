"""Log-ratios of probabilities and their exponentials, without overflow.

In float32 exp(89) is infinite, and zero times infinity behind a clip or a minimum is a gradient of NaN. Ratios are
therefore computed in float64. The gradient of a float32 input is that of float64, held within float32's finite numbers.
"""

from typing import Any

import torch
from torch import Tensor

# The largest log-ratio that counts as it is. Products of two ratios and a coefficient stay finite in float64.
LARGEST_LOG_RATIO = 300.0


class _Wide(torch.autograd.Function):
    """The number in float64, at most `largest`. The gradient passes through unchanged, within the input's range."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, largest: float) -> Tensor:
        ctx.dtype = x.dtype
        return x.double().clamp(max=largest)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        finite = torch.finfo(ctx.dtype)
        return gradients[0].clamp(finite.min, finite.max).to(ctx.dtype), None


def wide(x: Tensor) -> Tensor:
    """`x` in float64. Its gradient is clamped to the finite numbers of the dtype of `x`.

    A loss of several terms widens once and computes all of them from the result: two clamped gradients can add up to
    infinity.
    """
    widened: Tensor = _Wide.apply(x, torch.inf)
    return widened


def log_ratios(logprob: Tensor, other: Tensor) -> Tensor:
    """log(p / q) = `logprob` - `other` in float64, with the gradients of both; any shape."""
    return wide(logprob) - wide(other)


def bounded(log_ratio: Tensor) -> Tensor:
    """`log_ratio` in float64, of which what is above `LARGEST_LOG_RATIO` counts as that; the gradient is not cut."""
    held: Tensor = _Wide.apply(log_ratio, LARGEST_LOG_RATIO)
    return held


def ratios(log_ratio: Tensor) -> Tensor:
    """exp(`log_ratio`) in float64, always finite; any shape."""
    return bounded(log_ratio).exp()
