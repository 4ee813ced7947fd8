"""A reward process: how it calls each kind of function, what it tells of failures, how it finds out what is stuck."""

import asyncio
import ctypes
import os
import queue
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from realhf.base.errors import UserError
from realhf.rewards import process as module
from realhf.rewards.messages import (
    Begin,
    Failed,
    Frames,
    FromProcess,
    Function,
    Loaded,
    NotLoaded,
    Value,
    Work,
    frame,
)
from realhf.rewards.process import _Now, _Server, _told, end_group, end_with, main
from realhf.rewards.signature import recognise
from realhf.rewards.sources import Reward
from tests.unit.rewards.samples import of

NOW_S, SINCE_S, TOOK_S = 50.0, 20.0, 30.0


class Served:
    """A server in this process, and what it says."""

    def __init__(self, *functions: Callable[..., Any]) -> None:
        self._requests, requests = os.pipe()
        self._replies, replies = os.pipe()
        self.server = _Server(self._requests, replies)
        self.server._timeout_s = 8.0
        self.server._turns = asyncio.Semaphore(9)
        self.server._rewards = [
            Reward(one.__name__, one, recognise(one, "f"), 1.0, f"{one.__name__} (r.py:1)") for one in functions
        ]
        self._ends = [requests, replies]
        self._frames = Frames(FromProcess)

    def ask(self, content: bytes) -> None:
        """All that is ever asked."""
        os.write(self._ends[0], content)
        os.close(self._ends.pop(0))

    def said(self) -> list[Any]:
        os.set_blocking(self._replies, False)
        try:
            return self._frames.add(os.read(self._replies, 2**20))
        except BlockingIOError:
            return []

    def close(self) -> None:
        for end in (*self._ends, self._requests, self._replies):
            os.close(end)


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    all_served: list[Served] = []

    def start(*functions: Callable[..., Any]) -> Served:
        all_served.append(Served(*functions))
        return all_served[-1]

    yield start
    for served in all_served:
        served.close()


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is `NOW_S`."""
    monkeypatch.setattr(module.time, "monotonic", lambda: NOW_S)


class Thread:
    """One that has run as soon as it starts."""

    daemons: list[bool]

    def __init__(self, *, target: Callable[..., Any], args: tuple[Any, ...], daemon: bool = False):
        self.daemons.append(daemon)
        self.start = lambda: target(*args)


@pytest.fixture
def daemons(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the threads that are started end with the main one."""
    Thread.daemons = []
    monkeypatch.setattr(module.threading, "Thread", Thread)
    return Thread.daemons


class EndedError(BaseException):
    """Instead of the end of this process."""


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The codes with which the process ends."""
    codes: list[int] = []

    def end(code: int) -> None:
        codes.append(code)
        raise EndedError

    monkeypatch.setattr(module, "end_group", end)
    return codes


# --- functions that are called one after the other


def test_a_call_for_one_sample(serve: Callable[..., Served], stopped: None) -> None:
    calls: list[Any] = []

    def reward(response: str, **row: Any) -> float | None:
        now = served.server._now
        assert now is not None
        calls.append((response, now.work, now.places))
        now.since_s = SINCE_S
        return None if response == "b" else 0.5

    served = serve(reward)
    work = Work(3, 0, of("abc"))
    for place in (1, 2):
        served.server._score_one(work, place, served.server._rewards[0])
        assert served.server._now is None
    assert calls == [("b", work, (1,)), ("c", work, (2,))]
    assert served.said() == [Value(3, 1, None, TOOK_S), Value(3, 2, 0.5, TOOK_S)]


def test_a_call_that_fails_for_one_sample(serve: Callable[..., Served], stopped: None) -> None:
    def reward(response: str) -> Any:
        assert served.server._now is not None
        served.server._now.since_s = SINCE_S
        if response == "a":
            raise ValueError("no")
        return float("nan")

    served = serve(reward)
    for place in (0, 1):
        served.server._score_one(Work(3, 0, of("ab")), place, served.server._rewards[0])
        assert served.server._now is None
    raised, nan = served.said()
    assert (raised.work, raised.places, raised.kind, raised.seconds) == (3, [0], "exception", TOOK_S)
    assert raised.text.startswith("ValueError: no\n  | test_process.py:")
    assert not raised.is_stuck
    assert nan == Failed(3, [1], "value", "it returned nan; return a finite number, or None for no reward", TOOK_S)


def batch(function: Callable[[list[str]], Any], served: list[Served], calls: list[Any]) -> Callable[..., Any]:
    """A function of TRL's form that takes `SINCE_S` to `NOW_S`."""

    def reward(completions: list[str], **row: Any) -> Any:
        now = served[0].server._now
        assert now is not None
        calls.append((completions, list(now.places)))
        now.since_s = SINCE_S
        return function(completions)

    return reward


def no_x(completions: list[str]) -> Any:
    if "x" in completions:
        raise KeyError("x")
    return [None if one == "n" else float("inf") if one == "i" else 1.5 for one in completions]


INFINITE = "it returned inf; return a finite number, or None for no reward"
BATCHES: dict[str, tuple[Callable[[list[str]], Any], str, list[tuple[str, list[int]]], list[Any]]] = {
    "values": (
        no_x,
        "abn",
        [("abn", [0, 1, 2])],
        [Value(5, 0, 1.5, 10.0), Value(5, 1, 1.5, 10.0), Value(5, 2, None, 10.0)],
    ),
    "a value that is none": (
        no_x,
        "ai",
        [("ai", [0, 1])],
        [Value(5, 0, 1.5, 15.0), Failed(5, [1], "value", INFINITE, 15.0)],
    ),
    "too few": (
        lambda texts: [1.0],
        "ab",
        [("ab", [0, 1])],
        [Failed(5, [0, 1], "count", "it returned 1 rewards for a batch of 2; return one a sample", TOOK_S)],
    ),
    "one that raises": (no_x, "x", [("x", [0])], [Failed(5, [0], "exception", "KeyError: 'x'", TOOK_S)]),
    "one of several that raises": (
        no_x,
        "axi",
        [("axi", [0, 1, 2]), ("a", [0]), ("x", [1]), ("i", [2])],
        [
            Value(5, 0, 1.5, TOOK_S),
            Failed(5, [1], "exception", "KeyError: 'x'", TOOK_S),
            Failed(5, [2], "value", INFINITE, TOOK_S),
        ],
    ),
}


def without_places(messages: list[Any]) -> list[Any]:
    """Without the lines of code that failures name."""
    return [
        Failed(one.work, one.places, one.kind, one.text.partition("\n  | ")[0], one.seconds, one.is_stuck)
        if isinstance(one, Failed)
        else one
        for one in messages
    ]


@pytest.mark.parametrize("how", BATCHES)
def test_a_call_for_a_batch(how: str, serve: Callable[..., Served], stopped: None) -> None:
    function, responses, asked, said = BATCHES[how]
    calls: list[Any] = []
    served: list[Served] = []
    served.append(serve(batch(function, served, calls)))
    server = served[0].server
    server._score_batch(Work(5, 0, of(responses)), server._rewards[0])
    assert server._now is None
    assert calls == [(list(texts), places) for texts, places in asked]
    assert without_places(served[0].said()) == said


def test_works_are_done_in_their_order(
    serve: Callable[..., Served], daemons: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def one(response: str) -> float:
        return float(ord(response))

    def many(responses: list[str]) -> list[float]:
        return [-float(ord(response)) for response in responses]

    served = serve(one, many)
    reads: list[Any] = []
    monkeypatch.setattr(served.server, "_read", reads.append)
    works: list[Any] = [Work(0, 1, of("ab")), Work(1, 0, of("cd"))]

    class Todo:
        def get(self) -> Any:
            if not works:
                raise EndedError
            return works.pop(0)

    served.server._todo = Todo()  # type: ignore[assignment]
    with pytest.raises(EndedError):
        served.server.serve()
    assert [(one.work, one.place, one.value) for one in served.said()] == [
        (0, 0, -97.0),
        (0, 1, -98.0),
        (1, 0, 99.0),
        (1, 1, 100.0),
    ]
    assert reads == [threading.get_ident()]
    assert daemons == [True]


def test_a_reply_is_written_whole_however_little_the_pipe_takes(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    served, write = serve(), os.write
    monkeypatch.setattr(os, "write", lambda to, content: write(to, bytes(content[:3])))
    served.server._send(NotLoaded("no such file"))
    assert served.said() == [NotLoaded("no such file")]


# --- requests


async def waits(response: str) -> float:
    return 1.0


def plain(response: str) -> float:
    return 1.0


def test_requests_go_to_where_their_functions_run(serve: Callable[..., Served], ends: list[int]) -> None:
    """Until the worker closes the pipe."""
    served = serve(plain, waits)
    begun: list[Any] = []
    called: list[Any] = []

    class Loop:
        def call_soon_threadsafe(self, *words: Any) -> None:
            called.append(words)

    served.server._begin = lambda *words: begun.append(words)  # type: ignore[method-assign]
    served.server._loop = Loop()  # type: ignore[assignment]
    begin, first, second = Begin(("a",), 1.0, 2), Work(0, 0, of("a")), Work(1, 1, of("b"))
    served.ask(frame(begin) + frame(first) + frame(second))
    with pytest.raises(EndedError):
        served.server._read(77)
    assert begun == [(begin, 77)]
    assert called == [(served.server._start_tasks, second)]
    assert served.server._todo.get_nowait() == first
    with pytest.raises(queue.Empty):
        served.server._todo.get_nowait()
    assert ends == [0]


@pytest.mark.parametrize("functions", [[plain], [plain, waits]])
def test_a_process_begins_with_its_functions(
    functions: list[Any],
    serve: Callable[..., Served],
    ends: list[int],
    daemons: list[bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = serve(*functions)
    server, rewards = served.server, served.server._rewards
    asked: list[Any] = []
    started: list[Any] = []
    monkeypatch.setattr(module, "load_rewards", lambda names: (asked.append(names), rewards)[1])
    monkeypatch.setattr(server, "_run_loop", lambda loop: started.append(loop))
    monkeypatch.setattr(server, "_watch", lambda thread: started.append(thread))
    server._rewards = []
    server._begin(Begin(("r.py:f", "r.py:g"), 2.5, 3), 77)
    assert daemons == [True] * len(functions)
    assert asked == [("r.py:f", "r.py:g")]
    assert (server._rewards, server._timeout_s, server._turns._value) == (rewards, 2.5, 3)
    assert (server._loop is not None) == (waits in functions)
    assert started == [*([server._loop] if waits in functions else []), 77]
    assert served.said() == [
        Loaded([Function(one.name, one.place, 1.0, False, one.name == "waits", False) for one in rewards])
    ]
    assert ends == []
    if server._loop is not None:
        server._loop.close()


@pytest.mark.parametrize("error", [UserError("r.py:1: no such file"), SystemExit("r.py:1: no such file")])
def test_a_process_that_cannot_load_its_functions_says_so_and_ends(
    error: BaseException, serve: Callable[..., Served], ends: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(names: Any) -> Any:
        raise error

    monkeypatch.setattr(module, "load_rewards", fail)
    served = serve()
    with pytest.raises(EndedError):
        served.server._begin(Begin(("r.py:f",), 2.5, 3), 77)
    assert served.said() == [NotLoaded("r.py:1: no such file")]
    assert ends == [1]


def test_what_a_worker_knows_of_a_function() -> None:
    def tokens(completions: list[str], **row: Any) -> list[float]: ...

    reward = Reward("t", tokens, recognise(tokens, "f"), 0.25, "t (r.py:3)")
    assert module._described(reward) == Function("t", "t (r.py:3)", 0.25, True, False, True)


# --- async functions


def test_a_loop_notes_that_it_turns(serve: Callable[..., Served], stopped: None) -> None:
    calls: list[Any] = []

    class Loop:
        def call_later(self, delay_s: float, function: Callable[[], None]) -> None:
            calls.append(delay_s)
            if len(calls) < 3:
                served.server._turned_s = 0.0
                function()

        def run_forever(self) -> None:
            calls.append("forever")

    served = serve()
    served.server._turned_s = 0.0
    served.server._run_loop(Loop())  # type: ignore[arg-type]
    assert calls == [2.0, 2.0, 2.0, "forever"]  # of a limit of 8 s
    assert served.server._turned_s == NOW_S


def done(served: Served, work: Work) -> list[tuple[Any, ...]]:
    """Has the tasks of a work run; which of them there were."""

    async def run() -> list[Any]:
        served.server._loop = asyncio.get_running_loop()
        served.server._start_tasks(work)
        tasks = dict(served.server._tasks)
        await asyncio.gather(*tasks)
        await asyncio.sleep(0)
        return list(tasks.values())

    found = asyncio.run(run())
    assert served.server._tasks == {}  # none is kept
    return found


def test_async_calls_of_one_sample(serve: Callable[..., Served], stopped: None) -> None:
    async def reward(response: str) -> float | None:
        await asyncio.sleep(0)
        if response == "x":
            raise KeyError("x")
        return None if response == "n" else 1.5

    served, work = serve(reward), Work(5, 0, of("axn"))
    assert done(served, work) == [(work, 0), (work, 1), (work, 2)]
    assert sorted(without_places(served.said()), key=lambda one: getattr(one, "place", 1)) == [
        Value(5, 0, 1.5, 0.0),
        Failed(5, [1], "exception", "KeyError: 'x'", 0.0),
        Value(5, 2, None, 0.0),
    ]


@pytest.mark.parametrize("how", BATCHES)
def test_async_calls_of_a_batch(how: str, serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch) -> None:
    """As those that are not async: each call takes `TOOK_S`."""
    function, responses, asked, said = BATCHES[how]
    calls: list[Any] = []
    now = [SINCE_S]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])

    async def reward(completions: list[str], **row: Any) -> Any:
        now[0] = NOW_S
        calls.append(completions)
        return function(completions)

    served, work = serve(reward), Work(5, 0, of(responses))
    server = served.server

    async def one_by_one(*parts: Any) -> None:
        for part in parts:
            now[0] = SINCE_S
            await part

    async def call(reward: Reward, samples: Any) -> Any:
        return await reward.function(**reward.signature.arguments(samples))

    monkeypatch.setattr(server, "_call", call)
    monkeypatch.setattr(asyncio, "gather", one_by_one)
    asyncio.run(server._do_batch(work))
    assert calls == [list(texts) for texts, _ in asked]
    assert without_places(served.said()) == said


def test_a_batch_is_one_task(serve: Callable[..., Served], stopped: None) -> None:
    async def reward(completions: list[str], **row: Any) -> list[float]:
        return [1.0] * len(completions)

    served, work = serve(reward), Work(5, 0, of("abc"))
    assert done(served, work) == [(work, -1)]
    assert served.said() == [Value(5, place, 1.0, 0.0) for place in range(3)]


@pytest.mark.parametrize("takes_lists", [False, True])
def test_calls_have_their_turn(takes_lists: bool, serve: Callable[..., Served]) -> None:
    under_way: list[int] = [0]
    most: list[int] = []

    async def work_a_while() -> None:
        under_way[0] += 1
        for _ in range(3):
            await asyncio.sleep(0)
        most.append(under_way[0])
        under_way[0] -= 1

    async def one(response: str) -> float:
        await work_a_while()
        return 1.0

    async def many(responses: list[str]) -> list[float]:
        await work_a_while()
        return [1.0]

    served = serve(many if takes_lists else one)
    served.server._turns = asyncio.Semaphore(2)

    async def run() -> None:
        served.server._loop = asyncio.get_running_loop()
        for work in [Work(n, 0, of("a")) for n in range(5)]:
            served.server._start_tasks(work)
        await asyncio.gather(*served.server._tasks)

    asyncio.run(run())
    assert max(most) == 2


async def sleeps(response: str) -> float:
    await asyncio.sleep(1e6)
    return 1.0


async def gives_up(response: str) -> float:
    raise TimeoutError("of the function's own")


async def many_sleep(completions: list[str], **row: Any) -> list[float]:
    await asyncio.sleep(1e6)
    return []


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (sleeps, [Failed(0, [0], "time", "the call took more than timeout_s=0.01 s", NOW_S)]),
        (gives_up, [Failed(0, [0], "exception", "TimeoutError: of the function's own", NOW_S)]),
        (many_sleep, [Failed(0, [0, 1], "time", "the call took more than timeout_s=0.01 s", NOW_S)]),
    ],
)
def test_async_calls_that_take_too_long(function: Any, said: list[Any], serve: Callable[..., Served]) -> None:
    """A limit that the function has set itself is its own error. A batch is one call: all its samples fail."""
    served = serve(function)
    served.server._timeout_s = 0.01
    done(served, Work(0, 0, of("ab" if function is many_sleep else "a")))
    [failed] = without_places(served.said())
    assert 0 <= failed.seconds < 1000
    assert [Failed(failed.work, failed.places, failed.kind, failed.text, NOW_S, failed.is_stuck)] == said


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


@pytest.mark.parametrize(("place", "places"), [(-1, [0, 1, 2]), (0, [0]), (2, [2])])
def test_the_async_call_that_runs_is_given_up(
    place: int, places: list[int], serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, work, task = serve().server, Work(0, 0, of("abc")), object()
    given_up: list[Any] = []
    asked: list[Any] = []
    monkeypatch.setattr(asyncio, "current_task", lambda loop: (asked.append(loop), task)[1])
    monkeypatch.setattr(server, "_give_up", lambda work, places, thread: given_up.append((work, list(places), thread)))
    server._loop = "loop"  # type: ignore[assignment]
    server._give_up_loop()
    assert given_up == []  # it is none of the calls
    server._tasks = {task: (work, place)}  # type: ignore[dict-item]
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
    assert "test_process.py" in stuck.text
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
    kind, text = _told(caught.value)
    first, *places = text.splitlines()
    line = deep.__code__.co_firstlineno
    assert (kind, first) == ("exception", "ValueError: deep")
    assert places == [
        f"  | test_process.py:{line + 2} in deep: deep(depth - 1)",
        f"  | test_process.py:{line + 2} in deep: deep(depth - 1)",
        f'  | test_process.py:{line + 4} in deep: raise ValueError("deep")',
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

    assert _told(BadError())[0] == "exception"
    assert _told(BadError())[1].endswith(("BadError", "<exception str() failed>"))


def test_the_limit_is_told() -> None:
    assert _told(module._TooLongError(), 2.5) == ("time", "the call took more than timeout_s=2.5 s")


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

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    monkeypatch.setattr(os, "_exit", codes.append)
    end_with(os.getppid())
    assert codes == []
    end_with(os.getppid() + 1)
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
