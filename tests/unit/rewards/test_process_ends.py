"""A reward process: how it finds out what is stuck, what it tells of failures, and how it ends."""

import asyncio
import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from realhf.rewards import confined
from realhf.rewards import process as module
from realhf.rewards.messages import (
    Failed,
    Work,
)
from realhf.rewards.process import _kind_and_text, _Now, _Server, end_group, main
from tests.unit.rewards.conftest import EndedError, Served
from tests.unit.rewards.samples import of
from tests.unit.rewards.test_process import without_places

# --- what is stuck


def watched(server: _Server, monkeypatch: pytest.MonkeyPatch, looks: int = 1) -> tuple[list[Any], list[float]]:
    """What is given up in so many looks, and how long the watch rests before each."""
    given_up: list[Any] = []
    rests: list[float] = []

    def sleep(seconds: float) -> None:
        if len(rests) == looks:
            raise EndedError
        rests.append(seconds)

    monkeypatch.setattr(module.time, "sleep", sleep)
    monkeypatch.setattr(server, "_give_up", lambda *words: given_up.append(words))
    monkeypatch.setattr(server, "_give_up_loop", lambda: given_up.append("loop"))
    with pytest.raises(EndedError):
        server._watch(77)
    return given_up, rests


@pytest.mark.parametrize(("since_s", "is_late"), [(42.0, False), (41.5, True), (None, False)])
def test_a_call_is_given_up_behind_its_limit(
    since_s: float | None, is_late: bool, serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch, stopped: None
) -> None:
    """It may take 8 s, and 50 s is now."""
    server = serve().server
    work = Work(0, 0, of("ab"))
    server._now = None if since_s is None else _Now(work, (1,), since_s)
    given_up, rests = watched(server, monkeypatch, looks=2)
    assert given_up == ([(work, (1,), 77)] * 2 if is_late else [])
    assert rests == [1.0, 1.0]


@pytest.mark.parametrize(
    ("turned_s", "has_loop", "has_tasks", "is_late"),
    [
        (40.0, True, True, False),
        (39.5, True, True, True),
        (39.5, False, True, False),
        (39.5, True, False, False),
        (43.0, True, True, False),
    ],
)
def test_a_loop_is_given_up_that_does_not_turn(
    turned_s: float,
    has_loop: bool,
    has_tasks: bool,
    is_late: bool,
    serve: Callable[..., Served],
    monkeypatch: pytest.MonkeyPatch,
    stopped: None,
) -> None:
    """It notes its turns each quarter of the limit."""
    server = serve().server
    server._turned_s = turned_s
    server._loop = object() if has_loop else None  # type: ignore[assignment]
    server._tasks = {object(): ()} if has_tasks else {}  # type: ignore[dict-item]
    assert watched(server, monkeypatch)[0] == (["loop"] if is_late else [])


def test_calls_with_a_short_limit_are_looked_at_more_often(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve().server
    server._timeout_s = 2.0
    assert watched(server, monkeypatch, looks=3)[1] == [0.5] * 3


@pytest.mark.parametrize("places", [range(3), (2,)])
def test_the_async_call_that_runs_is_given_up(
    places: Sequence[int], serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, work, task = serve().server, Work(0, 0, of("abc")), object()
    given_up: list[Any] = []
    asked: list[Any] = []
    monkeypatch.setattr(asyncio, "current_task", lambda loop: (asked.append(loop), task)[1])
    monkeypatch.setattr(server, "_give_up", lambda work, places, thread: given_up.append((work, places, thread)))
    server._loop = "loop"  # type: ignore[assignment]
    server._give_up_loop()
    assert given_up == []  # it is none of the calls
    server._tasks = {task: (work, places)}  # type: ignore[dict-item]
    server._give_up_loop()
    assert given_up == [(work, places, None)]
    assert asked == ["loop"] * 2


def test_a_loop_that_turns_again_is_left(serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(loop: Any) -> Any:
        raise RuntimeError("no loop")

    monkeypatch.setattr(asyncio, "current_task", fail)
    serve().server._give_up_loop()


def test_what_is_stuck_is_told_with_its_place(serve: Callable[..., Served], ends: list[int]) -> None:
    served = serve()
    work = Work(4, 0, of("abc"))
    with pytest.raises(EndedError):
        served.server._give_up(work, (2, 0), threading.get_ident())
    with pytest.raises(EndedError):
        served.server._give_up(work, range(2), None)
    with pytest.raises(EndedError):
        served.server._give_up(work, range(1), 1)  # a thread that is gone
    stuck, blocked, gone = served.said()
    text = "the call took more than timeout_s=8 s"
    awaits = f"{text}, without awaiting anything"
    assert stuck.text.startswith(f"{text}, at\n  | ")
    assert stuck.text.count("\n  | ") == 3
    assert "test_process_ends.py" in stuck.text
    assert without_places([stuck]) == [Failed(4, [2, 0], "time", f"{text}, at", 8.0, is_stuck=True)]
    assert [blocked, gone] == [Failed(4, places, "time", awaits, 8.0, is_stuck=True) for places in ([0, 1], [0])]
    assert ends == [1] * 3


# --- what failures say


def deep(depth: int) -> None:
    if depth:
        deep(depth - 1)
    else:
        raise ValueError("deep")


def test_an_exception_is_told_with_its_last_places() -> None:
    with pytest.raises(ValueError, match="deep") as caught:
        deep(5)
    kind, text = _kind_and_text(caught.value)
    first, *places = text.splitlines()
    line = deep.__code__.co_firstlineno
    assert (kind, first) == ("exception", "ValueError: deep")
    assert places == [
        f"  | test_process_ends.py:{line + 2} in deep: deep(depth - 1)",
        f"  | test_process_ends.py:{line + 2} in deep: deep(depth - 1)",
        f'  | test_process_ends.py:{line + 4} in deep: raise ValueError("deep")',
    ]


def test_places_in_this_package_are_left_out_where_there_are_others() -> None:
    own = traceback.FrameSummary(str(Path(module.__file__)), 3, "serve", line="own()")
    frozen = traceback.FrameSummary("<string>", 4, "made", line="made()")
    user = traceback.FrameSummary("/home/user/r.py", 5, "f", line="theirs()")
    assert module._lines([own, user, frozen]) == "\n  | r.py:5 in f: theirs()"  # type: ignore[arg-type]
    assert module._lines([own]) == "\n  | process.py:3 in serve: own()"  # type: ignore[arg-type]
    assert module._lines([]) == ""  # type: ignore[arg-type]


def test_an_exception_that_has_no_text() -> None:
    class BadError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert _kind_and_text(BadError())[0] == "exception"
    assert _kind_and_text(BadError())[1].endswith(("BadError", "<exception str() failed>"))


def test_the_limit_is_told() -> None:
    assert _kind_and_text(module._TooLongError(), 2.5) == ("time", "the call took more than timeout_s=2.5 s")


# --- the process


def test_a_process_has_the_pipes_under_numbers_that_functions_do_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    pipes = {0: 100, 1: 101}

    class Server:
        def __init__(self, *words: Any) -> None:
            calls.append(("server", *words))

        def serve(self) -> None:
            calls.append("serve")

    def dup2(old: int, new: int) -> None:
        calls.append(("dup2", "null" if os.path.samestat(os.fstat(old), os.stat(os.devnull)) else old, new))

    with monkeypatch.context() as patched:
        patched.setattr(module, "end_with", lambda parent: calls.append(("end with", parent)))
        patched.setattr(module, "_Server", Server)
        patched.setattr(resource, "getrlimit", lambda number: (10, 500) if number == resource.RLIMIT_NOFILE else None)
        patched.setattr(resource, "setrlimit", lambda *words: calls.append(("limit", *words)))
        patched.setattr(os, "dup", pipes.__getitem__)
        patched.setattr(os, "dup2", dup2)
        patched.setattr(sys, "stdout", sys.stdout)
        main(33)
        assert sys.stdout is sys.stderr
    assert calls == [
        ("end with", 33),
        ("limit", resource.RLIMIT_NOFILE, (500, 500)),
        ("dup2", "null", 0),
        ("dup2", 2, 1),
        ("server", 100, 101),
        "serve",
    ]


@pytest.mark.parametrize(
    ("most", "expected"), [(500, 500), (65537, 65536), (resource.RLIM_INFINITY, 65536), (65536, 65536)]
)
def test_a_process_may_open_as_many_files_as_it_needs(
    most: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[Any] = []

    def set_limit(number: int, limit: tuple[int, int]) -> None:
        limits.append(limit)
        raise EndedError

    monkeypatch.setattr(module, "end_with", lambda parent: None)
    monkeypatch.setattr(resource, "getrlimit", lambda number: (1, most))
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    with pytest.raises(EndedError):
        main(1)
    assert limits == [(expected, most)]


def test_a_process_ends_with_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    codes: list[int] = []

    class Library:
        def prctl(self, *words: int) -> int:
            asked.append(words)
            return 0

    monkeypatch.setattr(confined, "_LIBC", Library())
    monkeypatch.setattr(os, "_exit", codes.append)
    confined.end_with(os.getppid())
    assert codes == []
    confined.end_with(os.getppid() + 1)
    assert codes == [1]
    assert asked == [(1, signal.SIGKILL, 0, 0, 0)] * 2  # linux/prctl.h: PR_SET_PDEATHSIG


@pytest.mark.parametrize("leads", [False, True])
def test_a_process_ends_what_its_functions_have_started(leads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(os, "getpgrp", lambda: os.getpid() if leads else 1)
    monkeypatch.setattr(os, "killpg", lambda *words: calls.append(words))
    monkeypatch.setattr(os, "_exit", calls.append)
    end_group(3)
    assert calls == [*([(0, signal.SIGKILL)] if leads else []), 3]
