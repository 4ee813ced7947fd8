"""Messages survive the wire unchanged; everything else is refused, and only refused."""

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect

from realhf.transport.codec import Codec, UndecodableError
from realhf.transport.messages import Heartbeat, Shutdown, ToMaster, ToWorker


def values(type_: inspect.Type) -> st.SearchStrategy[Any]:
    """All values of a type that appears in a message."""
    match type_:
        case inspect.IntType(ge=least):
            return st.integers(-(2**63) if least is None else least, 2**63 - 1)
        case inspect.FloatType():
            return st.floats(allow_nan=False)
        case inspect.StrType(pattern=pattern):
            return st.text(max_size=20) if pattern is None else st.from_regex(pattern)
        case inspect.BytesType():
            return st.binary(max_size=20)
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.LiteralType():
            return st.sampled_from(type_.values)
        case inspect.UnionType():
            return st.one_of(map(values, type_.types))
        case inspect.TupleType():
            return st.tuples(*map(values, type_.item_types))
        case inspect.VarTupleType():
            return st.lists(values(type_.item_type), max_size=3).map(tuple)
        case inspect.DictType():
            return st.dictionaries(values(type_.key_type), values(type_.value_type), max_size=3)
        case inspect.StructType() | inspect.DataclassType():
            return st.builds(type_.cls, **{field.name: values(field.type) for field in type_.fields})
    raise NotImplementedError(f"{type_}: add the strategy that makes its values")


messages = values(inspect.type_info(ToMaster))


@given(messages)
def test_a_message_comes_back_as_it_was(message: ToMaster) -> None:
    codec: Codec[ToMaster] = Codec(ToMaster)
    assert codec.decode(codec.encode(message)) == message


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_or_a_message(data: bytes) -> None:
    codec: Codec[ToMaster] = Codec(ToMaster)
    try:
        message = codec.decode(data)
    except UndecodableError:
        return
    assert isinstance(message, get_args(ToMaster))


@given(messages, st.data())
def test_a_flipped_bit_is_refused_or_a_message(message: ToMaster, data: st.DataObject) -> None:
    codec: Codec[ToMaster] = Codec(ToMaster)
    encoded = bytearray(codec.encode(message))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        changed = codec.decode(bytes(encoded))
    except UndecodableError:
        return
    assert isinstance(changed, get_args(ToMaster))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",  # a byte that msgpack never uses
        b"\xdd\xff\xff\xff\xff",  # a list that claims four thousand million entries
        b"\x91" * 200_000,  # nesting that would exhaust the stack
        msgspec.msgpack.encode({"type": "Hello", "worker": 1, "pid": 2, "host": "h", "more": 3}),
        msgspec.msgpack.encode({"type": "Hello", "worker": "1", "pid": 2, "host": "h"}),
        msgspec.msgpack.encode({"type": "os.system", "command": "true"}),
        msgspec.msgpack.encode({"type": "Reply", "request_id": 1, "span": ["compute", "a", 0.0, 1.0], "tokens": -1}),
        msgspec.msgpack.encode({"type": "Ready", "device": "CPU"}) + b"\x00",
        msgspec.msgpack.encode({"type": "Shutdown"}),  # a message, but for the other direction
    ],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    codec: Codec[ToMaster] = Codec(ToMaster)
    with pytest.raises(UndecodableError):
        codec.decode(data)


@given(values(inspect.type_info(ToWorker)))
def test_a_request_comes_back_as_it_was(message: ToWorker) -> None:
    codec: Codec[ToWorker] = Codec(ToWorker)
    assert codec.decode(codec.encode(message)) == message


def test_a_single_type_is_enough() -> None:
    codec: Codec[Shutdown] = Codec(Shutdown)
    assert codec.decode(codec.encode(Shutdown())) == Shutdown()


def test_the_size_limit_holds_on_both_sides() -> None:
    small: Codec[ToMaster] = Codec(ToMaster, max_bytes=100)
    large: Codec[ToMaster] = Codec(ToMaster)
    message = Heartbeat(activity="x" * 100)
    with pytest.raises(ValueError, match=r"a Heartbeat of \d+ bytes is over the limit of 100 bytes"):
        small.encode(message)
    with pytest.raises(UndecodableError, match="over the limit of 100"):
        small.decode(large.encode(message))
