"""What differs between two records of a step: in the order of computing, and by how much."""

from typing import Any

import numpy as np
import pytest

from realhf.report.differences import Difference, StepRecord
from realhf.report.differences import differences as of_records
from realhf.rundir.outputs import SAMPLE, CallOutputs, KeyOutputs
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


def differences(
    recorded: dict[str, Any],
    again: dict[str, Any],
    samples: tuple[list[Sample], list[Sample]] = ([], []),
    outputs: tuple[dict[str, CallOutputs], dict[str, CallOutputs]] = ({}, {}),
    values: tuple[Any, Any] = ({}, {}),
    *,
    exactly: bool = True,
) -> list[Difference]:
    one, other = (
        StepRecord(line=each, samples=samples[i], outputs=outputs[i], values=values[i])
        for i, each in enumerate((recorded, again))
    )
    return list(of_records(one, other, exactly=exactly))


def outputs(*of_samples: tuple[int, int], dtype: Any = "int64", key: str = "seq", digest: str = "") -> CallOutputs:
    """A key whose samples have these lengths and digests."""
    samples = np.array([*of_samples], SAMPLE).tobytes()
    made = KeyOutputs(dtype=dtype, digest=digest or str(of_samples), samples=samples)
    return CallOutputs(keys={key: made}, statistics=("kl",))


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
        "of_steps": 9,
        "reward_seconds": 0.5,
        "kl": None,
    }
    other = calls(actor_generate={"end": 9.0, "seconds": 3.0, "peak_bytes": 7})
    assert not (differences(line(of_steps=8, reward_seconds=0.25), line(**measured, calls=other)))


def test_what_one_of_both_lacks_is_no_difference() -> None:
    older = {
        name: {key: value for key, value in call.items() if "weights" not in key} for name, call in calls().items()
    }
    assert not (differences(LINE, line(calls=older, entropy=1.0), ([sample(1)], [sample(2)])))
    assert not (differences(line(calls=older), LINE))


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
    found = differences(LINE, again, samples)
    assert [each.what for each in found[:7]] == [
        "the version of the weights of actor_generate",
        "the weights that were used by actor_generate",
        "the version of the weights of actor_train_step",
        "the weights that were used by actor_train_step",
        "the weights that were made by actor_train_step",
        "the response of sample 4",
        "the reward of sample 7",
    ]
    assert {each.what for each in found[7:]} == {"the statistic loss", "the statistic tokens"}
    assert [each.call for each in found[:6]] == ["actor_generate"] * 2 + ["actor_train_step"] * 3 + [""]
    assert found[5] == Difference(3, "the response of sample 4", "'ab'", "'ba'")
    assert found[6] == Difference(3, "the reward of sample 7", 0.5, 0.75, 0.25)
    without = [each.what for each in differences(LINE, again, samples, exactly=False)]
    assert without == [each.what for each in found if "weights that" not in each.what]


def test_a_call_names_the_first_sample_of_what_it_made() -> None:
    """Between the weights that it used and those that it made; its statistics bear its name."""
    again = line(kl=3.0, loss=1.5, calls=calls(actor_train_step={"new_weights": "dd", "new_states": "ff"}))
    recorded = line(kl=2.0, calls=calls(actor_train_step={"new_states": "ee"}))
    made = (
        {"actor_generate": outputs((4, 1), (5, 2), (6, 3))},
        {"actor_generate": outputs((4, 1), (5, 9), (7, 3))},
    )
    found = differences(recorded, again, outputs=made)
    assert [(each.call, each.what) for each in found] == [
        ("actor_generate", "seq of sample 1 (and of 1 more), made by actor_generate"),
        ("actor_generate", "the statistic kl of actor_generate"),
        ("actor_train_step", "the weights that were made by actor_train_step"),
        ("actor_train_step", "the optimizer states that were made by actor_train_step"),
        ("", "the statistic loss"),
    ]
    assert (found[0].recorded, found[0].again) == ("length 5, digest 00000002", "length 5, digest 00000009")
    assert not differences(LINE, LINE, outputs=(made[0], {})), "an older version recorded none"


def test_a_digest_of_all_tells_what_those_of_samples_miss() -> None:
    made = tuple({"actor_generate": outputs((4, 1), (5, 2), digest=digest)} for digest in "ab")
    [found] = differences(LINE, LINE, outputs=(made[0], made[1]))
    assert found.what == "seq of sample 0 (and of 1 more), made by actor_generate"
    fewer = ({"actor_generate": outputs((4, 1), (5, 2))}, {"actor_generate": outputs((4, 1))})
    assert [each.again for each in differences(LINE, LINE, outputs=fewer)] == ["length 4, digest 00000001"]


def test_rounded_floats_have_other_digests_and_tokens_have_not() -> None:
    floats = [outputs((4, 1), (5, 2), dtype="float64"), outputs((4, 8), (5, 9), dtype="float64")]
    tokens = [outputs((4, 1), (5, 2)), outputs((4, 1), (5, 9))]
    for (one, other), expected in ((floats, 0), (tokens, 1)):
        made = ({"actor_generate": one}, {"actor_generate": other})
        assert len(differences(LINE, LINE, outputs=made)) == 1
        assert len(differences(LINE, LINE, outputs=made, exactly=False)) == expected
    shorter = ({"actor_generate": floats[0]}, {"actor_generate": outputs((4, 8), (3, 9), dtype="float64")})
    assert len(differences(LINE, LINE, outputs=shorter, exactly=False)) == 1


def test_recorded_values_name_the_place_and_by_how_much() -> None:
    tokens = ({"actor_generate": outputs((3, 1))}, {"actor_generate": outputs((3, 2))})
    ids = [{("actor_generate", "seq"): {0: np.array(each)}} for each in ([5, 6, 7], [5, 9, 8])]
    [found] = differences(LINE, LINE, outputs=tokens, values=(ids[0], ids[1]))
    assert found == Difference(3, "seq of sample 0, made by actor_generate, at [1]", 6, 9, None, "actor_generate")

    floats = tuple({"actor_generate": outputs((2, d), (2, d), dtype="float64", key="p")} for d in (1, 2))
    one = {("actor_generate", "p"): {0: np.array([0.5, 1.0]), 1: np.array([0.5, 1.0])}}
    other = {("actor_generate", "p"): {0: np.array([0.5, 1.25]), 1: np.array([-0.5, 2.0])}}
    [first] = differences(LINE, LINE, outputs=(floats[0], floats[1]), values=(one, other))
    assert first.what == "p of sample 0 (and of 1 more), made by actor_generate, at [1]"
    assert (first.recorded, first.again, first.size) == (1.0, 1.25, pytest.approx(0.2))
    [most] = differences(LINE, LINE, outputs=(floats[0], floats[1]), values=(one, other), exactly=False)
    assert (most.what, most.size) == ("p of sample 1, made by actor_generate, at [0]", 1.0)


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
