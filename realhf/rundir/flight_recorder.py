"""A flight recorder: the activity of a process, in a file that survives the process's violent end."""

import mmap
import os
import struct
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from realhf.base.files import read_bytes

# One byte that tells which of two slots is valid, padded; then the slots, each a time, a length and a text. A new text
# goes to the other slot and the byte is flipped last: a process killed in the middle of it leaves the old text whole.
_HEADER_BYTES = 8
_SLOT_BYTES = 252
_SLOT = struct.Struct("<dH")
_FILE_BYTES = _HEADER_BYTES + 2 * _SLOT_BYTES
_LATEST_S = 1e11  # no calendar has later times
MAX_TEXT_BYTES = _SLOT_BYTES - _SLOT.size


@dataclass(frozen=True, kw_only=True)
class Activity:
    """The activity of a process, and its start (seconds since the epoch)."""

    text: str
    since: float

    def __str__(self) -> str:
        return self.text


class ActivityWriter:
    """Records the current activity of this process in `path`, a few microseconds a time; for any thread.

    The file is memory-mapped: a record is in the system's hands at once, even if the process is killed the next moment.
    `main` is the activity without those of other threads beside it (`realhf.worker.move_thread`).
    """

    def __init__(self, path: Path) -> None:
        self.main = ""
        self._beside: dict[int, str] = {}  # by thread
        self._lock = threading.Lock()
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            os.posix_fallocate(handle, 0, _FILE_BYTES)  # on a full disk an error here, not a SIGBUS later
            self._map = mmap.mmap(handle, _FILE_BYTES)
        finally:
            os.close(handle)
        self._slot = 0
        self.set("")

    @property
    def text(self) -> str:
        """All that the process does."""
        return "; and ".join([self.main, *self._beside.values()])

    def set(self, text: str) -> None:
        """Records `text`, such as "step 4 actor_generate: compute"; cut at MAX_TEXT_BYTES."""
        with self._lock:
            self.main = text
            self._write()

    def set_beside(self, text: str) -> None:
        """Records the activity of the calling thread beside that; "" ends it."""
        with self._lock:
            self._beside.pop(threading.get_ident(), None)
            if text:
                self._beside[threading.get_ident()] = text
            self._write()

    def _write(self) -> None:
        data = self.text.encode(errors="replace")[:MAX_TEXT_BYTES]
        slot = 1 - self._slot
        start = _HEADER_BYTES + slot * _SLOT_BYTES
        _SLOT.pack_into(self._map, start, time.time(), len(data))
        self._map[start + _SLOT.size : start + _SLOT.size + len(data)] = data
        self._map[0] = slot
        self._slot = slot

    def close(self) -> None:
        self._map.close()


def read_activity(path: Path) -> Activity | None:
    """The last record in `path`, from a process that may be alive or dead; None if no record can be read."""
    try:
        data = read_bytes(path, _FILE_BYTES)
    except OSError:
        return None
    if len(data) != _FILE_BYTES or data[0] > 1:
        return None
    start = _HEADER_BYTES + data[0] * _SLOT_BYTES
    since, length = _SLOT.unpack_from(data, start)
    text = data[start + _SLOT.size : start + _SLOT.size + min(length, MAX_TEXT_BYTES)]
    if not text or not 0 <= since <= _LATEST_S:
        return None
    return Activity(text=text.decode(errors="replace"), since=since)
