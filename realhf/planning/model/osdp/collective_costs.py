"""What the collectives of a group cost, each by itself: the time of a message and that of its bytes, fitted to measured
times. On hosts, an all-reduce is not two passes that cost the same, so each is a line of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from realhf.base.errors import UserError
from realhf.base.numbers import SECONDS, check_fields


@dataclass(frozen=True, kw_only=True)
class CollectiveCost:
    """A collective on a vector of x bytes takes `latency_s` + x `seconds_per_byte`; x counts the whole vector, on every
    rank. Raises UserError if a number is negative or no number."""

    latency_s: float
    seconds_per_byte: float

    def __post_init__(self) -> None:
        check_fields("", self, {"latency_s": SECONDS, "seconds_per_byte": SECONDS})

    def seconds(self, size_bytes: float) -> float:
        return self.latency_s + size_bytes * self.seconds_per_byte


@dataclass(frozen=True, kw_only=True)
class CollectiveCosts:
    """Of one group of ranks. An all-reduce is a reduce-scatter and an all-gather of one vector, as the engine sums the
    gradients of what is replicated."""

    all_reduce: CollectiveCost
    all_gather: CollectiveCost
    reduce_scatter: CollectiveCost


FREE = CollectiveCost(latency_s=0.0, seconds_per_byte=0.0)
NO_COSTS = CollectiveCosts(all_reduce=FREE, all_gather=FREE, reduce_scatter=FREE)  # a group of one rank


def fitted(sizes_bytes: Sequence[float], seconds: Sequence[float]) -> CollectiveCost:
    """The line with the least squares of relative errors, neither of its two numbers below 0: a small vector says as
    much of the latency as a large one of the bytes.

    Raises:
        UserError: fewer than two different sizes, or seconds that are not above 0.
    """
    if len(set(sizes_bytes)) < 2 or len(sizes_bytes) != len(seconds) or min(seconds) <= 0:
        raise UserError(
            f"sizes_bytes={list(sizes_bytes)} and seconds={list(seconds)} give no line; measure two sizes or more, "
            "with a time above 0 for each"
        )
    # Divided by the seconds, the fit is of latency x + bytes y = 1.
    points = [(1 / taken, size / taken) for size, taken in zip(sizes_bytes, seconds, strict=True)]
    xx, xy, yy = (sum(a[i] * a[j] for a in points) for i, j in ((0, 0), (0, 1), (1, 1)))
    x, y = (sum(point[i] for point in points) for i in (0, 1))
    determinant = xx * yy - xy * xy
    latency_s, seconds_per_byte = (x * yy - y * xy) / determinant, (y * xx - x * xy) / determinant
    if latency_s < 0:
        latency_s, seconds_per_byte = 0.0, y / yy
    elif seconds_per_byte < 0:
        latency_s, seconds_per_byte = x / xx, 0.0
    return CollectiveCost(latency_s=latency_s, seconds_per_byte=seconds_per_byte)
