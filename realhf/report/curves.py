"""Statistics over the steps of a run: which there are, which to show first, and their courses. No plotly here."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from realhf.rewards.values import OF_ALL_FUNCTIONS

# Points of a curve: about the width in pixels of a small chart. Points of all curves together: they keep a page small.
MAX_POINTS, FEWEST_POINTS, MAX_POINTS_TOGETHER = 400, 100, 6000
# Statistics to show first, in this order; a name may have a prefix (actor_loss). The first ones are followed by the
# means of each reward function where a run has several.
REWARDS = ("reward_mean", "reward")
MAIN_STATISTICS = (
    "informative_groups",
    "kl",
    "loss",
    "entropy",
    "grad_norm",
    "response_length",
    "token_accuracy",
    "pair_accuracy",
    "tokens_per_s",
)
NO_STATISTICS = ("step", "calls", "time_s", "tokens", "of_steps", "num_workers")
# Parts of the names of statistics that say how good answers are.
QUALITIES = ("accuracy", "reward", "score")
NO_QUALITIES = ("length", "std")
TREND_STEPS, TREND_PARTS = 10, 24

EVALUATION = "evaluation"  # stands before the names of its statistics

Curve = tuple[list[int], list[float | None]]


@dataclass(frozen=True, kw_only=True)
class Trend:
    """The course of a statistic: its means over the first and the last steps, and over equal parts of the run. None
    where no step has a value."""

    name: str
    first: float | None
    last: float | None
    parts: tuple[float | None, ...]


@dataclass(frozen=True, kw_only=True)
class Trends:
    """The trends of the statistics to show first. `first_steps`, `last_steps`: from and to which step means are; both
    the same where there was one step."""

    first_steps: tuple[int, int]
    last_steps: tuple[int, int]
    statistics: tuple[Trend, ...]


def curves_of(lines: Sequence[dict[str, Any]]) -> dict[str, Curve]:
    """Statistic -> (steps, values), for every field with a number in some line; None in lines without one."""
    names = dict.fromkeys(name for line in lines for name in line if name not in NO_STATISTICS)
    curves = {}
    for name in names:
        values = [_number(line.get(name)) for line in lines]
        if any(value is not None for value in values):
            curves[name] = ([line["step"] for line in lines], values)
    return curves


def points_of_each(num_curves: int) -> int:
    """How many points a curve of a figure with `num_curves` may have."""
    return max(FEWEST_POINTS, min(MAX_POINTS, MAX_POINTS_TOGETHER // max(1, num_curves)))


def thinned(curve: Curve, max_points: int = MAX_POINTS) -> Curve:
    """At most `max_points` of a curve: its first and last one, and the lowest and highest of each of equal parts."""
    steps, values = curve
    if len(steps) <= max_points:
        return curve
    known = [i for i, value in enumerate(values) if value is not None]
    num_parts = max_points // 2 - 1
    kept = {0, len(steps) - 1}
    for part in range(num_parts):
        inside = known[len(known) * part // num_parts : len(known) * (part + 1) // num_parts]
        if inside:
            kept |= {min(inside, key=lambda i: values[i] or 0.0), max(inside, key=lambda i: values[i] or 0.0)}
    return [steps[i] for i in sorted(kept)], [values[i] for i in sorted(kept)]


def split_curves(metrics: Sequence[dict[str, Any]]) -> tuple[dict[str, Curve], dict[str, Curve]]:
    """The curves to show first, in order of importance, and the others."""
    curves = curves_of(metrics)
    main = {name: curves[name] for name in main_names(list(curves))}
    return main, {name: curve for name, curve in curves.items() if name not in main}


def main_names(names: Sequence[str]) -> list[str]:
    """Those to show first, in order of importance."""
    sums, others = (
        [name for wanted in group for name in names if name == wanted or name.endswith(f"_{wanted}")]
        for group in (REWARDS, MAIN_STATISTICS)
    )
    return list(dict.fromkeys([*sums, *_rewards_by_name(names), *others]))


def _rewards_by_name(names: Sequence[str]) -> list[str]:
    """The statistics of several reward functions (`realhf.algorithms.text_reward`); [] of one."""
    found: list[str] = []
    for total in (name for name in names if name.endswith("reward_total")):
        start = total.removesuffix("total")
        of_all = [f"{start}{word}" for word in OF_ALL_FUNCTIONS]
        found += [name for name in names if name.startswith(start) and name not in of_all]
    return found if len(found) > 1 else []


def evaluation_curves(evaluations: Sequence[dict[str, Any]]) -> tuple[dict[str, Curve], dict[str, Curve]]:
    """The curves of evaluations that say how good answers are (all, if none does), and the others."""
    curves = curves_of(evaluations)
    main = {name: curve for name, curve in curves.items() if _is_quality(name)} or curves
    return main, {name: curve for name, curve in curves.items() if name not in main}


def _is_quality(name: str) -> bool:
    return any(part in name for part in QUALITIES) and not any(part in name for part in NO_QUALITIES)


def trends_of(lines: Sequence[dict[str, Any]]) -> Trends | None:
    """The trends over `lines` of metrics, which are of any steps of a run, in their order. None without any."""
    if not lines:
        return None
    count = max(1, min(TREND_STEPS, len(lines) // 2))
    first, last = lines[:count], lines[-count:]
    names = main_names(list(dict.fromkeys(name for line in lines for name in line)))
    return Trends(
        first_steps=(first[0]["step"], first[-1]["step"]),
        last_steps=(last[0]["step"], last[-1]["step"]),
        statistics=tuple(
            Trend(name=name, first=_mean(first, name), last=_mean(last, name), parts=_parts(lines, name))
            for name in names
        ),
    )


def _parts(lines: Sequence[dict[str, Any]], name: str) -> tuple[float | None, ...]:
    begin, end = lines[0]["step"], lines[-1]["step"] + 1
    count = min(TREND_PARTS, max(1, end - begin))
    parts: list[list[dict[str, Any]]] = [[] for _ in range(count)]
    for line in lines:
        parts[max(0, min(count - 1, (line["step"] - begin) * count // max(1, end - begin)))].append(line)
    return tuple(_mean(part, name) for part in parts)


def _mean(lines: Sequence[dict[str, Any]], name: str) -> float | None:
    """The curve over the lines that have the statistic; None if none has."""
    values = [value for line in lines if (value := _number(line.get(name))) is not None]
    return statistics.fmean(values) if values else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
