"""What differs between two records of a step: in the order of computing, and by how much."""

from typing import Any

import pytest

from realhf.report.differences import Difference, differences
from realhf.rundir.samples import Sample

CALL = {"start": 0.0, "seconds": 1.0, "predicted_s": None, "peak_bytes": 1}
LINE: dict[str, Any] = {
    "step": 3,
    "time_s": 4.0,
    "tokens": 60,
    "tokens_per_s": 15.0,
    "loss": 2.0,
    "kl": None,
    "calls": {
        "actor_train_step": {**CALL, "end": 4.0, "weights_version": 2, "weights": "aa", "new_weights": "bb"},
        "actor_generate": {**CALL, "end": 1.0, "weights_version": 2, "weights": "aa"},
    },
    "plan": "0123",
    "num_workers": 2,
    "peak_bytes": [1, 1],
}


def line(**changes: Any) -> dict[str, Any]:
    return LINE | changes


def calls(**changes: dict[str, Any]) -> dict[str, Any]:
    """The calls of the line, of some of which fields are changed."""
    return {name: call | changes.get(name, {}) for name, call in LINE["calls"].items()}


def sample(number: int, response: str = "ab", reward: float | None = 0.5) -> Sample:
    return Sample(step=3, sample=number, split="train", prompt="ba", response=response, reward=reward)


def test_times_and_places_are_no_difference() -> None:
    measured = {
        "time_s": 9.0,
        "tokens_per_s": 1.0,
        "plan": "4567",
        "num_workers": 1,
        "peak_bytes": [7],
        "kl": None,
    }
    other = calls(actor_generate={"end": 9.0, "seconds": 3.0, "peak_bytes": 7})
    assert not list(differences(LINE, line(**measured, calls=other)))


def test_what_one_of_both_lacks_is_no_difference() -> None:
    older = {
        name: {key: value for key, value in call.items() if "weights" not in key} for name, call in calls().items()
    }
    assert not list(differences(LINE, line(calls=older, entropy=1.0), ([sample(1)], [sample(2)])))
    assert not list(differences(line(calls=older), LINE))


def test_the_order_is_that_of_computing() -> None:
    again = line(
        loss=1.5,
        tokens=61,
        calls=calls(
            actor_generate={"weights": "cc", "weights_version": 1},
            actor_train_step={"weights": "cc", "weights_version": 1, "new_weights": "dd"},
        ),
    )
    samples = ([sample(4), sample(7), sample(9)], [sample(4, "ba"), sample(7, reward=0.75), sample(9)])
    found = list(differences(LINE, again, samples))
    assert [each.what for each in found[:6]] == [
        "the version of the weights of actor_generate",
        "the version of the weights of actor_train_step",
        "the weights that were used by actor_generate",
        "the weights that were used by actor_train_step",
        "the response of sample 4",
        "the reward of sample 7",
    ]
    assert {each.what for each in found[6:8]} == {"the statistic loss", "the statistic tokens"}
    assert [each.what for each in found[8:]] == ["the weights that were made by actor_train_step"]
    assert found[4] == Difference(3, "the response of sample 4", "'ab'", "'ba'")
    assert found[5] == Difference(3, "the reward of sample 7", 0.5, 0.75, 0.25)
    without = [each.what for each in differences(LINE, again, samples, with_weights=False)]
    assert without == [each.what for each in found if "weights that" not in each.what]


@pytest.mark.parametrize(
    ("recorded", "again", "size"),
    [
        (2.0, 1.5, 0.25),
        (0.25, 0.5, 0.25),
        (-8.0, 2.0, 1.25),
        (None, 1.0, None),
        (float("inf"), 1.0, None),
        (1, 3, 2 / 3),
    ],
)
def test_a_difference_is_relative_to_the_larger_number_and_to_one(
    recorded: float | None, again: float, size: float | None
) -> None:
    [found] = differences(line(loss=recorded), line(loss=again))
    assert found.size == (size if size is None else pytest.approx(size))


def test_in_words() -> None:
    [found] = differences(LINE, line(loss=1.5))
    assert str(found) == "step 3, the statistic loss: 2.0 in the run, 1.5 now, which differs by 0.25"
    [found] = differences(LINE, line(calls=calls(actor_generate={"weights": "cc"})))
    assert str(found) == "step 3, the weights that were used by actor_generate: aa in the run, cc now"
