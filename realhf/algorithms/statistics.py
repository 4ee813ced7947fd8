"""Adding up and naming statistics, which are pairs (weighted sum, weight)."""

from collections.abc import Iterable
from typing import cast

from torch import Tensor

from realhf.engine.exact_sums import as_term
from realhf.engine.interface import Stats


def add_stats(parts: Iterable[Stats]) -> Stats:
    """The statistics of all parts together; sum / weight stays the mean."""
    total: Stats = {}
    for part in parts:
        for name, (value, weight) in part.items():
            old_value, old_weight = total.get(name, (0.0, 0.0))
            total[name] = (old_value + value, old_weight + weight)
    return total


def prefixed(prefix: str, stats: Stats) -> Stats:
    """`loss` becomes `PREFIX_loss`, or with an empty prefix stays: the metrics of a step hold the statistics of all its
    calls side by side."""
    return {f"{prefix}_{name}" if prefix else name: pair for name, pair in stats.items()}


def mean_of(x: Tensor) -> tuple[float, float]:
    """The statistic whose mean is that of the elements of `x`.

    The sum of a GPU's tensor stays there, as a scalar tensor that adds up like a number: those of a whole mini-batch
    are read together, so that the host does not wait for each micro-batch.
    """
    total = as_term(x).sum()
    return float(total) if total.device.type == "cpu" else cast(float, total), float(x.numel())
