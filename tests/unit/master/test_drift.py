"""Measured against predicted times: the factors, and when they are told, by numbers by hand."""

from typing import Any

from realhf.master.drift import WARM_UP, WINDOW, DriftWatch, call_factors, changed_shares, reported_calls
from realhf.rundir.events import Event


def line(step_s: float = 10.0, **seconds: float) -> dict[str, Any]:
    """A step of calls that were predicted to take 2 s."""
    return {
        "time_s": step_s,
        "calls": {name: {"seconds": value, "predicted_s": 2.0} for name, value in seconds.items()},
    }


def test_factors_are_medians_of_measured_over_predicted() -> None:
    lines = [line(train=3.0, generate=1.0), line(train=100.0, generate=2.0), line(train=4.0, generate=4.0)]
    for one in lines:
        one["calls"]["by_hand"] = {"seconds": 1.0, "predicted_s": None}
    assert call_factors(lines) == {"train": 2.0, "generate": 1.0}
    assert call_factors([]) == {}


def told(watch: DriftWatch, *lines: dict[str, Any]) -> list[str]:
    return [text for one in lines for text in watch.step(one)]


def test_too_long_and_too_short_are_both_drift() -> None:
    steps = [line(long=3.2, short=1.2, slightly_long=2.9, slightly_short=1.4, as_predicted=2.0)] * (WARM_UP + WINDOW)
    assert told(DriftWatch(1.5), *steps) == [
        "long takes 1.6 times as long as the plan predicts (3.2 s, not 2 s), more than --drift-threshold allows (1.5)",
        "short takes 0.6 times as long as the plan predicts (1.2 s, not 2 s), less than --drift-threshold allows "
        "(1 / 1.5)",
    ]


def test_a_difference_of_little_importance_to_the_step_is_no_drift() -> None:
    """1.2 s more than predicted, and 0.8 s less: a twentieth of 24 s, and of 16 s."""
    for step_s, expected in ((15.9, 2), (16.1, 1), (23.9, 1), (24.1, 0)):
        steps = [line(step_s, long=3.2, short=1.2)] * (WARM_UP + WINDOW)
        assert len(told(DriftWatch(1.5), *steps)) == expected, step_s


def test_the_first_step_and_single_slow_ones_are_no_drift() -> None:
    slow_start = [line(train=50.0)] * WARM_UP
    hiccups = [line(train=2.0), line(train=9.0), line(train=2.0)] * WINDOW
    assert told(DriftWatch(1.5), *slow_start, *hiccups) == []


def test_ten_steps_behind_the_first_one_of_a_start_are_compared() -> None:
    """The first step does not count, however long it took: the eleventh is the tenth that does."""
    watch = DriftWatch(1.5)
    texts = [told(watch, line(train=3.2)) for _ in range(12)]
    assert [i + 1 for i, found in enumerate(texts) if found] == [11]
    # Of the steps behind the first, five take 2 s and five 6 s, median 4 s; with the first among ten it would be 6 s.
    watch = DriftWatch(2.5)
    assert told(watch, line(train=900.0), *[line(train=2.0)] * 5, *[line(train=6.0)] * 5) == []


def test_the_last_ten_steps_are_compared() -> None:
    """Four slow ones of the last ten are no drift, five are: the median of 2 s and 9 s is 5.5 s."""
    watch = DriftWatch(1.5, reported=["train"])
    told(watch, *[line(train=9.0, generate=2.0)] * 11)
    assert told(watch, *[line(train=9.0, generate=9.0)] * 4) == []
    (text,) = told(watch, line(train=9.0, generate=9.0))
    assert text.startswith("generate takes 2.75 times as long as the plan predicts (5.5 s, not 2 s)")


def test_a_drift_is_told_once_a_call_whatever_the_times_do_then() -> None:
    watch = DriftWatch(1.5)
    assert not told(watch, *[line(train=2.0, generate=2.8)] * (WARM_UP + WINDOW))
    # With half of the steps the median is 4 s, beyond the threshold.
    texts = [told(watch, line(train=6.0, generate=2.8)) for _ in range(2 * WINDOW)]
    assert [i + 1 for i, found in enumerate(texts) if found] == [WINDOW // 2]
    assert texts[WINDOW // 2 - 1][0].startswith("train takes 2 times as long as the plan predicts (4 s, not 2 s), more")
    assert told(watch, *[line(train=2.0, generate=1.9)] * 2 * WINDOW) == [], "generate was and is near its prediction"
    assert told(watch, *[line(train=20.0, generate=1.9)] * 2 * WINDOW) == []


def test_the_threshold_itself_is_no_drift() -> None:
    assert told(DriftWatch(1.5), *[line(train=3.0, generate=2.0 / 1.5)] * 2 * WINDOW) == []
    (text,) = told(DriftWatch(1.5), *[line(train=3.00001)] * 2 * WINDOW)
    assert text.endswith("more than --drift-threshold allows (1.5)")


def test_a_call_of_some_steps_is_compared_by_these() -> None:
    """Of ten steps five have it: 3 s to 7 s, median 5 s."""
    steps = [line(train=2.0, **({"greedy": 3.0 + i / 2} if i % 2 == 0 else {})) for i in range(WINDOW)]
    assert told(DriftWatch(1.5), *[line(train=2.0)] * WARM_UP, *steps) == [
        "greedy takes 2.5 times as long as the plan predicts (5 s, not 2 s), more than --drift-threshold allows (1.5)"
    ]


def test_a_start_does_not_repeat_what_an_earlier_one_told_under_the_same_plan() -> None:
    told_before = Event(time_s=0.0, event="drift", step=11, message="train takes 2 times as long as the plan predicts")
    restarted = Event(time_s=1.0, event="restarted", step=10)
    replanned = Event(time_s=2.0, event="replanned", step=10)
    assert reported_calls([told_before, restarted]) == {"train"}
    assert reported_calls([told_before, restarted, replanned]) == set()
    steps = [line(train=6.0, generate=6.0)] * (WARM_UP + WINDOW)
    (text,) = told(DriftWatch(1.5, reported_calls([told_before, restarted])), *steps)
    assert text.startswith("generate takes 3 times")


def test_shares_of_moves_are_medians_by_model() -> None:
    """A first move of all values, and calls without a copy that changes, do not matter."""

    def line(**moved: tuple[int, int]) -> dict:
        calls = {name: {"moved": {"bytes": a, "whole_bytes": b}} for name, (a, b) in moved.items()}
        return {"calls": {**calls, "train": {}}}

    lines = [line(generate=(100, 100), judge=(4, 100)), line(generate=(2, 100)), line(generate=(3, 100), other=(9, 8))]
    models = {"generate": "actor", "judge": "actor", "train": "actor", "other": "critic"}
    assert changed_shares(lines, models) == {"actor": 0.035, "critic": 1.0}
    assert changed_shares(lines[1:2], models) == {"actor": 0.02}
    assert changed_shares([], models) == {}
