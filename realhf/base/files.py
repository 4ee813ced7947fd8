"""Files from outside and those that outlive a process.

They may be anything: they are opened only where they are regular, read and decoded in bounds, checked when they are
read, and replaced as a whole when they are written.
"""

import contextlib
import datetime
import errno
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from realhf.base.errors import RunError, UserError

T = TypeVar("T")

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
_REMEDIES = {
    errno.ENOSPC: "make room there",
    errno.EDQUOT: "make room there, or ask for a larger quota",
    errno.EFBIG: "allow larger files (ulimit -f)",
    errno.EROFS: "mount it writable",
    **dict.fromkeys((errno.EACCES, errno.EPERM), "let this user write there"),
    errno.EIO: "look at the disk (dmesg)",
    errno.ESTALE: "look at the mount",
    errno.ENOENT: "see who removed it",
    errno.EISDIR: "see who put a folder there",
    errno.ENOTDIR: "see who put a file in a folder's place",
    errno.ENOTEMPTY: "see who put files there",
    errno.EEXIST: "see who put a file there",
    errno.ENXIO: "see who put it there",
    errno.ELOOP: "see who put a link there",
}
# A log's last lines lie in its last bytes.
_LAST_BYTES = 2**16


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


class BadContentError(Exception):
    """Bytes are not the JSON that was expected; the text says why, for a message that names the file."""


def decode_json(content: bytes | str, expected: type[T]) -> T:
    """`content`, checked against `expected`. Raises BadContentError, for an unknown or ill-typed field too."""
    _check_depth(content)
    return _decoded(lambda: msgspec.json.decode(content, type=expected))


def decode_loose_json(content: bytes | str) -> Any:
    """The values of JSON as Python's own module reads it, with NaN and halves of characters, as other programs write
    it. Raises BadContentError; its cause is the ValueError of the module, where it raised one."""
    _check_depth(content)
    try:
        return json.loads(content)
    except RecursionError:
        raise BadContentError("it is nested too deeply") from None
    except ValueError as error:
        raise BadContentError(str(error)) from error


def _check_depth(content: bytes | str) -> None:
    if is_too_deep(content if isinstance(content, bytes) else content.encode(errors="replace")):
        raise BadContentError("it is nested too deeply")


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


def decode_yaml(content: bytes | str, expected: type[T], *, strict: bool = True) -> T:
    """As `decode_json`, for YAML; without `strict`, numbers that YAML reads as strings (1e9) count as numbers."""
    values = _decoded(lambda: msgspec.yaml.decode(content))
    if reason := _why_not_plain(values):
        raise BadContentError(reason)
    dates = (datetime.datetime, datetime.date)
    return _decoded(lambda: msgspec.convert(values, type=expected, strict=strict, builtin_types=dates))


def _why_not_plain(value: Any) -> str:
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


def _decoded(decode: Callable[[], T]) -> T:
    try:
        return decode()
    except RecursionError:
        raise BadContentError("it is nested too deeply") from None
    except Exception as error:  # also UnicodeDecodeError, and a value's own check, which names the remedy already
        raise BadContentError(str(error)) from None


def read_file(path: str | Path, decode: Callable[[bytes], T], kind: str, remedy: str) -> T:
    """The result of `decode` on a file that a user names.

    Raises:
        UserError: the file cannot be read, or `decode` raises BadContentError; the text says that it is no `kind`.
    """
    try:
        return decode(read_bytes(path))
    except OSError as error:
        raise UserError(f"{path}: cannot read the {kind} ({error.strerror}); {remedy}") from None
    except BadContentError as error:
        raise UserError(f"{path}: not a {kind}: {error}; {remedy}") from None


class OtherVersionError(BadContentError):
    """Another version of realhf has written the content, which may be intact."""


class _Header(msgspec.Struct):
    format: str = ""


def decode_versioned(content: bytes | str, expected: type[T], version: str) -> T:
    """`content`, checked against `expected`, if its field `format` is `version`.

    The format is checked first, so that fields of another version are not taken for damage.

    Raises:
        OtherVersionError: the content has another format, or none.
        BadContentError: as `decode_json`.
    """
    found = decode_json(content, _Header).format
    if found != version:
        raise OtherVersionError(f"the format is {found or 'not named'}, and this version of realhf reads {version}")
    return decode_json(content, expected)


def read_versioned(path: Path, expected: type[T], version: str) -> T | None:
    """The result of `decode_versioned` on a file that can be made again; None where there is none. Raises UserError
    where it is damaged, or another version's."""
    try:
        return decode_versioned(read_bytes(path), expected, version)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); remove it") from None
    except BadContentError as error:
        raise UserError(f"{path} is damaged ({error}); remove it") from None


def write_atomically(path: str | Path, content: bytes) -> None:
    """Writes a file, which is on the disk when this returns; a reader sees either the old or the new content.

    Raises OSError naming the file; then the old content stays, and no other file is left.
    """
    with replacing(Path(path)) as file:
        file.write(content)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write inside, which takes the place of `path` at the end. As `write_atomically`."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with naming(path):
        try:
            part.unlink(missing_ok=True)  # a crash's, or a link that somebody put there
            with open_regular(part, "xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Inside, every OSError gets the name of the file; the error of a write has none."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error  # the number selects the subclass


@contextlib.contextmanager
def writing_a_run() -> Iterator[None]:
    """Inside, a file that cannot be written ends the run: RunError names the file, the reason and the remedy."""
    try:
        yield
    except OSError as error:
        if error.errno not in _REMEDIES:  # a network error, or a timeout
            raise
        file = error.filename or "a file of the run"
        raise RunError(
            f"{file} cannot be written ({error.strerror}): {_REMEDIES[error.errno]}, then go on with --resume"
        ) from error


def last_lines(path: Path, count: int) -> str:
    """The end of a log for a message, a line break and a bar before each line; "" where it cannot be read."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, file.seek(0, 2) - _LAST_BYTES))
            lines = file.read(_LAST_BYTES).decode(errors="replace").rstrip().splitlines()
    except OSError:
        return ""
    return "".join(f"\n  | {line}" for line in lines[-count:])


def delete(path: Path) -> None:
    """Removes a file or a folder, if it is there."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


def sync_directory(directory: Path) -> None:
    """Makes new names of files in a directory durable."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
