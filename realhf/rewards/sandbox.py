"""Runs programs of unknown origin, as models write them, against tests, with limits that need no privileges."""

import contextlib
import json
import logging
import math
import os
import secrets
import select
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

from realhf.base.errors import UserError
from realhf.base.numbers import check_range
from realhf.rewards import sandbox_process

logger = logging.getLogger("realhf.rewards")

_LOOK_S = 0.1
_MIB = 2**20
_OPEN_FILES = 64
_THREADS = 512
# A file or folder takes this much at least: otherwise empty ones would take nothing.
_ENTRY_BYTES = 4096
_SPARE_ENTRIES = 64
_MOST_ENTRIES = 2**20
_MOST_OUTCOMES_BYTES = 2**24
_READ_BYTES = 2**16


@dataclass(frozen=True, kw_only=True)
class Limits:
    """time_s: from start to end. memory_mb: of the address space. files_mb: of all files that the program writes."""

    time_s: float = 10.0
    memory_mb: int = 1024
    files_mb: int = 16

    def __post_init__(self) -> None:
        check_range("time_s", self.time_s, 0.01, 3600, "s")
        check_range("memory_mb", self.memory_mb, 64, 2**20, "MiB")
        check_range("files_mb", self.files_mb, 0, 2**20, "MiB")

    @property
    def files_bytes(self) -> int:
        """The most bytes of all files together."""
        return self.files_mb * _MIB

    @property
    def entries(self) -> int:
        """How many files and folders there may be."""
        return self.files_bytes // _ENTRY_BYTES + _SPARE_ENTRIES


def run_tests(program: str, tests: Sequence[str], limits: Limits) -> list[str] | None:
    """Runs `program` in an empty folder that is removed afterwards, with an empty input and a bare environment, and the
    tests, pieces of Python code that find its names, in a process of their own.

    Returns:
        by test "" if it passed, else its exception; None if the program could not be loaded, or broke a limit.

    Raises:
        UserError: no temporary folder can be made.
    """
    try:
        return _outcomes(program, tests, limits, own_files=_grants_own_files())
    except OSError as error:
        raise UserError(
            f"a program cannot be run in {tempfile.gettempdir()} ({error}); set TMPDIR to a folder of yours"
        ) from None


def _outcomes(program: str, tests: Sequence[str], limits: Limits, *, own_files: bool) -> list[str] | None:
    """See `run_tests`. With `own_files` the program has a file system of its own."""
    with _own_folder() as folder:
        request = _request(folder, program, limits, own_files=own_files)
        with _unnamed_file(request) as first, _unnamed_file(list(tests)) as second:
            return _Run(folder, request, [first, second], limits).outcomes()


class _Run:
    """The processes of a sandbox, watched until they end or have to be ended."""

    def __init__(self, folder: str, request: dict[str, Any], files: Sequence[IO[bytes]], limits: Limits):
        self._folder, self._limits = folder, limits
        self._own_files: bool = request["own_files"]
        self._most_bytes: int = request["files_bytes"]
        self._deadline = time.monotonic() + limits.time_s
        self._reader, writer = os.pipe()
        try:
            self._child = start(folder, [*(file.fileno() for file in files), writer])
        except BaseException:
            os.close(self._reader)
            raise
        finally:
            os.close(writer)

    def outcomes(self) -> list[str] | None:
        """See `run_tests`."""
        try:
            content = self._wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()
            os.close(self._reader)
        if content is None or self._child.returncode != 0:
            return None
        found: list[str] | None = json.loads(content)
        return found

    def _wait(self) -> bytes | None:
        """The whole output of the tests' process; None if it broke a limit."""
        content = b""
        while (left_s := self._deadline - time.monotonic()) > 0:
            if select.select([self._reader], [], [], min(_LOOK_S, left_s))[0]:
                part = os.read(self._reader, _READ_BYTES)
                content += part
                if not part:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self._child.wait(max(0.0, self._deadline - time.monotonic()))
                        return content
                    return None
                if len(content) > _MOST_OUTCOMES_BYTES:
                    return None
            elif self._breaks_a_limit():
                return None
        return None

    def _breaks_a_limit(self) -> bool:
        processes = list(_group(self._child.pid))
        if sum(_threads(process) for process in processes) > _THREADS:
            return True
        if self._own_files:
            return False
        used: float = _used_bytes(self._folder, self._limits.entries)
        used += sum(_unnamed_bytes(process, self._folder) for process in processes)
        return used > self._most_bytes


# --- starting it


def start(folder: str, files: Sequence[int]) -> "subprocess.Popen[bytes]":
    """Starts the processes of a sandbox; `files` are the open ones of `sandbox_process.main`."""
    return subprocess.Popen(
        [sys.executable, "-I", sandbox_process.__file__, *(str(file) for file in files)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=files,
        start_new_session=True,
        env={
            "PATH": "/usr/bin:/bin",
            "HOME": folder,
            "TMPDIR": folder,
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        },
    )


def _request(folder: str, program: str, limits: Limits, *, own_files: bool) -> dict[str, Any]:
    """For `sandbox_process.main`."""
    resources = {
        "CPU": math.ceil(limits.time_s) + 1,
        "AS": limits.memory_mb * _MIB,
        "FSIZE": limits.files_bytes,
        "NOFILE": _OPEN_FILES,
        "CORE": 0,
        "MSGQUEUE": 0,
        "MEMLOCK": 0,
        "RTPRIO": 0,
    }
    if own_files:  # the user's other processes do not count in a namespace
        resources["NPROC"] = _THREADS
    return {
        "parent": os.getpid(),
        "folder": folder,
        "program": program,
        "own_files": own_files,
        "files_bytes": limits.files_bytes + _room_bytes(program),
        "entries": limits.entries,
        "readable": sorted({sys.prefix, sys.base_prefix, *(p for p in sys.path if "site-packages" in p)}),
        "limits": resources,
    }


def _room_bytes(program: str) -> int:
    """Bytes for the program's own file, and for the entries of a file system."""
    return len(program.encode("utf-8", "surrogatepass")) + _SPARE_ENTRIES * _ENTRY_BYTES


@cache
def _grants_own_files() -> bool:
    """Whether this kernel grants programs a file system of their own; found out by starting one."""
    return _outcomes("", [], Limits(time_s=60.0), own_files=True) == []


@contextlib.contextmanager
def _unnamed_file(content: object) -> Iterator[IO[bytes]]:
    """A file with this content as JSON, to be read from its beginning."""
    with tempfile.TemporaryFile() as file:
        file.write(json.dumps(content).encode())
        file.seek(0)  # which writes it out
        yield file


# --- watching it


def _group(leader: int) -> Iterator[int]:
    """A process and its children."""
    yield leader
    with contextlib.suppress(OSError):
        yield from (int(word) for word in Path(f"/proc/{leader}/task/{leader}/children").read_text().split())


def _threads(process: int) -> int:
    try:
        return len(os.listdir(f"/proc/{process}/task"))
    except OSError:
        return 0


def _used_bytes(folder: str, entries: int) -> float:
    """Bytes of all files that have a name; infinite if there are more than `entries`, or if a path is too long."""
    total, count, folders = 0.0, 0, [folder]
    while folders:
        try:
            with os.scandir(folders.pop()) as found:
                for entry in found:
                    count += 1
                    if count > entries:
                        return math.inf
                    with contextlib.suppress(FileNotFoundError):
                        total += max(_ENTRY_BYTES, entry.stat(follow_symlinks=False).st_size)
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
        except FileNotFoundError:
            pass
        except OSError:  # a path that is too long, or a folder that cannot be read
            return math.inf
    return total


def _unnamed_bytes(process: int, folder: str) -> float:
    """Bytes of open files without a name; infinite if one is mapped, because its size cannot be seen."""
    total, device = 0.0, os.stat(folder).st_dev
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{process}/fd"):
            with contextlib.suppress(OSError):
                of = os.stat(f"/proc/{process}/fd/{name}")
                if stat.S_ISREG(of.st_mode) and of.st_nlink == 0 and of.st_dev == device:
                    total += of.st_size
        maps = Path(f"/proc/{process}/maps").read_text()
        if any(line.endswith(" (deleted)") and f" {folder}/" in line for line in maps.splitlines()):
            return math.inf
    return total


# --- removing leftovers


@contextlib.contextmanager
def _own_folder() -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="realhf-program-")
    try:
        yield folder
    finally:
        remove_tree(folder)


def remove_tree(folder: str) -> None:
    """Removes a folder that no process changes any more, however deep it is: nested folders are moved to its top first,
    so no path is long and nothing recurses. Warns if it has more than 2^20 entries, and leaves the rest."""
    top = os.open(folder, os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        prefix = f"removed-{secrets.token_hex(8)}"  # no name of the program's
        count, pending = 0, _emptied(top, top, f"{prefix}-0")
        while pending and count < _MOST_ENTRIES:
            name = pending.pop()
            opened = os.open(name, os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
            try:
                pending += _emptied(opened, top, f"{prefix}-{(count := count + 1)}")
            finally:
                os.close(opened)
            os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    try:
        os.rmdir(folder)
    except OSError as error:
        logger.warning("unit tests: %s is left (%s); remove it", folder, error)


def _emptied(opened: int, top: int, prefix: str) -> list[str]:
    """Removes a folder's files and moves its folders to the top; returns their names there."""
    moved = []
    for i, name in enumerate(os.listdir(opened)):
        if stat.S_ISDIR(os.lstat(name, dir_fd=opened).st_mode):
            os.chmod(name, 0o700, dir_fd=opened)  # a program may have made it without rights
            target = f"{prefix}-{i}"
            os.rename(name, target, src_dir_fd=opened, dst_dir_fd=top)
            moved.append(target)
        else:
            os.unlink(name, dir_fd=opened)
    return moved
