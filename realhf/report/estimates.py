"""What scored answers say of models: pass@k, intervals, and whether two models differ on the same prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, sqrt
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]  # [prompts]

LEVEL = 0.95
DRAWS = 10_000  # of the bootstrap and of the test by sign flips, from a fixed seed: figures can be reproduced


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts, with its 95 % interval from `low` to `high`."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """The mean difference of two models on the same prompts.

    p: probability of a difference at least as large, on either side, if the models were alike. test: how it was found.
    """

    difference: Estimate
    p: float
    test: str


def pass_at(k: int, passed: Sequence[int], samples: int) -> Values:
    """[prompts]: for each prompt the probability that at least one of `k` answers passes, estimated without bias from
    `passed` of `samples` answers (Chen et al. 2021, Evaluating Large Language Models Trained on Code, equation 1)."""
    return np.array([1.0 - comb(samples - count, k) / comb(samples, k) for count in passed])


def estimate(values: Values) -> Estimate:
    """The mean of one value a prompt. Of values that are all 0 or 1 the interval is Wilson's (1927), which holds where
    all or none are 1 too; of others the percentile bootstrap over prompts."""
    mean, n = float(values.mean()), len(values)
    if np.isin(values, (0.0, 1.0)).all():
        z = NormalDist().inv_cdf((1 + LEVEL) / 2)
        centre, spread = mean + z * z / (2 * n), z * sqrt(mean * (1 - mean) / n + z * z / (4 * n * n))
        low, high = ((centre + side) / (1 + z * z / n) for side in (-spread, spread))
        return Estimate(mean, max(0.0, low), min(1.0, high))
    return _bootstrapped(values)


def _bootstrapped(values: Values) -> Estimate:
    random, n = np.random.default_rng(0), len(values)
    means = [values[random.integers(n, size=n)].mean() for _ in range(DRAWS)]
    low, high = np.quantile(means, ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    return Estimate(float(values.mean()), float(low), float(high))


def compare(first: Values, second: Values) -> Comparison:
    """How much `second` has more than `first`, one value a prompt of each.

    If the models were alike, each prompt's difference would be as likely with the other sign (Fisher's randomisation
    test of pairs). Where all differences are of one size, as with rewards of 0 and 1, the test is exact: McNemar's.
    Otherwise signs are drawn `DRAWS` times, and the data count as one more draw (Phipson and Smyth 2010).
    """
    differences = second - first
    unequal = differences[differences != 0]
    if len({*np.abs(unequal)}) <= 1:
        p, test = _exact_p(int((unequal > 0).sum()), len(unequal)), "McNemar's exact test"
    else:
        random, least = np.random.default_rng(0), abs(unequal.sum()) * (1 - 1e-12)
        signs = (random.integers(2, size=len(unequal)) * 2 - 1 for _ in range(DRAWS))
        extreme = sum(bool(abs(flips @ unequal) >= least) for flips in signs)
        p, test = (extreme + 1) / (DRAWS + 1), "sign flips"
    return Comparison(_bootstrapped(differences), p, test)


def _exact_p(positive: int, pairs: int) -> float:
    """The two-sided probability, of `pairs` fair coins, of a split at least as uneven."""
    fewer = min(positive, pairs - positive)
    return min(1.0, 2 * sum(comb(pairs, i) for i in range(fewer + 1)) / (1 << pairs))
