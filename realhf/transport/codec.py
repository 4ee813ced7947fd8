"""Messages to bytes and back: msgpack, checked against one type, nothing evaluated."""

from typing import Any, Generic, TypeVar

import msgspec

Message = TypeVar("Message")

DEFAULT_MAX_BYTES = 16 * 2**20


class UndecodableError(Exception):
    """The bytes are no message of the expected type. The text gives the reason, and never repeats the bytes."""


class Codec(Generic[Message]):
    """Encodes and decodes messages of one type: a tagged msgspec Struct or a union of them.

    `Codec[ToMaster](ToMaster)` is how a union is passed. A message larger than `max_bytes` is
    refused on both sides.
    """

    def __init__(self, message_type: Any, *, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(message_type)

    def encode(self, message: Message) -> bytes:
        """The bytes of `message`. Raises ValueError if it is over the size limit."""
        data = self._encoder.encode(message)
        if len(data) > self.max_bytes:
            raise ValueError(
                f"a {type(message).__name__} of {len(data)} bytes is over the limit of {self.max_bytes} bytes; "
                "tensors travel between workers, messages carry metadata only"
            )
        return data

    def decode(self, data: bytes | memoryview) -> Message:
        """The message in `data`. Raises UndecodableError if `data` is not a valid message."""
        if len(data) > self.max_bytes:
            raise UndecodableError(f"{len(data)} bytes, over the limit of {self.max_bytes}")
        try:
            return self._decoder.decode(data)
        except Exception as error:  # hostile bytes may raise more than msgspec's own errors, such as RecursionError
            raise UndecodableError(f"{type(error).__name__}: {error}") from error
