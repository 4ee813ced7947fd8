"""Curves of seconds over sizes, from noisy measurements: impossible values are measured again."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from realhf.planning.model.profile import Curve

MOST_ROUNDS, A_ROUND = 2, 2  # more measurements of a doubtful size; with the first an odd number, so that one counts
LEAST_S = 1e-9  # a curve's file can tell it from 0
# Backward has at least as many operations as forward, of layers and heads twice as many. So it takes at least a good
# part of their time at the best rate that forward reached. An embedding sums over tp in its forward pass alone.
LEAST_OF_FORWARD, LEAST_OF_EMBEDDING = 0.25, 0.02
NOISY = 0.1  # part of a curve's seconds that may be other than what was measured, without a word

Floors = Callable[[Sequence[int], Sequence[Sequence[float]]], Sequence[Sequence[float]]]


@dataclass(frozen=True)
class MeasuredCurve:
    """A curve that is above zero and never falls, and the sizes at which it differs from the measurement."""

    curve: Curve
    noisy: tuple[int, ...] = ()


def clock_floors(sizes: Sequence[int], curves: Sequence[Sequence[float]]) -> list[list[float]]:
    """The least seconds of any curve, for work that is measured without a difference."""
    return [[LEAST_S] * len(sizes) for _ in curves]


def backward_floors(
    sizes: Sequence[int], curves: Sequence[Sequence[float]], part: float = LEAST_OF_FORWARD
) -> list[list[float]]:
    """The least seconds of (forward, backward), where backward is the time of training beyond forward: this `part` of
    the time of forward's operations at the best rate that forward reached."""
    forward, _ = curves
    best_s = min(max(seconds, LEAST_S) / size for size, seconds in zip(sizes, forward, strict=True))
    return [[LEAST_S] * len(sizes), [max(part * best_s * size, LEAST_S) for size in sizes]]


def measured_curves(
    sizes: Sequence[int], measure: Callable[[int], tuple[float, ...]], floors: Floors = clock_floors
) -> tuple[MeasuredCurve, ...]:
    """A curve for each of the seconds that `measure` gives for a size; the sizes increase.

    More work takes more time. So a size whose seconds are below their floor, or above those of the next size (then
    both), is measured again, A_ROUND times in each of at most MOST_ROUNDS; the median of its measurements counts. Times
    that fall even so are levelled (isotonic regression of least absolute differences), and times that are too short are
    set to their floor. These sizes are `noisy`, unless that moves them by less than NOISY.

    `floors`: the least seconds of every curve at every size, from the curves by now; they increase with the size.
    """
    readings = [[measure(size)] for size in sizes]
    for _ in range(MOST_ROUNDS):
        curves = _medians(readings)
        doubtful = {
            place
            for curve, least in zip(curves, floors(sizes, curves), strict=True)
            for place in _doubtful(curve, least)
        }
        if not doubtful:
            break
        for place in A_ROUND * sorted(doubtful):
            readings[place].append(measure(sizes[place]))
    curves = _medians(readings)
    return tuple(_levelled(sizes, curve, least) for curve, least in zip(curves, floors(sizes, curves), strict=True))


def noise_text(name: str, unit: str, found: MeasuredCurve) -> str:
    """Where a curve is noisy, in words."""
    return f"{name} at {', '.join(f'{size:,}' for size in found.noisy)} {unit}"


def isotonic(values: Sequence[float]) -> list[float]:
    """The values that never fall and differ least from the given ones, in absolute terms: neighbours that fall are
    pooled, and take the median of their pool."""
    pools: list[list[float]] = []
    for value in values:
        pools.append([value])
        while len(pools) > 1 and statistics.median(pools[-2]) > statistics.median(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    return [statistics.median(pool) for pool in pools for _ in pool]


def _medians(readings: Sequence[Sequence[tuple[float, ...]]]) -> list[list[float]]:
    """By curve and size, from the measurements of each size."""
    by_size = ([statistics.median(column) for column in zip(*each, strict=True)] for each in readings)
    return [list(curve) for curve in zip(*by_size, strict=True)]


def _doubtful(curve: Sequence[float], least: Sequence[float]) -> set[int]:
    """The places of a curve that are below their floor, or where it falls."""
    short = {place for place, (seconds, floor) in enumerate(zip(curve, least, strict=True)) if seconds < floor}
    falls = {place for place, (one, two) in enumerate(pairwise(curve)) if two < one}
    return short | falls | {place + 1 for place in falls}


def _levelled(sizes: Sequence[int], curve: Sequence[float], least: Sequence[float]) -> MeasuredCurve:
    level = [max(seconds, floor) for seconds, floor in zip(isotonic(curve), least, strict=True)]
    noisy = (abs(to - of) > NOISY * to for to, of in zip(level, curve, strict=True))
    return MeasuredCurve(
        Curve(tuple(map(float, sizes)), tuple(round(seconds, 9) for seconds in level)),
        tuple(size for size, is_noisy in zip(sizes, noisy, strict=True) if is_noisy),
    )
