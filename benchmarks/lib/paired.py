"""How much slower one way is than another, from readings that were taken in turns."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

DRAWS = 2000
PERCENT = 95


@dataclass(frozen=True)
class Ratio:
    """Seconds of one way over those of another, with the interval that holds it with 95 % confidence."""

    value: float
    low: float
    high: float

    @property
    def width(self) -> float:
        return self.high - self.low

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def paired_ratio(first: Sequence[float], second: Sequence[float], seed: int = 0) -> Ratio:
    """The median over the rounds of `first` / `second`, both read in every round.

    What slows the machine for longer than a round strikes both, and a median leaves out a round in which it struck one.
    The interval is a percentile bootstrap over rounds (Efron and Tibshirani, 1993, section 13.3).
    """
    ratios = np.asarray(first) / np.asarray(second)
    drawn = np.random.default_rng(seed).integers(0, len(ratios), (DRAWS, len(ratios)))
    rest = (100 - PERCENT) / 2
    low, high = np.percentile(np.median(ratios[drawn], axis=1), [rest, 100 - rest])
    return Ratio(float(np.median(ratios)), float(low), float(high))
