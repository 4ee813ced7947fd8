"""Measured against predicted times: the factors, and when they are told, by numbers by hand."""

from typing import Any

from realhf.master.drift import WARM_UP, WINDOW, DriftWatch, call_factors, drifted


def line(**seconds: float) -> dict[str, Any]:
    """A step of calls that were predicted to take 2 s."""
    return {"calls": {name: {"seconds": value, "predicted_s": 2.0} for name, value in seconds.items()}}


def test_factors_are_medians_of_measured_over_predicted() -> None:
    lines = [line(train=3.0, generate=1.0), line(train=100.0, generate=2.0), line(train=4.0, generate=4.0)]
    for one in lines:
        one["calls"]["by_hand"] = {"seconds": 1.0, "predicted_s": None}
    assert call_factors(lines) == {"train": 2.0, "generate": 1.0}
    assert call_factors([]) == {}


def test_too_long_and_too_short_are_both_drift() -> None:
    factors = {"long": 1.6, "short": 0.6, "slightly_long": 1.4, "slightly_short": 0.7}
    assert drifted(factors, {}, 1.5) == ["long", "short"]
    assert drifted(factors, {"long": 1.6, "short": 0.6}, 1.5) == []
    assert drifted({"long": 2.5}, {"long": 1.6}, 1.5) == ["long"]


def test_a_drift_is_told_once_until_it_changes() -> None:
    watch = DriftWatch(1.5)
    slow_start = [line(train=50.0)] * WARM_UP
    assert not any(map(watch.step, [*slow_start, *[line(train=2.0)] * WINDOW]))
    told = [watch.step(line(train=6.0)) for _ in range(2 * WINDOW)]
    # With half of the steps the median is 4 s, with more 6 s: 1.5 times more than was told, and no more than that.
    assert [i + 1 for i, text in enumerate(told) if text] == [WINDOW // 2]
    assert told[WINDOW // 2 - 1] == "train takes 2.00 times what was predicted (4 s, not 2 s)"
    assert [bool(watch.step(line(train=2.0))) for _ in range(WINDOW)].count(True) == 1
