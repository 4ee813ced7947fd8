"""The side of a program of unknown origin: loads it, and carries out the operations of the tests on its objects.

Nothing here is a secret from the program, which may replace all of it. The process sends values; the other side decides
whether they are right, in `realhf.rewards.tests_of_program`.
"""

import builtins
import io
import sys
import types
from typing import Any

from realhf.rewards.peer import Peer, call_special, data_of

_MOST_PRINTED = 2**20


def serve_program(reader: int, writer: int, file: str) -> None:
    """Serves the program in `file` until the tests have ended."""
    peer = _ProgramPeer(reader, writer, file)
    sys.argv = [file]
    sys.stdout = sys.stderr = io.TextIOWrapper(peer.printed, "utf-8", errors="replace", write_through=True)
    sys.stdin = io.TextIOWrapper(io.BufferedReader(_Asked(peer)), "utf-8")
    builtins.input = lambda prompt="", /: peer.ask("input", None, str(prompt))
    peer.serve()


class _ProgramPeer(Peer):
    def __init__(self, reader: int, writer: int, file: str):
        super().__init__(reader, writer)
        self.printed = _Printed()
        self._file = file
        self._names: dict[str, Any] = {}

    def perform(self, what: str, subject: Any, args: Any, kwargs: Any) -> Any:
        match what:
            case "load":
                return self._load()
            case "name":
                return self._names[subject]
            case "special":
                return call_special(self.own(subject), args[0], args[1:], kwargs)
            case "get":
                return getattr(self.own(subject), *args)
            case "set":
                return setattr(self.own(subject), *args)
            case "delete":
                return delattr(self.own(subject), *args)
            case "data":
                return data_of(self.own(subject), *args)
            case "isinstance":
                [one] = args
                return isinstance(one, self.own(subject))
            case "issubclass":
                [one] = args
                return issubclass(one, self.own(subject))
            case "await":
                import asyncio  # a program without coroutines starts sooner

                return asyncio.run(_wait_for(self.own(subject)))
        raise LookupError(what)

    def _load(self) -> None:
        """Runs the program, as the main module of this process."""
        module = types.ModuleType("__main__")
        module.__file__ = self._file
        self._names = vars(module)
        sys.modules["__main__"] = module
        with open(self._file, "rb") as file:
            source = file.read()
        exec(compile(source, self._file, "exec"), self._names)

    def _send(self, message: list[Any]) -> None:
        super()._send([*message, self.printed.take()])


async def _wait_for(one: Any) -> Any:
    return await one


class _Printed(io.RawIOBase):
    """Takes the output of the program, up to a limit."""

    def __init__(self) -> None:
        self._content = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        data = bytes(content)
        self._content += data[: _MOST_PRINTED - len(self._content)]
        return len(data)

    def take(self) -> str:
        """The output since the last call."""
        text, self._content = self._content.decode("utf-8", "replace"), bytearray()
        return text


class _Asked(io.RawIOBase):
    """Standard input, line by line as the tests' own has it."""

    def __init__(self, peer: Peer):
        self._peer, self._rest = peer, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._rest:
            self._rest = str(self._peer.ask("readline", None)).encode("utf-8", "replace")
        part, self._rest = self._rest[: len(buffer)], self._rest[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)
