"""Early stopping by values worked out by hand."""

import pytest

from realhf.base.errors import RunError
from realhf.master.early_stop import EarlyStop, Verdict


def lines(*values: float) -> list[dict[str, float]]:
    return [{"step": 10 * i, "right": value} for i, value in enumerate(values)]


@pytest.mark.parametrize(
    ("statistic", "gain", "values", "verdict"),
    [
        ("right", 0.0, (0.1,), Verdict(0, 0.1, True, 0, False)),
        ("right", 0.0, (0.1, 0.3, 0.2), Verdict(10, 0.3, False, 1, False)),
        ("right", 0.0, (0.1, 0.3, 0.2, 0.3), Verdict(10, 0.3, False, 2, True)),
        ("right", 0.0, (0.1, 0.3, 0.2, 0.4), Verdict(30, 0.4, True, 0, False)),
        # Gains of 0.05 at a time: the best is the last one, and none is large enough until they add up.
        ("right", 0.07, (0.1, 0.15, 0.2), Verdict(20, 0.2, True, 0, False)),
        ("right", 0.2, (0.1, 0.15, 0.2), Verdict(20, 0.2, True, 2, True)),
        ("min:right", 0.0, (0.5, 0.25, 0.75, 0.5), Verdict(10, 0.25, False, 2, True)),
        ("min:right", 0.0, (0.5, 0.25, 0.125), Verdict(20, 0.125, True, 0, False)),
        ("right", 0.0, (0.5, float("nan")), Verdict(0, 0.5, False, 1, False)),
    ],
)
def test_verdicts(statistic: str, gain: float, values: tuple[float, ...], verdict: Verdict) -> None:
    assert EarlyStop(statistic, 2, gain).judge(lines(*values)) == verdict


def test_an_evaluation_in_between_may_lack_the_statistic() -> None:
    made = [{"step": 0, "right": 0.5}, {"step": 1}, {"step": 2, "right": 0.4}]
    assert EarlyStop("right", 2, 0.0).judge(made) == Verdict(0, 0.5, False, 2, True)


def test_a_statistic_that_evaluations_do_not_make() -> None:
    words = "--stop-early min:wrong: the evaluation has made no such statistic; choose from right"
    with pytest.raises(RunError, match=words):
        EarlyStop("min:wrong", 2, 0.0).judge(lines(0.1))
