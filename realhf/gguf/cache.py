"""The Hugging Face directory of a GGUF file, in the user's cache: made once, under the digest of the file's content."""

import contextlib
import fcntl
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec
from platformdirs import user_cache_path

from realhf.base.digest import known_digest
from realhf.base.errors import UserError
from realhf.base.files import (
    BadContentError,
    decode_json,
    naming,
    open_regular,
    read_bytes,
    sync_directory,
    write_atomically,
)

if TYPE_CHECKING:
    from realhf.gguf.folder import GGUFModel

# Raise it when the same file gives another directory than before.
_VERSION = 1
# Another process that converts the same file is waited for; the largest models take minutes.
WAIT_S = 3600.0
_DIGESTS = "digests.json"
_MODELS = ("config.json", "index.json")


def find_gguf(path: Path) -> Path | None:
    """The GGUF file that a path means: a file, or the only one in a directory that has no other model; else None.

    Raises:
        UserError: the directory has several.
    """
    if path.is_file():
        return path
    if not path.is_dir() or any((path / name).is_file() for name in _MODELS):
        return None
    found = sorted(path.glob("*.gguf"))
    if len(found) > 1:
        raise UserError(
            f"{path}: it has the GGUF files {', '.join(each.name for each in found)}; give one of them, and one that "
            "is split as a single file (llama-gguf-split --merge)"
        )
    return found[0] if found else None


def hugging_face_directory(path: Path) -> Path:
    """The directory that `GGUFModel.write` makes of a file, in the user's cache. A damaged one is made anew.

    Raises:
        UserError: the file cannot be read, or the cache not be written.
    """
    try:
        entry = user_cache_path("realhf") / "gguf" / f"{known_digest(path)}-{_VERSION}"
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give a GGUF file") from None
    if not _is_whole(entry):
        from realhf.gguf.folder import GGUFModel  # numpy and tokenizers, which help has no use for

        model = GGUFModel(path)
        try:
            with naming(entry):
                _make(model, entry)
        except OSError as error:
            raise UserError(
                f"{error.filename}: the converted {path.name} cannot be written there ({error.strerror}); make room, "
                "or name another cache folder with XDG_CACHE_HOME"
            ) from None
    return entry


def _make(model: "GGUFModel", entry: Path) -> None:
    entry.parent.mkdir(parents=True, exist_ok=True)
    with _alone(entry):
        if _is_whole(entry):  # another process has made it meanwhile
            return
        part = Path(tempfile.mkdtemp(prefix=f".{entry.name}-", dir=entry.parent))
        try:
            files = model.write(part)
            digests = {file.name: known_digest(file, sampled=True) for file in files}
            write_atomically(part / _DIGESTS, msgspec.json.encode(digests))
            shutil.rmtree(entry, ignore_errors=True)
            part.rename(entry)
            sync_directory(entry.parent)
        finally:
            shutil.rmtree(part, ignore_errors=True)


@contextlib.contextmanager
def _alone(entry: Path) -> Iterator[None]:
    """Inside, no other process makes the same entry, where the file system has locks. What a crash left is removed.

    Raises UserError where another process is still at it after `WAIT_S`.
    """
    deadline = time.monotonic() + WAIT_S
    with open_regular(lock := entry.with_name(f".{entry.name}.lock"), "ab") as file:
        try:
            while not _takes_lock(file):
                if time.monotonic() >= deadline:
                    raise UserError(
                        f"{lock}: another process has been converting the same file for {WAIT_S / 60:g} minutes; wait "
                        "for its end, or end it"
                    )
                time.sleep(0.1)
            for part in entry.parent.glob(f".{entry.name}-*"):
                shutil.rmtree(part, ignore_errors=True)
        except OSError:
            pass  # a file system without locks: every process makes its own, and the last one stays
        yield


def _takes_lock(file: IO[bytes]) -> bool:
    """Whether the lock of a file is free, which this process then has. Raises OSError where there are no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_whole(entry: Path) -> bool:
    """Whether the entry has all its files, each as it was written."""
    try:
        digests = decode_json(read_bytes(entry / _DIGESTS), dict[str, str])
        return bool(digests) and all(known_digest(entry / name, sampled=True) == digests[name] for name in digests)
    except (OSError, BadContentError):
        return False
