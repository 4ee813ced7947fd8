"""Whether calls take the time that the plan predicts: measured over predicted seconds of the last steps."""

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

# Steps that are looked at together: fewer would take one slow step for a change.
WINDOW = 10
# Steps after a start that say nothing: the first calls of everything are slower.
WARM_UP = 1


def call_factors(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Measured over predicted seconds by call, the median over steps; calls without a prediction are left out.

    Args:
        lines: of metrics.jsonl, a step each.
    """
    ratios: dict[str, list[float]] = {}
    for line in lines:
        for name, call in line["calls"].items():
            if call["predicted_s"]:
                ratios.setdefault(name, []).append(call["seconds"] / call["predicted_s"])
    return {name: statistics.median(values) for name, values in ratios.items()}


def drifted(factors: Mapping[str, float], before: Mapping[str, float], threshold: float) -> list[str]:
    """The calls whose factor is more than `threshold` times the one before (1 where there was none), or less than that
    part of it."""
    changes = {name: factor / before.get(name, 1.0) for name, factor in factors.items()}
    return [name for name, change in changes.items() if not 1 / threshold <= change <= threshold]


def describe(calls: Sequence[str], factors: Mapping[str, float], lines: Sequence[Mapping[str, Any]]) -> str:
    """`critic_train_step takes 2.31 times what was predicted (0.12 s, not 0.052 s); ...`"""
    texts = []
    for name in calls:
        measured_s = statistics.median(line["calls"][name]["seconds"] for line in lines)
        both = f"{measured_s:.3g} s, not {lines[-1]['calls'][name]['predicted_s']:.3g} s"
        texts.append(f"{name} takes {factors[name]:.2f} times what was predicted ({both})")
    return "; ".join(texts)


class DriftWatch:
    """Takes the steps of one start of a run as they end.

    Args:
        threshold: above 1; see `drifted`.
    """

    def __init__(self, threshold: float):
        self._threshold = threshold
        self._skipped = 0
        self._lines: deque[Mapping[str, Any]] = deque(maxlen=WINDOW)
        self._told: dict[str, float] = {}

    def step(self, line: Mapping[str, Any]) -> str:
        """What has drifted since it was last told, in words; "" if nothing has."""
        if self._skipped < WARM_UP:
            self._skipped += 1
            return ""
        self._lines.append(line)
        if len(self._lines) < WINDOW:
            return ""
        factors = call_factors(self._lines)
        calls = drifted(factors, self._told, self._threshold)
        if not calls:
            return ""
        self._told, text = factors, describe(calls, factors, self._lines)
        self._lines.clear()  # the next word is of other steps
        return text
