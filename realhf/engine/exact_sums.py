"""Sums of statistics that are the same in every order of their terms: for `reproducible="layout"`, since under another
layout ranks add up other terms."""

import torch
from torch import Tensor

# Sums up to 2^23 of terms on it have no rounding.
_GRID = 2.0**30
_LARGEST = 2.0**22
_is_used = False


def use_exact_sums(is_used: bool) -> None:
    """Whether this process rounds the terms of statistics from now on, to a grid of 2^-30."""
    global _is_used
    _is_used = is_used


def as_term(x: Tensor) -> Tensor:
    """x in float64, as the term of a statistic; beyond 2^22 as it is."""
    wide = x.detach().double()
    return torch.where(wide.abs() < _LARGEST, (wide * _GRID).round() / _GRID, wide) if _is_used else wide


def term(value: float) -> float:
    """As `as_term`, of a number."""
    return float(as_term(torch.tensor(value, dtype=torch.float64))) if _is_used else value
