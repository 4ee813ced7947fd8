"""Mean and variance of what lies on several ranks, and normalisation by them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def moments(x: Tensor) -> Tensor:
    """[3] float64: sum, sum of squares, count; moments of several ranks can be added."""
    x = x.double()
    return torch.stack([x.sum(), x.square().sum(), torch.full_like(x.sum(), x.numel())])


def standardised(x: Tensor, mean: float, variance: float, eps: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(variance + eps), in the dtype of `x`."""
    return ((x.double() - mean) * (variance + eps) ** -0.5).to(x.dtype)


@dataclass(frozen=True)
class Spread:
    """Mean and (biased) variance of `count` numbers; 0 of none."""

    mean: float
    variance: float
    count: float


def sample_spreads(columns: Sequence[Tensor], is_valid: Tensor) -> Tensor:
    """[batch, 3] float64 of each sample's tokens: count, mean, sum of squared distances from the mean. Zeros for
    samples without tokens and for those that are not valid ([batch] bool). See `spread_of`."""
    # On the host: a device would launch kernels for each sample. Sums of padded rows would depend on their padding.
    each = torch.cat(list(columns)).detach().double().cpu().split([len(column) for column in columns])
    rows = []
    for x, valid in zip(each, is_valid.tolist(), strict=True):
        if not (valid and len(x)):
            rows.append(x.new_zeros(3))
            continue
        mean = x[0] + (x - x[0]).mean()
        rows.append(torch.stack([torch.full_like(mean, len(x)), mean, (x - mean).square().sum()]))
    return torch.stack(rows).to(columns[0].device)


def spread_of(rows: Tensor) -> Spread:
    """The spread of all tokens from `sample_spreads` of all samples, [samples, 3].

    With the rows in the order of their ids (`Context.in_order`) it does not depend on where the samples lie. Equal
    numbers of any size have exactly their own mean and a variance of 0, where E(x^2) - E(x)^2 has a rounding error as
    large as the variance.

    Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979).
    """
    count, mean, squares = rows[rows[:, 0] > 0].unbind(1)
    if not len(count):
        return Spread(0.0, 0.0, 0.0)
    total = count.sum()
    mean_of_all = mean[0] + (count * (mean - mean[0])).sum() / total
    square = (squares + count * (mean - mean_of_all).square()).sum()
    return Spread(float(mean_of_all), float(square / total), float(total))
