"""What functions may return."""

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from realhf.rewards.values import BadValueError, as_reward, as_rewards, shown


class Scalar:
    """Has a number, and says nothing of its shape."""

    def item(self) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (True, 1.0),
        (3, 3.0),
        (0.25, 0.25),
        (None, None),
        (np.float32(0.5), 0.5),
        (np.int64(2), 2.0),
        (np.bool_(True), 1.0),
        (np.array([0.5]), 0.5),
        (torch.tensor(0.5), 0.5),
        (torch.tensor([[0.25]]), 0.25),
        (-0.0, -0.0),
    ],
)
def test_numbers(value: Any, number: float | None) -> None:
    found = as_reward(value)
    assert found == number
    assert type(found) is type(number)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        (np.float64("nan"), "nan"),
        ("1.0", r"'1.0' \(str\)"),
        ([1.0, 2.0], "it returned 2 numbers for a response of 1 tokens; return one for each token .*, or one number"),
        ([], "0 numbers for a response of 1 tokens"),
        (np.ones(2), "2 numbers"),
        (np.ones((2, 2)), "ndarray"),
        ([[1.0, 2.0]], r"\[1.0, 2.0\] \(list\) for token 0; return a finite number for each token"),
        ((None,), "None .* for token 0"),
        ([float("inf")], "inf .* for token 0"),
        (["1"], "'1' .* for token 0"),
        ({1.0}, "set"),
        ({"score": 1}, "dict"),
        (10**400, "beyond all floats"),
        (1j, "complex"),
        (np.array(["1"]), "ndarray"),
        (np.empty(0), "0 numbers"),
        (Scalar(), "Scalar"),
        (10**308 * 10, "beyond all floats"),
    ],
)
def test_what_is_no_number(value: Any, words: str) -> None:
    with pytest.raises(BadValueError, match=words):
        as_reward(value)


@pytest.mark.parametrize(
    "values", [[1, True, 0.5], (1.0, 1, 0.5), np.array([1, 1, 0.5]), torch.tensor([1, 1, 0.5]), [np.float32(1), 1, 0.5]]
)
def test_numbers_of_tokens(values: Any) -> None:
    found = as_reward(values, "texts", 3)
    assert found == [1.0, 1.0, 0.5]
    assert {type(number) for number in found} == {float}
    with pytest.raises(BadValueError, match="3 numbers for a response of 4 tokens"):
        as_reward(values, "texts", 4)


def test_numbers_of_few_tokens() -> None:
    assert as_reward([], "texts", 0) == []
    assert as_reward([0.5]) == [0.5]
    assert as_reward({"score": [0.5, 1]}, "verl", 2) == [0.5, 1.0]


def test_verl_may_return_a_dict() -> None:
    assert as_reward({"score": 0.5, "acc": True}, "verl") == 0.5
    assert as_reward(1, "verl") == 1
    assert as_reward({"score": None}, "verl") is None
    with pytest.raises(BadValueError, match="without 'score'"):
        as_reward({"acc": 1}, "verl")
    with pytest.raises(BadValueError, match="it returned nan; return a finite number"):
        as_reward({"score": float("nan")}, "verl")


@pytest.mark.parametrize(("count", "expected"), [(78, "'" + "x" * 78 + "'"), (79, "'" + "x" * 79 + "...")])
def test_a_value_is_shown_in_a_few_words(count: int, expected: str) -> None:
    assert shown("x" * count) == f"{expected} (str)"


def test_a_forgotten_async() -> None:
    async def reward() -> float: ...

    one = reward()
    with pytest.raises(BadValueError, match="declare it with `async def`"):
        as_reward(one)
    assert inspect.getcoroutinestate(one) == inspect.CORO_CLOSED
    other = reward()
    with pytest.raises(BadValueError, match="declare it with `async def`"):
        as_rewards(other, 2, "trl")
    assert inspect.getcoroutinestate(other) == inspect.CORO_CLOSED


def test_an_object_whose_repr_raises() -> None:
    class Bad:
        def __repr__(self) -> str:
            raise RuntimeError

    with pytest.raises(BadValueError, match="repr raises RuntimeError"):
        as_reward(Bad())


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False) | st.none(), max_size=5))
def test_batches(values: list[float | None]) -> None:
    assert as_rewards(values, len(values), "trl") == values
    assert as_rewards(tuple(values), len(values), "trl") == values
    with pytest.raises(BadValueError, match=f"{len(values)} rewards for a batch of {len(values) + 1}"):
        as_rewards(values, len(values) + 1, "trl")


def test_arrays_are_lists() -> None:
    assert as_rewards(np.array([1.0, 2.0]), 2, "trl") == [1.0, 2.0]
    assert as_rewards(torch.tensor([1.0, 2.0]), 2, "trl") == [1.0, 2.0]
    assert [type(one) for one in as_rewards(np.array([1.0]), 1, "trl")] == [float]
    for value in ("ab", b"ab", 1.0, None, {"a": 1}, np.ones((2, 2)), np.array(1.0)):
        with pytest.raises(BadValueError, match="a list of 2"):
            as_rewards(value, 2, "trl")
