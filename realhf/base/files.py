"""Files that outlive a process: read without trust, written so that they are old or new and never a part."""

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from realhf.base.errors import RunError, UserError

T = TypeVar("T")

_REMEDIES = {
    errno.ENOSPC: "make room there",
    errno.EDQUOT: "make room there, or ask for a larger quota",
    errno.EFBIG: "allow larger files (ulimit -f)",
    errno.EROFS: "mount it writable",
    errno.EACCES: "let this user write there",
    errno.EPERM: "let this user write there",
    errno.EIO: "look at the disk (dmesg)",
    errno.ESTALE: "look at the mount",
    errno.ENOENT: "see who removed it",
    errno.EISDIR: "see who put a folder there",
    errno.ENOTDIR: "see who put a file in a folder's place",
    errno.ENOTEMPTY: "see who put files there",
    errno.EEXIST: "see who put a file there",
}


class BadContentError(Exception):
    """Bytes are not the JSON that was expected; the text says why, for a message that names the file."""


def decode_json(content: bytes | str, expected: type[T]) -> T:
    """`content`, checked against `expected`.

    Raises:
        BadContentError: whatever decoding found: no JSON, no UTF-8, nested too deeply, an unknown or ill-typed field.
    """
    return _decoded(lambda: msgspec.json.decode(content, type=expected))


def decode_yaml(content: bytes | str, expected: type[T], *, strict: bool = True) -> T:
    """As `decode_json`, for YAML; without `strict`, numbers may be written as YAML takes for strings (1e9)."""
    return _decoded(lambda: msgspec.yaml.decode(content, type=expected, strict=strict))


def _decoded(decode: Callable[[], T]) -> T:
    try:
        return decode()
    except UserError as error:  # a value's own check, which names the remedy already
        raise BadContentError(str(error)) from None
    except RecursionError:
        raise BadContentError("it is nested too deeply") from None
    except Exception as error:  # UnicodeDecodeError is no MsgspecError, and there may be more of them
        raise BadContentError(str(error)) from None


def read_file(path: str | Path, decode: Callable[[bytes], T], kind: str, remedy: str) -> T:
    """What `decode` makes of a file that a user names.

    Raises:
        UserError: the file cannot be read, or `decode` raises BadContentError; the text says that it is no `kind`.
    """
    try:
        return decode(Path(path).read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot read the {kind} ({error.strerror}); {remedy}") from None
    except BadContentError as error:
        raise UserError(f"{path}: not a {kind}: {error}; {remedy}") from None


class OtherVersionError(BadContentError):
    """Another version of realhf has written it, and it may be good."""


class _Header(msgspec.Struct):
    format: str = ""


def decode_versioned(content: bytes | str, expected: type[T], version: str) -> T:
    """`content`, checked against `expected`, if its field `format` is `version`.

    The format is looked at first: fields of another version are no damage.

    Raises:
        OtherVersionError: it has another format, or none.
        BadContentError: as `decode_json`.
    """
    found = decode_json(content, _Header).format
    if found != version:
        raise OtherVersionError(f"the format is {found or 'not named'}, and this version of realhf reads {version}")
    return decode_json(content, expected)


def write_atomically(path: str | Path, content: bytes) -> None:
    """Writes a file that is on the disk when this returns; a reader sees the old content or the new, never a part.

    Raises:
        OSError: naming the file, which cannot be written; it is as it was, and no other is left.
    """
    path = Path(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with naming(path):
        try:
            with part.open("wb") as file:
                file.write(content)
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
    """Inside, every OSError gets the name of the file that matters: that of a write has none of its own."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error  # of the class of its number


@contextlib.contextmanager
def writing_a_run() -> Iterator[None]:
    """Inside, a file of a run directory that the system does not let be written ends the run, and says why.

    Raises:
        RunError: naming the file, the system's reason and the remedy.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _REMEDIES:  # of a network, or a timeout
            raise
        file = error.filename or "a file of the run"
        raise RunError(
            f"{file} cannot be written ({error.strerror}): {_REMEDIES[error.errno]}, then go on with --resume"
        ) from error


def delete(path: Path) -> None:
    """Removes whatever lies there, if anything does."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


def sync_directory(directory: Path) -> None:
    """Puts the names of a directory's files on the disk, after a file was made or renamed there."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
