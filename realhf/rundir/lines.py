"""JSON lines of a run: appended one at a time, and read back without those that a crash or a disk has damaged."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta

from realhf.base.files import MAX_LINE_BYTES, BadContentError, decode_json, lines_within, naming, open_regular

T = TypeVar("T")

_TOO_LONG = f"it has more than {MAX_LINE_BYTES:,} bytes"
# The numbers that arithmetic and the calendar can take: beyond them there is no step, duration or time of a run.
Step = Annotated[int, Meta(ge=0, le=2**53)]
Seconds = Annotated[float, Meta(ge=-1e9, le=1e9)]  # below 0 where somebody set the clock back
Time = Annotated[float, Meta(ge=0, le=1e11)]  # since the epoch
Bytes = Annotated[int, Meta(ge=0, le=2**62)]


class _Moved(msgspec.Struct):
    bytes: Bytes
    whole_bytes: Bytes


class _Call(msgspec.Struct):
    start: Time
    end: Time
    seconds: Seconds
    predicted_s: Seconds | None
    moved: _Moved | None = None


class _Step(msgspec.Struct):
    """The fields of a line of `metrics.jsonl` besides the step's statistics."""

    step: Step
    time_s: Seconds
    tokens: Step
    tokens_per_s: float
    calls: dict[str, _Call]
    peak_bytes: list[Bytes] = []
    plan: str = ""
    num_workers: int = 0
    of_steps: Step = 0


class _Evaluation(msgspec.Struct):
    step: Step


def step_line(line: bytes) -> dict[str, Any]:
    """A line of `metrics.jsonl`. Raises BadContentError."""
    decode_json(line, _Step)
    return decode_json(line, dict[str, Any])


def evaluation_line(line: bytes) -> dict[str, Any]:
    """A line of `evaluations.jsonl`. Raises BadContentError."""
    decode_json(line, _Evaluation)
    return decode_json(line, dict[str, Any])


@dataclass(frozen=True)
class Lines(Generic[T]):
    """The good lines of a file, and a sentence about the others where there are any."""

    values: list[T]
    damaged: tuple[str, ...] = ()


def append_line(path: Path, value: Any) -> None:
    """Adds a line, also behind one that a crash cut off; readers see it at once.

    Raises OSError naming the file; a part of the line may have been written.
    """
    line = msgspec.json.encode(value) + b"\n"
    with naming(path), open_regular(path, "a+b") as file:
        if file.seek(0, 2):
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                line = b"\n" + line
        file.write(line)


def read_lines(path: Path, decode: Callable[[bytes], T], *, tail_bytes: int | None = None) -> Lines[T]:
    """The lines of a file, or in its last `tail_bytes`; those for which `decode` raises BadContentError are damaged.

    There are none where there is no file. A last line without its end is left out without a word: it is still being
    written, or its writer died.
    """
    values: list[T] = []
    bad: list[tuple[int, BadContentError]] = []
    ended = 0  # lines that have their end
    try:
        with open_regular(path) as file:
            start = max(0, file.seek(0, 2) - tail_bytes) if tail_bytes is not None else 0
            file.seek(start)
            for number, line in enumerate(lines_within(file), start=1):
                ended += line is None or line.endswith(b"\n")
                if start and number == 1:  # the seek has cut that one
                    continue
                try:
                    values.append(decode(_whole(line).removesuffix(b"\n")))
                except BadContentError as error:
                    if number == ended:
                        bad.append((number, error))
    except FileNotFoundError:
        return Lines([])
    except OSError as error:
        return Lines([], (f"{path} cannot be read ({error.strerror})",))
    if not bad:
        return Lines(values)
    number, reason = bad[0]
    where = f"line {ended - number + 1} from the end" if start else f"line {number}"
    others = f"; {len(bad) - 1} more" if len(bad) > 1 else ""
    return Lines(values, (f"{path} has lines that cannot be read and are left out: {where}: {reason}{others}",))


def _whole(line: bytes | None) -> bytes:
    if line is None:
        raise BadContentError(_TOO_LONG)
    return line


def read_spread(
    path: Path, decode: Callable[[bytes], T], places: int, window_bytes: int, *, end: int | None = None
) -> Iterator[tuple[int, list[T]]]:
    """From `places` even places of a file, its beginning first: the offset, and the good lines of the window there.

    The file counts up to the byte `end`. A window may hold no whole line.
    """
    try:
        with open_regular(path) as file:
            stop = min(file.seek(0, 2), 2**62 if end is None else end)
            for place in range(places):
                offset = stop * place // places
                file.seek(offset)
                lines = file.read(min(window_bytes, stop - offset)).split(b"\n")[1 if offset else 0 : -1]
                values: list[T] = []
                for line in lines:
                    with contextlib.suppress(BadContentError):
                        values.append(decode(line))
                yield offset, values
    except OSError:  # `read_lines` says why
        return


class Tail(Generic[T]):
    """The lines that a file gained since the last look, at first since construction. `say` is told of those for which
    `decode` raises BadContentError; they are left out."""

    def __init__(self, path: Path, decode: Callable[[bytes], T], say: Callable[[str], None]):
        self._path, self._decode, self._say = path, decode, say
        self._offset = path.stat().st_size if path.is_file() else 0

    def read(self) -> Iterator[T]:
        if not self._path.is_file():
            return
        with open_regular(self._path) as file:
            file.seek(self._offset)
            for line in lines_within(file):
                if line is not None and not line.endswith(b"\n"):
                    break
                self._offset = file.tell()
                try:
                    value = self._decode(_whole(line))
                except BadContentError as error:
                    self._say(f"{self._path} has gained a line that cannot be read and is left out: {error}")
                else:
                    yield value
