"""Values between a program and its tests: what arrives is what was sent, and no text does anything else."""

import contextlib
import json
from typing import Any

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
