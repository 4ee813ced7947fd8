"""What a worker and its reward processes say to each other arrives whole, however it is cut."""

from typing import Any

import msgspec
import numpy as np
import pytest

from realhf.rewards.messages import (
    Begin,
    Failed,
    Frames,
    FromProcess,
    Function,
    Loaded,
    NotLoaded,
    ToProcess,
    Value,
    Work,
    frame,
)
from tests.unit.rewards.samples import sample

REPLIES = [
    Loaded([Function("f", "f (r.py:1)", 0.5, True, False, True)]),
    NotLoaded("no such file"),
    Value(3, 1, None, 0.25),
    Failed(2, [0, 4], "time", "too late", 1.5, is_stuck=True),
]


def test_a_failure_is_of_a_process_that_goes_on_unless_it_says_otherwise() -> None:
    assert not Failed(0, [0], "end", "", 0.0).is_stuck


@pytest.mark.parametrize("size", [1, 3, 5, 1000])
def test_messages_are_put_together_from_pieces(size: int) -> None:
    content, frames = b"".join(map(frame, REPLIES)), Frames(FromProcess)
    pieces = [content[begin : begin + size] for begin in range(0, len(content), size)]
    assert [message for piece in pieces for message in frames.add(piece)] == REPLIES


def test_a_message_is_there_with_its_last_byte_and_the_next_one_waits() -> None:
    first, second, frames = frame(REPLIES[2]), frame(REPLIES[1]), Frames(FromProcess)
    assert frames.add(first[:-1]) == []
    assert frames.add(first[-1:] + second[:4]) == [REPLIES[2]]
    assert frames.add(second[4:]) == [REPLIES[1]]


def test_the_length_stands_before_a_message_in_four_bytes() -> None:
    content = frame(Begin(("r.py:f",), 2.0, 7))
    assert int.from_bytes(content[:4], "big") == len(content) - 4
    assert Frames(ToProcess).add(content) == [Begin(("r.py:f",), 2.0, 7)]


@pytest.mark.parametrize("of", [FromProcess, ToProcess])
def test_what_is_no_message_is_an_error(of: Any) -> None:
    with pytest.raises(msgspec.MsgspecError):
        Frames(of).add(b"\0\0\0\1\xc1")
    with pytest.raises(msgspec.MsgspecError):
        Frames(of).add(b"\0\0\0\0")  # nothing at all


def arrived(row: dict[str, Any]) -> dict[str, Any]:
    [work] = Frames(ToProcess).add(frame(Work(0, 1, [sample(row=row)])))
    assert (work.number, work.reward) == (0, 1)
    [found] = work.samples
    return dict(found.row)


INTEGERS = [0, -(2**63), 2**64 - 1, -(2**63) - 1, 2**64, 16**20 + 10, -(16**20) - 10]


def test_integers_of_any_size_arrive_wherever_they_stand() -> None:
    row = {"list": INTEGERS, "tuple": tuple(INTEGERS), "deep": {"a": [{"b": number} for number in INTEGERS]}, "x": "y"}
    assert arrived(row) == {**row, "tuple": INTEGERS}


def test_integers_of_64_bits_have_the_form_that_all_readers_of_msgpack_know() -> None:
    """Larger ones are extension 1: the number in hexadecimal."""
    content = frame(Work(0, 0, [sample(row={"all": INTEGERS})]))[4:]
    found = msgspec.msgpack.decode(content)["samples"][0]["row"]["all"]
    assert found[:3] == INTEGERS[:3]
    assert [(one.code, bytes(one.data)) for one in found[3:]] == [
        (1, b"-8000000000000001"),
        (1, b"10000000000000000"),
        (1, b"10000000000000000000a"),
        (1, b"-10000000000000000000a"),
    ]


def test_numbers_of_numpy_arrive_as_python_s() -> None:
    assert arrived({"a": np.float64(0.5), "b": np.arange(3), "large": 2**70, "c": np.int8(-1)}) == {
        "a": 0.5,
        "b": [0, 1, 2],
        "large": 2**70,
        "c": -1,
    }


@pytest.mark.parametrize("more", [{}, {"large": 2**70}])
def test_a_column_that_has_no_form_is_named_by_its_type(more: dict[str, Any]) -> None:
    class Picture:
        tolist = None

    with pytest.raises(TypeError, match=r"^a column of the data has Picture, which cannot be given to a reward functi"):
        frame(Work(0, 0, [sample(row={"a": Picture(), **more})]))
