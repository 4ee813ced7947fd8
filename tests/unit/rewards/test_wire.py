"""Values between a program and its tests: what arrives is what was sent, and no text does anything else."""

import collections
import contextlib
import datetime
import decimal
import fractions
import json
import math
import sys
import types
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.rewards.wire import Codec, Table, WireError


def no_object(value: Any) -> Any:
    raise WireError("no object")


CODEC = Codec(no_object, no_object)
PLAIN = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.complex_numbers()
    | st.sampled_from([..., NotImplemented])
)
VALUES = st.recursive(
    PLAIN | st.decimals() | st.fractions() | st.dates() | st.datetimes() | st.times() | st.timedeltas(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(), inner)
        | st.sets(st.integers() | st.text())
    ),
    max_leaves=10,
)


def sent(value: Any) -> Any:
    return CODEC.unpack(Table(), json.loads(json.dumps(CODEC.pack(Table(), value))))


def written(value: Any) -> str:
    """The text of a value, which is the same for all that is alike: a set has no order, and no NaN equals another."""
    if isinstance(value, set):
        return f"set {sorted(map(written, value))}"
    if isinstance(value, dict):
        return f"dict {[(written(key), written(one)) for key, one in value.items()]}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__} {[written(one) for one in value]}"
    return f"{type(value).__name__} {value!r}"


@given(VALUES)
def test_values_arrive_as_they_are(value: Any) -> None:
    assert written(sent(value)) == written(value)


def test_shared_and_cyclic_containers_stay_so() -> None:
    row: list[Any] = [1]
    row.append(row)
    found = sent({"a": row, "b": row})
    assert found["a"] is found["b"]
    assert found["a"][1] is found["a"]


def test_an_answer_changes_the_containers_of_the_question() -> None:
    """Those alone that are changed are sent back; 1, True and 1.0 differ."""
    ours, theirs = Table(), Table()
    same, changed = [1, 2], [1, [3]]
    arrived = CODEC.unpack(theirs, CODEC.pack(ours, (same, changed)))
    arrived[1][0] = True
    arrived[1].append(arrived[0])
    answer = CODEC.pack(theirs, arrived[1])
    assert [content is None for content in answer[1]] == [True, False, True]
    assert CODEC.unpack(ours, answer) is changed
    assert repr(changed) == "[True, [3], [1, 2]]"
    assert changed[2] is same


JSON = st.recursive(
    st.none() | st.integers() | st.floats() | st.sampled_from(["cell", "plain", "tuple", "int", "list", "dict", "x"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=12,
)


@given(JSON)
def test_any_text_is_a_value_or_an_error(message: Any) -> None:
    with contextlib.suppress(WireError):
        CODEC.unpack(Table(), message)


@pytest.mark.parametrize(
    "node",
    [
        ["plain", "named", "eval"],
        ["plain", "named", "exec"],
        ["plain", "named", "open"],
        ["plain", "named", "__import__"],
        ["plain", "module", "realhf.rewards.peer"],
        ["plain", "module", "__main__"],
        ["plain", "class", "subprocess", "Popen"],
        ["plain", "class", "os", "system"],
        ["plain", "scalar", "|O", [1], "AAAAAAAAAAA="],
        ["cell", -1],
        ["cell", 0],
        {"a": 1},
    ],
)
def test_what_no_program_may_send(node: Any) -> None:
    with pytest.raises(WireError):
        CODEC.unpack(Table(), [node, []])


# --- the form of each value on the wire

KEPT = Codec(lambda value: ["kept", type(value).__name__], lambda node: ("found", node))


class Decimal:
    """Has but the name of a number."""


class OwnError(Exception):
    """Of a program: its module is none that both sides have."""


OwnError.__module__ = "__main__"
NODES: list[tuple[Any, Any]] = [
    (None, None),
    (True, True),
    (1.5, 1.5),
    ("a", "a"),
    (2**63 - 1, 2**63 - 1),
    (1 - 2**63, 1 - 2**63),
    (2**63, ["int", "0x8000000000000000"]),
    (-(2**63), ["int", "-0x8000000000000000"]),
    ((1, (2,)), ["tuple", [1, ["tuple", [2]]]]),
    (frozenset({3}), ["frozenset", [3]]),
    (range(1, 9, 2), ["range", [1, 9, 2]]),
    (slice(1, None), ["slice", [1, None, None]]),
    (int, ["plain", "named", "int"]),
    (max, ["plain", "named", "max"]),
    (b"\xff", ["plain", "bytes", "\xff"]),
    (1 - 2j, ["plain", "complex", 1.0, -2.0]),
    (..., ["plain", "singleton", "Ellipsis"]),
    (NotImplemented, ["plain", "singleton", "NotImplemented"]),
    (decimal.Decimal("1.10"), ["plain", "decimal", "1.10"]),
    (fractions.Fraction(-1, 17), ["plain", "fraction", "-0x1", "0x11"]),
    (datetime.date(2020, 1, 2), ["plain", "date", "2020-01-02", 0]),
    (datetime.datetime(2020, 1, 2, 3, fold=1), ["plain", "datetime", "2020-01-02T03:00:00", 1]),
    (datetime.time(1, 2), ["plain", "time", "01:02:00", 0]),
    (datetime.timedelta(1, 2, 3), ["plain", "timedelta", 1, 2, 3]),
    (math, ["plain", "module", "math"]),
    (ValueError, ["plain", "named", "ValueError"]),
    (json.JSONDecodeError, ["plain", "class", "json.decoder", "JSONDecodeError"]),
    (np.float32(1), ["plain", "scalar", "<f4", [], "AACAPw=="]),
]


@pytest.mark.parametrize(("value", "node"), NODES, ids=[repr(value) for value, _ in NODES])
def test_the_form_of_a_value(value: Any, node: Any) -> None:
    assert KEPT.pack(Table(), value) == [node, []]
    found = KEPT.unpack(Table(), [node, []])
    assert (type(found), found) == (type(value), value)
    if hasattr(value, "fold"):
        assert found.fold == value.fold


@pytest.mark.parametrize(
    "value",
    [
        Decimal(),
        eval,
        OwnError,
        types.ModuleType("math"),
        sys.modules["__main__"],
        np.array([None]),
        np.void(b"a"),
        type("Text", (str,), {})("a"),
        type("Table", (dict,), {})(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_data_stays_where_it_is(value: Any) -> None:
    assert KEPT.pack(Table(), value) == [["kept", type(value).__name__], []]


def test_an_error_of_a_main_module_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The main module of the other side is another one."""
    monkeypatch.setattr(sys.modules["__main__"], "OwnError", OwnError, raising=False)
    assert KEPT.pack(Table(), OwnError) == [["kept", "type"], []]


def test_a_node_that_is_no_data_is_looked_for() -> None:
    assert KEPT.unpack(Table(), [["mine", 3], []]) == ("found", ["mine", 3])


def default_of_int() -> Any:
    return collections.defaultdict(int, a=1)


CELLS: list[tuple[Any, Any]] = [
    ([1, "a"], ["list", [1, "a"], None]),
    ({"a": 1}, ["dict", [["a", 1]], None]),
    ({3}, ["set", [3], None]),
    (bytearray(b"\xff"), ["bytes", "\xff"]),
    (collections.deque([1], 3), ["deque", [1], 3]),
    (collections.OrderedDict(a=1), ["ordered", [["a", 1]], None]),
    (collections.Counter("a"), ["counter", [["a", 1]], None]),
    (default_of_int(), ["default", [["a", 1]], ["plain", "named", "int"]]),
    (np.array([[1, 2]], np.int16), ["array", "<i2", [1, 2], "AQACAA=="]),
]


@pytest.mark.parametrize(("value", "content"), CELLS, ids=[content[0] for _, content in CELLS])
def test_the_form_of_a_container(value: Any, content: Any) -> None:
    """A cell of the table, which a later message can fill with other contents."""
    ours, theirs = Table(), Table()
    assert KEPT.pack(ours, value) == [["cell", 0], [content]]
    found = KEPT.unpack(theirs, [["cell", 0], [content]])
    assert type(found) is type(value)
    assert repr(found) == repr(value)
    assert getattr(found, "default_factory", None) == getattr(value, "default_factory", None)
    # Nothing has changed: neither side says the contents again.
    assert KEPT.pack(theirs, found) == KEPT.pack(ours, value) == [["cell", 0], [None]]
    # One side empties it, and the other side follows: the same object, without what it had.
    if isinstance(value, np.ndarray):
        found[:] = 0
        empty = ["array", "<i2", [1, 2], "AAAAAA=="]
    else:
        found.clear()
        empty = [content[0], "" if content[0] == "bytes" else [], *content[2:]]
    answer = KEPT.pack(theirs, None)
    assert answer == [None, [empty]]
    assert KEPT.pack(theirs, None) == [None, [None]]  # it is said once
    assert KEPT.unpack(ours, answer) is None
    assert repr(value) == repr(found)
    assert KEPT.pack(ours, value) == [["cell", 0], [None]]


def test_a_cell_is_told_apart_from_an_equal_one() -> None:
    """By which object it is; a container in a container has a cell of its own."""
    one: list[Any] = []
    assert KEPT.pack(Table(), (one, [], one, [one])) == [
        ["tuple", [["cell", 0], ["cell", 1], ["cell", 0], ["cell", 2]]],
        [["list", [], None], ["list", [], None], ["list", [["cell", 0]], None]],
    ]


def test_an_ordered_dictionary_keeps_its_order() -> None:
    value = collections.OrderedDict(a=1, b=2, c=3)
    value.move_to_end("a")
    ours, theirs = Table(), Table()
    found = KEPT.unpack(theirs, KEPT.pack(ours, value))
    assert list(found.items()) == [("b", 2), ("c", 3), ("a", 1)]
    found.move_to_end("b")
    KEPT.unpack(ours, KEPT.pack(theirs, None))
    assert list(value) == ["c", "a", "b"]


def test_a_filled_default_dictionary_has_the_other_side_s_factory() -> None:
    table, own = Table(), default_of_int()
    table.place(own)
    table.known.append("")
    KEPT.unpack(table, [None, [["default", [["b", 2]], ["plain", "named", "list"]]]])
    assert (dict(own), own.default_factory) == ({"b": 2}, list)


def test_counts_are_set_and_not_added_up() -> None:
    table, own = Table(), collections.Counter(a=5)
    table.place(own)
    table.known.append("")
    KEPT.unpack(table, [None, [["counter", [["a", 1], ["b", 0]], None]]])
    assert dict(own) == {"a": 1, "b": 0}


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ([["cell", -1], [["list", [], None]]], "no value"),
        ([["plain", "date", "2020-01-02", 1], []], "no data: date"),
        ([["plain", "nothing"], []], "no data: nothing"),
        ([["plain", "module", "realhf.base"], []], "no module of Python or of a library"),
        ([["plain", "module", "antigravity"], []], "no module of Python or of a library"),
        ([["plain", "class", "json", "JSONDecoder"], []], "no exception"),
        ([["plain", "class", "json", "loads"], []], "no exception"),
        ([["plain", "class", "json", "nothing"], []], "no exception"),
        ([["plain", "scalar", "|O", [], "AAAAAAAAAAA="], []], "no array of numbers"),
        ([{"a": 1}, []], "no value"),
        ([["plain", "singleton", "None"], []], "no message: KeyError"),
        ([["cell", 7], []], "no message: IndexError"),
        ([1, 2, 3], "no message: ValueError"),
        ([["plain", "fraction", "0x1", "0x0"], []], "no message: ZeroDivisionError"),
        ([["range", [1, 2, 0]], []], "no message: ValueError"),
        ([["plain", "decimal", "x"], []], "no message: InvalidOperation"),
        ([["range", ["a", None, 1]], []], "no message: TypeError"),
    ],
)
def test_why_a_message_is_none(message: Any, words: str) -> None:
    def no_value(node: Any) -> Any:
        raise WireError("no value")

    with pytest.raises(WireError) as caught:
        Codec(no_object, no_value).unpack(Table(), message)
    assert str(caught.value) == words


def test_a_container_stays_of_its_kind() -> None:
    table = Table()
    table.place([1])
    table.known.append("")
    with pytest.raises(WireError, match="a container of another kind"):
        KEPT.unpack(table, [None, [["set", [1], None]]])
    assert table.objects == [[1]]
