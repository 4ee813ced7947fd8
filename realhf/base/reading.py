"""Files from outside may be anything: they are opened only where they are regular, and read and decoded in bounds."""

import errno
import hashlib
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

# More than any configuration, plan, profile or index has.
MAX_BYTES = 2**28
# A line of a run's files, a step's metrics or a sample as text, stays far below.
MAX_LINE_BYTES = 2**25
# Deeper nesting is in no configuration, and would end in a RecursionError.
MAX_DEPTH = 64
# A YAML of a few lines can stand for billions of values, by aliases of aliases.
MAX_YAML_VALUES = 10**6

_KINDS = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
_SKIPPED_BYTES = 2**20
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_TO_BRACKETS = bytes.maketrans(b"{}", b"[]")
_OTHERS = bytes(sorted(set(range(256)) - set(b"[]{}")))


def open_regular(path: str | Path, mode: str = "rb", **options: Any) -> Any:  # as `mode` has it: BinaryIO, TextIO
    """As `open`, for a regular file alone: to open a pipe waits for another process, and a device has no end.

    A link is followed for reading, and not for writing: others who can write in the folder could choose another file.

    Raises:
        OSError: as `open`; and it is something else than a regular file.
    """
    return open(path, mode, opener=_regular, **options)


def _regular(path: str, flags: int) -> int:
    is_written = bool(flags & (os.O_WRONLY | os.O_RDWR))
    kept = flags & ~os.O_TRUNC  # the file is emptied only when it is known to be regular
    handle = os.open(path, kept | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | is_written * os.O_NOFOLLOW, 0o666)
    try:
        mode = os.fstat(handle).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not stat.S_ISREG(mode):
            kind = next((words for is_one, words in _KINDS if is_one(mode)), "no file")
            raise OSError(errno.ENXIO, f"it is {kind} instead of a regular file", path)
        if flags & os.O_TRUNC:
            os.ftruncate(handle, 0)
    except BaseException:
        os.close(handle)
        raise
    return handle


def read_bytes(path: str | Path, limit_bytes: int = MAX_BYTES) -> bytes:
    """The content of a regular file. Raises OSError, also for a file of more than `limit_bytes`."""
    with open_regular(path) as file:
        content: bytes = file.read(limit_bytes + 1)
    if len(content) > limit_bytes:
        raise OSError(errno.EFBIG, f"it has more than {limit_bytes:,} bytes", str(path))
    return content


def file_digest(path: Path) -> str:
    """The hexadecimal SHA-256 of a regular file's content. Raises OSError."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_text(path: str | Path, errors: str = "strict", limit_bytes: int = MAX_BYTES) -> str:
    """The UTF-8 text of a regular file. Raises as `read_bytes`, and UnicodeDecodeError."""
    return read_bytes(path, limit_bytes).decode(errors=errors)


def lines_within(file: BinaryIO, limit_bytes: int = MAX_LINE_BYTES) -> Iterator[bytes | None]:
    """The lines of a file with their ends; None in place of one of more than `limit_bytes`, which is never held."""
    while line := file.readline(limit_bytes + 1):
        if len(line) <= limit_bytes:
            yield line
            continue
        while not line.endswith(b"\n") and (line := file.readline(_SKIPPED_BYTES)):
            pass
        yield None


def is_too_deep(content: bytes) -> bool:
    """Whether objects and lists of a JSON text are nested deeper than `MAX_DEPTH`; False for a text that is no JSON."""
    if content.count(b"[") + content.count(b"{") <= MAX_DEPTH:
        return False
    brackets = _STRING.sub(b"", content).translate(_TO_BRACKETS, _OTHERS)
    for _ in range(MAX_DEPTH):  # takes the innermost ones away
        brackets, before = brackets.replace(b"[]", b""), brackets
        if len(brackets) == len(before):
            return False
    return bool(brackets)


def why_not_plain(value: Any) -> str:
    """Why the values of a YAML file are none of a configuration: nested too deeply, or without end; "" for none."""
    level, count = _containers([value]), 0
    for _ in range(MAX_DEPTH):
        if not level:
            return ""
        inner: list[Any] = []
        for one in level:
            inner += one.values() if isinstance(one, dict) else one
            if count + len(inner) > MAX_YAML_VALUES:
                return f"it has more than {MAX_YAML_VALUES:,} values"
        level, count = _containers(inner), count + len(inner)
    return "it is nested too deeply" if level else ""


def _containers(values: list[Any]) -> list[Any]:
    return [value for value in values if isinstance(value, dict | list | tuple | set)]
