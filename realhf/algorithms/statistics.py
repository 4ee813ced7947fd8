"""Adding up and naming statistics, which are pairs (weighted sum, weight)."""

from collections.abc import Iterable

from torch import Tensor

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
    """The statistic whose mean is that of the elements of `x`."""
    return float(x.detach().double().sum()), float(x.numel())
