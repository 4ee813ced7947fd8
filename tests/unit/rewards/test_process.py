"""A reward process: how it calls each kind of function, and what it replies."""

import asyncio
import os
import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest

from realhf.base.errors import UserError
from realhf.rewards import process as module
from realhf.rewards.messages import (
    Begin,
    Failed,
    Function,
    Loaded,
    NotLoaded,
    Value,
    Work,
    frame,
)
from realhf.rewards.signature import recognise
from realhf.rewards.sources import Reward
from tests.unit.rewards.conftest import NOW_S, SINCE_S, TOOK_S, EndedError, Served
from tests.unit.rewards.samples import of

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
        served.server._score(work, (place,))
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
        served.server._score(Work(3, 0, of("ab")), (place,))
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
    server._score(Work(5, 0, of(responses)), range(len(responses)))
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
    def tokens(completions: list[str], answer: list[str], **row: Any) -> list[float]: ...

    reward = Reward("t", tokens, recognise(tokens, "f"), 0.25, "t (r.py:3)")
    assert module._described(reward) == Function("t", "t (r.py:3)", 0.25, True, False, True, ("answer",))


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
    assert done(served, work) == [(work, (0,)), (work, (1,)), (work, (2,))]
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

    async def call(reward: Reward, noted: Any) -> Any:
        return await reward.function(**reward.signature.arguments(noted.samples))

    monkeypatch.setattr(server, "_call", call)
    monkeypatch.setattr(asyncio, "gather", one_by_one)
    asyncio.run(server._score_async(work, range(len(responses))))
    assert calls == [list(texts) for texts, _ in asked]
    assert without_places(served.said()) == said


def test_a_batch_is_one_task(serve: Callable[..., Served], stopped: None) -> None:
    async def reward(completions: list[str], **row: Any) -> list[float]:
        return [1.0] * len(completions)

    served, work = serve(reward), Work(5, 0, of("abc"))
    assert done(served, work) == [(work, range(3))]
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
