"""Mean and variance of what lies on several ranks, and normalisation by them."""

import torch
from torch import Tensor


def moments(x: Tensor) -> Tensor:
    """[3] float64: sum, sum of squares, count; moments of several ranks can be added."""
    x = x.double()
    return torch.stack([x.sum(), x.square().sum(), torch.full_like(x.sum(), x.numel())])


def mean_and_variance(moments_: Tensor) -> tuple[float, float]:
    """Mean and (biased) variance from `moments`."""
    total, square, count = moments_.tolist()
    mean = total / count
    return mean, max(square / count - mean * mean, 0.0)


def whiten(x: Tensor, moments_: Tensor, eps: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(variance + eps), with the moments of the whole batch, of which `x` may be a part."""
    mean, variance = mean_and_variance(moments_)
    return (x - mean) * (variance + eps) ** -0.5


def masked_moments(columns: list[Tensor], is_valid: Tensor) -> Tensor:
    """[batch, 3] float64: `moments` of each sample's tokens, zero for samples that are not valid ([batch] bool).

    In order of the samples' ids (`Context.in_order`) and summed, they do not depend on where the samples lie.
    """
    rows = [
        moments(column) if valid else column.new_zeros(3).double()
        for column, valid in zip(columns, is_valid, strict=True)
    ]
    return torch.stack(rows)
