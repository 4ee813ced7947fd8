"""Whether calls take as long as the plan predicts: the measured over the predicted seconds of the last steps."""

import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from realhf.rundir.events import Event

# Steps per comparison: with fewer, one slow step would look like a change.
WINDOW = 10
# Steps that are left out after a start: first calls are slower.
WARM_UP = 1
# A difference below this share of a step is no news: it changes neither the step nor the choice of a plan.
LEAST_SHARE = 0.05


def call_factors(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Measured over predicted seconds by call, the median over steps; calls without a prediction are left out.

    Args:
        lines: lines of metrics.jsonl, one a step.
    """
    ratios: dict[str, list[float]] = {}
    for line in lines:
        for name, call in line["calls"].items():
            if call["predicted_s"]:
                ratios.setdefault(name, []).append(call["seconds"] / call["predicted_s"])
    return {name: statistics.median(values) for name, values in ratios.items()}


def changed_shares(lines: Sequence[Mapping[str, Any]], models: Mapping[str, str]) -> dict[str, float]:
    """By model the part of the bytes of its copies that was sent, where only what changed is: the median over steps.

    Args:
        lines: as `call_factors`.
        models: by call, its model.
    """
    shares: dict[str, list[float]] = {}
    for line in lines:
        for name, call in line["calls"].items():
            if (moved := call.get("moved")) and moved["whole_bytes"]:
                shares.setdefault(models[name], []).append(moved["bytes"] / moved["whole_bytes"])
    return {model: min(statistics.median(values), 1.0) for model, values in shares.items()}


class DriftWatch:
    """Reports each call once when its time has drifted from the prediction, as the steps of a run end.

    Args:
        threshold: above 1; a call has drifted if its factor is above it, or below 1 / it, and the difference is at
            least `LEAST_SHARE` of the median step.
        reported: calls that an earlier start of the run has reported under the same plan.
    """

    def __init__(self, threshold: float, reported: Iterable[str] = ()):
        self._threshold = threshold
        self._to_skip = WARM_UP
        self._lines: deque[Mapping[str, Any]] = deque(maxlen=WINDOW)
        self._reported = set(reported)

    def step(self, line: Mapping[str, Any]) -> list[str]:
        """The reports after another step: one sentence for each call that has drifted, beginning with its name."""
        if self._to_skip:
            self._to_skip -= 1
            return []
        self._lines.append(line)
        if len(self._lines) < WINDOW:
            return []
        factors = call_factors(self._lines)
        calls = [
            name
            for name, factor in factors.items()
            if name not in self._reported
            and not 1 / self._threshold <= factor <= self._threshold
            and self._matters(name)
        ]
        self._reported.update(calls)
        return [self._describe(name, factors[name]) for name in calls]

    def _matters(self, name: str) -> bool:
        measured_s, predicted_s = self._seconds(name)
        step_s: float = statistics.median(line["time_s"] for line in self._lines)
        return abs(measured_s - predicted_s) >= LEAST_SHARE * step_s

    def _seconds(self, name: str) -> tuple[float, float]:
        """Measured and predicted, the medians over the steps with the call."""
        calls = [line["calls"][name] for line in self._lines if name in line["calls"]]
        measured_s: list[float] = [call["seconds"] for call in calls]
        predicted_s: list[float] = [call["predicted_s"] for call in calls]
        return statistics.median(measured_s), statistics.median(predicted_s)

    def _describe(self, name: str, factor: float) -> str:
        measured_s, predicted_s = self._seconds(name)
        limit = f"{self._threshold:g}" if factor > 1 else f"1 / {self._threshold:g}"
        return (
            f"{name} takes {factor:.3g} times as long as the plan predicts ({measured_s:.3g} s, not {predicted_s:.3g} "
            f"s), {'more' if factor > 1 else 'less'} than --drift-threshold allows ({limit})"
        )


def reported_calls(events: Sequence[Event]) -> set[str]:
    """The calls that were reported under the run's present plan; another plan has other predictions."""
    reported: set[str] = set()
    for event in events:
        if event.event == "replanned":
            reported.clear()
        elif event.event == "drift":
            reported.add(event.message.partition(" ")[0])
    return reported
