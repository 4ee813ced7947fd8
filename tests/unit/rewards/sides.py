"""One side of a program and its tests, whose other side says what a test has written down."""

import json
import os
import struct
from collections.abc import Callable
from typing import Any

from realhf.rewards.peer import Peer

LENGTH = struct.Struct(">Q")


def values(*args: Any) -> list[Any]:
    """The message of a question's arguments."""
    return [["tuple", [["tuple", list(args)], ["tuple", []]]], []]


class Side:
    """A peer; `give` is what the other side says, all of it before it is asked, `said` what the peer has said."""

    def __init__(self, make: Callable[[int, int], Peer], last: tuple[Any, ...] = ()):
        reader, self._input = os.pipe()
        self._output, writer = os.pipe()
        for end in (reader, self._output):  # a question that has no answer is an error, and no hang
            os.set_blocking(end, False)
        self._files = [reader, writer, self._output]
        self._last = last  # behind each message
        self.peer: Any = make(reader, writer)

    def give(self, *messages: Any) -> None:
        for message in messages:
            self.write(json.dumps([*message, *self._last]).encode())

    def write(self, content: bytes, length: int | None = None) -> None:
        os.write(self._input, LENGTH.pack(len(content) if length is None else length) + content)

    def end(self) -> None:
        """The other side says no more."""
        if self._input >= 0:
            os.close(self._input)
            self._input = -1

    def stop_listening(self) -> None:
        os.close(self._output)
        self._files.remove(self._output)

    def said(self) -> list[Any]:
        try:
            content = os.read(self._output, 2**20)
        except BlockingIOError:
            return []
        found = []
        while content:
            [length] = LENGTH.unpack(content[:8])
            found.append(json.loads(content[8 : 8 + length]))
            content = content[8 + length :]
        return found

    def close(self) -> None:
        self.end()
        for file in self._files:
            os.close(file)
