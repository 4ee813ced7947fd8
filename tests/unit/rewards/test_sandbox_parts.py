"""A sandbox from outside: what its processes are told, how they are watched, what is made of their outcomes."""

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from realhf.base.errors import UserError
from realhf.rewards import sandbox, sandbox_process
from realhf.rewards.sandbox import Limits, _Run

LIMITS = Limits(time_s=4.0, memory_mb=100, files_mb=3)


# --- limits and the request


def test_what_holds_where_nothing_is_said() -> None:
    assert Limits() == Limits(time_s=10.0, memory_mb=1024, files_mb=16)
    assert (Limits().files_bytes, Limits().entries) == (16 * 2**20, 4096 + 64)


@pytest.mark.parametrize(
    ("name", "low", "high", "below", "above"),
    [
        ("time_s", 0.01, 3600, 0.009, 3600.5),
        ("memory_mb", 64, 2**20, 63, 2**20 + 1),
        ("files_mb", 0, 2**20, -1, 2**20 + 1),
    ],
)
def test_the_range_of_limits(name: str, low: Any, high: Any, below: Any, above: Any) -> None:
    make: Callable[..., Limits] = Limits
    for value in (low, high):
        assert getattr(make(**{name: value}), name) == value
    for value in (below, above):
        with pytest.raises(UserError, match=name):
            make(**{name: value})


@pytest.mark.parametrize("own_files", [False, True])
def test_what_a_sandbox_is_told(own_files: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["/b/site-packages", "/home/user", "/a/site-packages/x"])
    monkeypatch.setattr(sys, "prefix", "/own")
    monkeypatch.setattr(sys, "base_prefix", "/base")
    text = "ä\ud800"  # five bytes
    found = sandbox._request("/tmp/x", text, Limits(time_s=4.2, memory_mb=100, files_mb=3), own_files=own_files)
    limits = {
        "CPU": 6,
        "AS": 100 * 2**20,
        "FSIZE": 3 * 2**20,
        "NOFILE": 64,
        "CORE": 0,
        "MSGQUEUE": 0,
        "MEMLOCK": 0,
        "RTPRIO": 0,
    }
    assert found == {
        "parent": os.getpid(),
        "folder": "/tmp/x",
        "program": text,
        "own_files": own_files,
        "files_bytes": 3 * 2**20 + 5 + 64 * 4096,
        "entries": 768 + 64,
        "readable": ["/a/site-packages/x", "/b/site-packages", "/base", "/own"],
        "limits": {**limits, "NPROC": 512} if own_files else limits,
    }


def test_how_a_sandbox_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Isolated, in a session of its own, with three descriptors and nothing of the user's environment."""
    started: list[Any] = []
    monkeypatch.setattr(subprocess, "Popen", lambda words, **options: started.append((words, options)))
    sandbox.start("/tmp/x", [5, 7, 9])
    null = subprocess.DEVNULL
    options = {
        "stdin": null,
        "stdout": null,
        "stderr": null,
        "pass_fds": [5, 7, 9],
        "start_new_session": True,
        "env": {
            "PATH": "/usr/bin:/bin",
            "HOME": "/tmp/x",
            "TMPDIR": "/tmp/x",
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        },
    }
    assert started == [([sys.executable, "-I", sandbox_process.__file__, "5", "7", "9"], options)]


def test_a_file_is_read_from_its_beginning_and_has_no_name() -> None:
    with sandbox._unnamed_file({"a": 1}) as file:
        assert os.fstat(file.fileno()).st_nlink == 0
        assert json.loads(os.read(file.fileno(), 100)) == {"a": 1}


# --- watching it


class Child:
    """The leader of a sandbox that is none; how it ends is a test's."""

    pid = 2**31 - 7

    def __init__(self, returncode: int | None = 0, ends: bool = True):
        self.returncode, self.ends, self.waits = returncode, ends, []  # type: ignore[var-annotated]

    def wait(self, timeout: float | None = None) -> None:
        self.waits.append(timeout)
        if timeout is not None and not self.ends:
            raise subprocess.TimeoutExpired("child", timeout)


Start = Callable[..., tuple[_Run, int, Child]]


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    groups: list[tuple[int, int]] = []

    def killpg(*words: int) -> None:
        groups.append(words)  # type: ignore[arg-type]
        raise ProcessLookupError

    monkeypatch.setattr(os, "killpg", killpg)
    return groups


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which stands still."""
    found = [100.0]
    monkeypatch.setattr(sandbox.time, "monotonic", lambda: found[0])
    return found


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, now: list[float]) -> Iterator[Start]:
    """A sandbox without processes, and where its outcomes are written to."""
    writers: list[int] = []

    def make(child: Child | None = None, *, own_files: bool = True) -> tuple[_Run, int, Child]:
        child = child or Child()

        def start(folder: str, files: Sequence[int]) -> Any:
            assert folder == "/tmp/x"
            first, second, writer = files
            assert (first, second) == (files_given[0].fileno(), files_given[1].fileno())
            writers.append(os.dup(writer))
            return child

        monkeypatch.setattr(sandbox, "start", start)
        with tempfile.TemporaryFile() as request, tempfile.TemporaryFile() as tests:
            files_given = [request, tests]
            found = _Run("/tmp/x", {"own_files": own_files, "files_bytes": 1000}, files_given, LIMITS)
        return found, writers[-1], child

    yield make
    for writer in writers:
        try:
            os.close(writer)
        except OSError:
            continue


def end(writer: int, content: bytes = b"") -> None:
    os.write(writer, content)
    os.close(writer)


def test_the_outcomes_of_a_sandbox(run: Start, killed: list[Any]) -> None:
    found, writer, child = run()
    end(writer, b'["", "x"]')
    assert found.outcomes() == ["", "x"]
    assert child.waits == [4.0, None]
    assert killed == [(child.pid, signal.SIGKILL)]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(found._reader)


@pytest.mark.parametrize("returncode", [1, -9, 65])
def test_a_sandbox_that_ends_badly_has_no_outcomes(returncode: int, run: Start, killed: list[Any]) -> None:
    found, writer, _ = run(Child(returncode))
    end(writer, b'["", "x"]')
    assert found.outcomes() is None


def test_a_sandbox_that_only_stops_writing_has_no_outcomes(run: Start, killed: list[Any]) -> None:
    found, writer, child = run(Child(0, ends=False))
    end(writer, b'["", "x"]')
    assert found.outcomes() is None
    assert child.waits == [4.0, None]


def test_outcomes_that_come_in_pieces_and_late(run: Start, now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """A look every tenth of a second, the last one until the limit."""
    found, writer, child = run()
    read = os.read
    looks: list[float] = []

    def select(readers: Any, _: Any, __: Any, limit_s: float) -> Any:
        assert readers == [found._reader]
        looks.append(limit_s)
        now[0] += 1.0
        return (readers, [], [])

    def read_some(file: int, size: int) -> bytes:
        return read(file, min(size, 5))

    monkeypatch.setattr(sandbox.select, "select", select)
    monkeypatch.setattr(os, "read", read_some)
    end(writer, b'["", "x"]')
    assert found._wait() == b'["", "x"]'
    assert looks == [0.1, 0.1, 0.1]
    assert child.waits == [1.0]
    os.close(found._reader)


def test_the_last_look_is_as_long_as_there_is_time(
    run: Start, now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, _, _ = run()
    looks: list[float] = []

    def select(readers: Any, _: Any, __: Any, limit_s: float) -> Any:
        looks.append(limit_s)
        now[0] += limit_s
        return ([], [], [])

    monkeypatch.setattr(sandbox.select, "select", select)
    monkeypatch.setattr(found, "_breaks_a_limit", lambda: False)
    now[0] = 103.75
    assert found._wait() is None
    assert looks[:2] == [0.1, 0.1]
    assert looks[2] == pytest.approx(0.05)
    now[0] = 104.0
    looks.clear()
    assert found._wait() is None  # the time is over
    assert looks == []
    now[0] = 100.0
    monkeypatch.setattr(found, "_breaks_a_limit", lambda: True)
    assert found._wait() is None
    assert looks == [0.1]
    os.close(found._reader)


def test_outcomes_are_bounded(run: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sandbox._MOST_OUTCOMES_BYTES == 16 * 2**20
    monkeypatch.setattr(sandbox, "_MOST_OUTCOMES_BYTES", 5)
    for content, expected in ((b"12345", b"12345"), (b"123456", None)):
        found, writer, _ = run()
        end(writer, content)
        assert found._wait() == expected
        os.close(found._reader)


def test_a_sandbox_that_cannot_be_started_leaves_no_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    monkeypatch.setattr(os, "pipe", lambda: (1001, 1002))
    monkeypatch.setattr(os, "close", closed.append)

    def fail(*words: Any) -> Any:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(sandbox, "start", fail)
    with pytest.raises(BlockingIOError):
        _Run("/tmp/x", {"own_files": True, "files_bytes": 1}, [], LIMITS)
    monkeypatch.undo()
    assert sorted(closed) == [1001, 1002]


@pytest.mark.parametrize(
    ("threads", "own_files", "used", "unnamed", "breaks"),
    [
        ((256, 256), True, math.inf, math.inf, False),
        ((257, 256), True, 0, 0, True),
        ((1, 1), False, 999, 0.5, False),
        ((1, 1), False, 999, 1, True),  # of each process
        ((1, 1), False, 1000, 0, False),
        ((257, 256), False, 0, 0, True),
    ],
)
def test_which_limits_are_looked_at_from_outside(
    threads: tuple[int, int],
    own_files: bool,
    used: float,
    unnamed: float,
    breaks: bool,
    run: Start,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Threads always; files where they are not in a file system of their own."""
    found, _, child = run(own_files=own_files)

    def used_bytes(folder: str, entries: int) -> float:
        assert (folder, entries) == ("/tmp/x", 768 + 64)
        return used

    def unnamed_bytes(process: int, folder: str) -> float:
        assert process in (child.pid, 5)
        assert folder == "/tmp/x"
        return unnamed

    monkeypatch.setattr(sandbox, "_group", lambda leader: iter([leader, 5]))
    monkeypatch.setattr(sandbox, "_threads", lambda process: threads[process == 5])
    monkeypatch.setattr(sandbox, "_used_bytes", used_bytes)
    monkeypatch.setattr(sandbox, "_unnamed_bytes", unnamed_bytes)
    assert found._breaks_a_limit() == breaks
    os.close(found._reader)


NONE = 2**31 - 7  # a process that there is not


def test_a_group_is_a_process_and_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self: "12 13 " if str(self) == "/proc/7/task/7/children" else "")
    assert list(sandbox._group(7)) == [7, 12, 13]
    monkeypatch.undo()
    assert list(sandbox._group(NONE)) == [NONE]
    assert sandbox._threads(NONE) == 0
    assert sandbox._threads(os.getpid()) == len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize(
    ("error", "expected"), [(FileNotFoundError(), 4096.0), (PermissionError(), math.inf), (OSError(), math.inf)]
)
def test_a_folder_that_cannot_be_looked_at_is_too_large(
    error: OSError, expected: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scandir = os.scandir

    def fail(path: str) -> Any:
        if path.endswith("bad"):
            raise error
        return scandir(path)

    (tmp_path / "bad").mkdir()
    monkeypatch.setattr(os, "scandir", fail)
    assert sandbox._used_bytes(str(tmp_path), 9) == expected


def test_files_of_others_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open ones that have a name, are on another device, or are none; nor what a process that is gone has."""
    others = sandbox._unnamed_bytes(os.getpid(), str(tmp_path))  # what this process has open already, for its output
    with tempfile.TemporaryFile(dir=tmp_path) as file, open(tmp_path / "named", "wb") as named:
        for one in (file, named):
            one.write(bytes(500))
            one.flush()
        assert sandbox._unnamed_bytes(os.getpid(), str(tmp_path)) == others + 500
        assert sandbox._unnamed_bytes(os.getpid(), "/proc") == 0
        assert sandbox._unnamed_bytes(NONE, str(tmp_path)) == 0


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("7f-8f rw-s 00 00:01 5  {folder}/m (deleted)", math.inf),
        ("7f-8f rw-s 00 00:01 5  {folder}/m", 0),
        ("7f-8f rw-s 00 00:01 5  {folder}2/m (deleted)", 0),
        ("7f-8f rw-s 00 00:01 5  /dev/zero (deleted)", 0),
    ],
)
def test_a_mapped_file_without_a_name_is_too_large(
    line: str, expected: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "a first line\n" + line.format(folder=tmp_path) + "\na last line"
    others = sandbox._unnamed_bytes(os.getpid(), str(tmp_path))
    monkeypatch.setattr(Path, "read_text", lambda self: text)
    assert sandbox._unnamed_bytes(os.getpid(), str(tmp_path)) == others + expected


# --- removing what is left


@pytest.mark.parametrize(("depth", "is_left"), [(3, False), (4, True)])
def test_so_many_folders_are_removed_and_no_more(
    depth: int, is_left: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each is made accessible, opened as a folder, and closed."""
    monkeypatch.setattr(sandbox, "_MOST_ENTRIES", 3)
    tree = tmp_path / "tree"
    (tree / Path(*"abcd"[:depth])).mkdir(parents=True)
    (tree / "a" / "file").touch()
    (tree / "link").symlink_to(tmp_path)
    modes: list[int] = []
    flags: list[int] = []
    real_open, real_chmod = os.open, os.chmod

    def chmod(name: str, mode: int, *, dir_fd: int) -> None:
        modes.append(mode)
        real_chmod(name, mode, dir_fd=dir_fd)

    def opened(name: str, how: int, **options: Any) -> int:
        flags.append(how)
        return real_open(name, how, **options)

    before = os.listdir("/proc/self/fd")
    with monkeypatch.context() as patched:
        patched.setattr(os, "chmod", chmod)
        patched.setattr(os, "open", opened)
        sandbox.remove_tree(str(tree))
    assert os.listdir("/proc/self/fd") == before
    assert modes == [0o700] * depth
    assert flags == [os.O_DIRECTORY | os.O_NOFOLLOW] * 4
    assert tree.exists() == is_left
    assert bool(caplog.records) == is_left
    assert tmp_path.exists()


# --- all of it


@pytest.mark.parametrize("own_files", [False, True])
def test_a_run_of_tests(own_files: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    class Run:
        def __init__(self, folder: str, request: Any, files: Any, limits: Limits):
            assert os.path.isdir(folder)
            first, second = (json.loads(os.read(file.fileno(), 10**6)) for file in files)
            assert first == request
            seen.append((folder, request["program"], request["own_files"], request["folder"], second, limits))

        def outcomes(self) -> Any:
            return ["", "x"]

    monkeypatch.setattr(sandbox, "_Run", Run)
    monkeypatch.setattr(sandbox, "_grants_own_files", lambda: own_files)
    assert sandbox.run_tests("p = 1", ("a", "b"), LIMITS) == ["", "x"]
    [(folder, *others)] = seen
    assert others == ["p = 1", own_files, folder, ["a", "b"], LIMITS]
    assert os.path.basename(folder).startswith("realhf-program-")
    assert not os.path.exists(folder)


@pytest.mark.parametrize(("outcomes", "grants"), [([], True), (None, False)])
def test_whether_a_kernel_grants_a_file_system_is_tried(
    outcomes: Any, grants: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Run:
        def __init__(self, folder: str, request: Any, files: Any, limits: Limits):
            first, second = (json.loads(os.read(file.fileno(), 10**6)) for file in files)
            assert (first["program"], first["own_files"], second, limits) == ("", True, [], Limits(time_s=60.0))
            assert first["folder"] == folder

        def outcomes(self) -> Any:
            return outcomes

    monkeypatch.setattr(sandbox, "_Run", Run)
    assert sandbox._grants_own_files.__wrapped__() == grants
