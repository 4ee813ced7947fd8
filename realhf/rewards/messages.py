"""Messages between a worker and its reward processes: msgpack, framed by lengths, over pipes."""

import struct
from typing import Any, Literal

import msgspec

from realhf.rewards.details import Scalar
from realhf.rewards.signature import Sample

Kind = Literal["exception", "time", "value", "none", "count", "end"]
"""Why a sample has no reward: the function raised, took too long, returned something else than a reward, all functions
returned None, a batch got too many or too few values, or the process ended."""


class Begin(msgspec.Struct, frozen=True, tag=True):
    """The first message to a process: the functions by their names, how long one call may take, and how many async
    calls are under way at a time."""

    rewards: tuple[str, ...]
    timeout_s: float
    concurrency: int


class Work(msgspec.Struct, frozen=True, tag=True):
    """One function, by its index, is to score some samples."""

    number: int
    reward: int
    samples: list[Sample]


class Function(msgspec.Struct, frozen=True):
    """A loaded function, as the worker knows it: the code itself is in reward processes alone.

    name: for statistics. place: for messages. columns: of the data, for which it has parameters without a default.
    wants_tokens, wants_token_texts: whether it asks for the ids of a response's tokens, and for the text of each.
    """

    name: str
    place: str
    weight: float
    is_batch: bool
    is_async: bool
    wants_tokens: bool
    columns: tuple[str, ...] = ()
    wants_token_texts: bool = False


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The functions are loaded, in the order of their names."""

    functions: list[Function]


class NotLoaded(msgspec.Struct, frozen=True, tag=True):
    """A function cannot be loaded; the process ends."""

    text: str


class Value(msgspec.Struct, frozen=True, tag=True):
    """The reward of one sample, or of each of its tokens: `place` among those of the work. `metrics` and `extra` are
    logged by its call: numbers of the call by name, and values of the sample by column."""

    work: int
    place: int
    value: float | list[float] | None
    seconds: float
    metrics: dict[str, float] = {}
    extra: dict[str, Scalar] = {}


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Some samples of a work have no reward. After `is_stuck` the process ends, with all that it has not yet scored."""

    work: int
    places: list[int]
    kind: Kind
    text: str
    seconds: float
    is_stuck: bool = False


ToProcess = Begin | Work
FromProcess = Loaded | NotLoaded | Value | Failed

_LENGTH = struct.Struct(">I")
_LARGE_INTEGER = 1


class Frames:
    """Bytes from a pipe, cut into messages of one of the types."""

    def __init__(self, messages: Any):
        self._decoder = msgspec.msgpack.Decoder(messages, ext_hook=_large_integer)
        self._buffer = bytearray()

    def add(self, content: bytes) -> list[Any]:
        """The messages that are complete with `content`. Raises msgspec.MsgspecError for one that is none."""
        self._buffer += content
        messages = []
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                break
            messages.append(self._decoder.decode(memoryview(self._buffer)[_LENGTH.size : end]))
            del self._buffer[:end]
        return messages


def frame(message: ToProcess | FromProcess) -> bytes:
    """A message as bytes. Raises TypeError naming a value of a row that has no form on the wire."""
    try:
        content = _ENCODER.encode(message)
    except OverflowError:  # msgpack's integers have 64 bits
        content = _ENCODER.encode(_with_large_integers(msgspec.to_builtins(message, enc_hook=_plain)))
    return _LENGTH.pack(len(content)) + content


def _plain(value: Any) -> Any:
    """Values of array libraries as Python's."""
    if callable(getattr(value, "tolist", None)):
        return value.tolist()
    raise TypeError(f"a column of the data has {type(value).__name__}, which cannot be given to a reward function")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)


def _with_large_integers(value: Any) -> Any:
    match value:
        case dict():
            return {key: _with_large_integers(one) for key, one in value.items()}
        case list() | tuple():
            return [_with_large_integers(one) for one in value]
        case int() if not -(2**63) <= value < 2**64:
            return msgspec.msgpack.Ext(_LARGE_INTEGER, b"%x" % value)
        case _:
            return value


def _large_integer(code: int, content: memoryview) -> Any:
    assert code == _LARGE_INTEGER, f"extension {code}"
    return int(bytes(content), 16)
