"""The thread of a reward process: what it says to it, what it makes of answers and of silence, when it replaces it."""

import io
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from realhf.rewards import driver as module
from realhf.rewards.driver import Driver, _copy_output, _EndError, _how, _Process
from realhf.rewards.jobs import Job, Part, RewardError
from realhf.rewards.messages import (
    Begin,
    Failed,
    Frames,
    Function,
    Loaded,
    NotLoaded,
    ToProcess,
    Value,
    Work,
    frame,
)
from tests.unit.rewards.samples import of


def function(name: str, *, is_batch: bool = False, is_async: bool = False) -> Function:
    return Function(name, f"{name} (r.py:1)", 1.0, is_batch, is_async, False)


ONE, BATCH = function("one"), function("batch", is_batch=True)
ASYNC = function("async", is_async=True)
ASYNC_BATCH = function("both", is_batch=True, is_async=True)
FUNCTIONS = [ONE, BATCH, ASYNC, ASYNC_BATCH]
BEGIN = Begin(("r.py:one",), 4.0, 9)
LIMIT_S = 4.0 * 1.25 + 5  # a quarter more than a call may take, and what is granted a process to say so


def value(work: int, place: int, number: float = 1.0) -> Value:
    return Value(work, place, number, 0.0)


# --- a driver of a process that says what a test has written down


class Scripted:
    """A process whose answers are given: lists of messages, or an error."""

    pid = 7

    def __init__(self, answers: list[Any]):
        self.answers, self.sent, self.deadlines = answers, [], []  # type: ignore[var-annotated]
        self.kills = self.stops = 0

    def functions(self) -> list[Function]:
        return []

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def receive(self, deadline: float) -> list[Any]:
        self.deadlines.append(deadline)
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return list(answer)

    def kill(self) -> None:
        self.kills += 1

    def stop(self) -> None:
        self.stops += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The time, which goes on by a second whenever it is asked for; the list has how late it is."""
    now = [0.0]

    def monotonic() -> float:
        now[0] += 1
        return now[0]

    monkeypatch.setattr(module.time, "monotonic", monotonic)
    yield now
    monkeypatch.undo()


def driver_of(process: Scripted, functions: list[Function] = FUNCTIONS) -> Driver:
    found = Driver("reward process 3", BEGIN, queue.SimpleQueue(), io.BytesIO())
    found._process, found._functions = process, functions  # type: ignore[assignment]
    return found


def job(*, is_strict: bool = False) -> Job:
    return Job(FUNCTIONS, of("abcdef"), is_strict=is_strict)


def numbers(of_job: Job, reward: int) -> dict[int, Any]:
    """By sample its value or the kind of its failure."""
    row = of_job.values[reward]
    return {index: getattr(one, "value", getattr(one, "kind", 0)) for index, one in enumerate(row) if one is not None}


def test_parts_are_sent_and_their_answers_noted(clock: list[float]) -> None:
    """Works have the numbers of their parts, places count within a part; the deadline moves with each answer."""
    one = job()
    process = Scripted([[value(1, 0, 5)], [], [value(0, 1, 3), value(0, 0, 2)]])
    assert driver_of(process)._score([Part(one, 2, (1, 4)), Part(one, 3, (0,))]) == []
    assert process.sent == [Work(0, 2, [one.samples[1], one.samples[4]]), Work(1, 3, [one.samples[0]])]
    assert numbers(one, 2) == {1: 2, 4: 3}
    assert numbers(one, 3) == {0: 5}
    # The clock was read at the start, and after each answer that was not empty.
    assert process.deadlines == [1 + LIMIT_S, 2 + LIMIT_S, 2 + LIMIT_S]
    assert process.stops == 0


@pytest.mark.parametrize(
    ("reward", "again"),
    [
        (0, [((2,), 0), ((1,), 1)]),  # one after the other: it ended at the first that is left
        (1, [((1,), 1), ((2,), 1)]),
        (2, [((1,), 1), ((2,), 1)]),
        (3, [((1,), 1), ((2,), 1)]),
    ],
)
def test_what_an_ended_process_has_left_is_done_again(
    reward: int, again: list[tuple[tuple[int, ...], int]], caplog: pytest.LogCaptureFixture
) -> None:
    one = job()
    process = Scripted([[value(0, 0)], _EndError("it was killed", "end")])
    driver = driver_of(process)
    assert driver._score([Part(one, reward, (0, 1, 2))]) == [
        Part(one, reward, indices, ends) for indices, ends in again
    ]
    assert numbers(one, reward) == {0: 1}
    assert process.stops == 1
    assert driver.pid is None
    assert "reward process 3: it was killed; another one takes its place" in caplog.text


def test_a_process_that_says_nothing_for_long_has_the_sample_to_blame() -> None:
    one = job()
    process = Scripted([_EndError("it does not react", "time")])
    assert driver_of(process)._score([Part(one, 0, (1, 2))]) == [Part(one, 0, (2,))]
    assert one.values[0][1] == one.failure(0, 1, "time", "it does not react")


def test_an_end_while_the_driver_ends_leaves_nothing_to_do() -> None:
    one, process = job(), Scripted([_EndError("killed", "end")])
    driver = driver_of(process)
    driver._is_ending = True
    assert driver._score([Part(one, 0, (1, 2))]) == []
    assert process.stops == process.kills == 1
    assert numbers(one, 0) == {}


def test_a_batch_that_took_too_long_is_halved_and_the_process_replaced() -> None:
    """The part of which it is known that it hangs comes first, then what has no answer."""
    one = job()
    late = Failed(1, [0, 1, 2], "time", "took too long", 1.0, is_stuck=True)
    process = Scripted([[value(0, 0)], [late]])
    driver = driver_of(process)
    assert driver._score([Part(one, 3, (4, 5)), Part(one, 3, (1, 2, 3), 1)]) == [
        Part(one, 3, (1, 2), 2),
        Part(one, 3, (3,), 2),
        Part(one, 3, (5,)),
    ]
    assert process.stops == 1
    assert numbers(one, 3) == {4: 1}


def test_halves_of_a_batch_are_done_again_also_where_the_process_then_ends() -> None:
    one = job()
    late = Failed(1, [0, 1], "time", "took too long", 1.0)
    process = Scripted([[late], _EndError("killed", "end")])
    assert driver_of(process)._score([Part(one, 3, (4, 5)), Part(one, 3, (1, 2))]) == [
        Part(one, 3, (1,), 1),
        Part(one, 3, (2,), 1),
        Part(one, 3, (4,), 1),
        Part(one, 3, (5,), 1),
    ]


def test_halves_of_a_batch_are_done_again_when_all_else_has_an_answer() -> None:
    one = job()
    process = Scripted([[Failed(1, [0, 1], "time", "took too long", 1.0)], [value(0, 0)]])
    driver = driver_of(process)
    assert driver._score([Part(one, 2, (4,)), Part(one, 3, (1, 2))]) == [Part(one, 3, (1,), 1), Part(one, 3, (2,), 1)]
    assert process.stops == 0


@pytest.mark.parametrize(
    "failed",
    [
        Failed(0, [1], "time", "took too long", 1.0),  # alone: it is to blame
        Failed(0, [0, 1], "count", "one reward for two", 1.0),
        Failed(0, [0], "exception", "ValueError", 1.0),
    ],
)
def test_samples_are_blamed_for_their_failure(failed: Failed) -> None:
    one = job()
    rest = [value(0, place) for place in (0, 1) if place not in failed.places]
    driver = driver_of(Scripted([[failed, *rest]]))
    assert driver._score([Part(one, 1, (3, 5))]) == []
    for place in failed.places:
        index = (3, 5)[place]
        assert one.values[1][index] == one.failure(1, index, failed.kind, failed.text)
    assert len(numbers(one, 1)) == 2


def test_a_function_that_is_stuck_leaves_what_has_no_answer() -> None:
    one = job()
    process = Scripted([[value(1, 0), Failed(0, [0], "time", "stuck", 1.0, is_stuck=True)]])
    assert driver_of(process)._score([Part(one, 2, (0, 1)), Part(one, 2, (2,))]) == [Part(one, 2, (1,))]
    assert numbers(one, 2) == {0: "time", 2: 1}
    assert process.stops == 1


def test_nobody_waits_for_the_rest_of_a_job_that_has_failed() -> None:
    one, other = job(is_strict=True), job(is_strict=True)
    failed = Failed(0, [0], "exception", "ValueError", 1.0)
    process = Scripted([[failed]])
    assert driver_of(process)._score([Part(one, 2, (0, 1))]) == []
    assert process.stops == 1  # it is still at it
    process = Scripted([[failed]])
    assert driver_of(process)._score([Part(other, 2, (0,))]) == []
    assert process.stops == 0


def test_nobody_waits_for_a_part_of_a_job_that_has_failed_elsewhere() -> None:
    one = job(is_strict=True)
    process = Scripted([[value(0, 0), Failed(1, [0], "exception", "ValueError", 1.0)]])
    assert driver_of(process)._score([Part(one, 2, (3,)), Part(one, 2, (0, 1))]) == []
    assert process.stops == 1


def test_what_of_a_batch_has_an_answer_is_not_done_again() -> None:
    one = job()
    process = Scripted([[value(0, 1), Failed(0, [0, 2], "time", "took too long", 1.0)]])
    assert driver_of(process)._score([Part(one, 1, (3, 4, 5))]) == [Part(one, 1, (3,), 1), Part(one, 1, (5,), 1)]


def test_a_failed_job_does_not_end_another_one() -> None:
    one, other = job(is_strict=True), job(is_strict=True)
    process = Scripted([[Failed(0, [0], "exception", "ValueError", 1.0)], [value(1, 0)], [value(0, 1)]])
    assert driver_of(process)._score([Part(one, 2, (0, 1)), Part(other, 2, (3,))]) == []
    assert numbers(other, 2) == {3: 1}
    assert process.stops == 0


def test_an_answer_to_nothing_is_an_error_of_the_job() -> None:
    one = job()
    process = Scripted([[NotLoaded("late")]])
    driver = driver_of(process)
    assert driver._settle([Part(one, 2, (0, 1))]) == []
    with pytest.raises(RewardError, match=r"^reward process 3 sent NotLoaded, which answers nothing$"):
        one.wait(0)
    assert process.stops == 1
    assert driver.pid is None


def test_a_job_that_is_settled_gives_back_what_is_left() -> None:
    one = job()
    driver = driver_of(Scripted([_EndError("killed", "end")]))
    assert driver._settle([Part(one, 0, (0,))]) == [Part(one, 0, (0,), 1)]


# --- the loop of a driver


class Loop(Driver):
    """Notes what is worked on together; each part comes back as a test has written down."""

    def __init__(self, back: list[Callable[[list[Part]], list[Part]]], functions: list[Function] = FUNCTIONS):
        super().__init__("loop", BEGIN, queue.SimpleQueue(), io.BytesIO())
        self.back, self.settled = back, []  # type: ignore[var-annotated]
        self._functions = functions
        self.stops = 0

    def _start(self) -> Any:
        return None

    def _stop(self) -> None:
        self.stops += 1

    def _settle(self, parts: Any) -> list[Part]:
        self.settled.append([(part.reward, part.indices) for part in parts])
        return self.back.pop(0)(list(parts)) if self.back else []


def ran(loop: Loop, *given: list[Part]) -> list[list[tuple[int, tuple[int, ...]]]]:
    for parts in given:
        loop._parts.put(parts)
    loop._parts.put(None)
    loop.run()
    return loop.settled


def test_parts_of_async_functions_are_worked_on_together() -> None:
    one = job()
    parts = [Part(one, 2, (0,)), Part(one, 3, (1,))]
    assert ran(Loop([]), parts, [Part(one, 2, (2,))]) == [[(2, (0,)), (3, (1,))], [(2, (2,))]]


@pytest.mark.parametrize("others", [(2, 0), (1, 2), (0, 0)])
def test_parts_of_other_functions_go_one_by_one(others: tuple[int, int]) -> None:
    one = job()
    parts = [Part(one, reward, (place,)) for place, reward in enumerate(others)]
    assert ran(Loop([]), parts) == [[(reward, (place,))] for place, reward in enumerate(others)]


def test_without_functions_nothing_is_async() -> None:
    one = job()
    assert ran(Loop([], []), [Part(one, 2, (0,)), Part(one, 2, (1,))]) == [[(2, (0,))], [(2, (1,))]]


def test_parts_that_may_have_ended_a_process_go_one_by_one() -> None:
    """What comes back is worked on before what waits."""
    one = job()
    back = [lambda parts: [Part(one, 2, (4,), 1), Part(one, 2, (5,))]]
    assert ran(Loop(back), [Part(one, 2, (0,), 1), Part(one, 2, (1,))]) == [
        [(2, (0,))],
        [(2, (4,))],  # it has ended one
        [(2, (5,)), (2, (1,))],  # no part that is left has
    ]


def test_parts_of_a_job_that_is_done_are_left_out() -> None:
    one, other = job(), job()

    def fail(parts: list[Part]) -> list[Part]:
        one.fail(OSError())
        return parts

    assert ran(Loop([fail]), [Part(one, 0, (0,)), Part(one, 0, (1,)), Part(other, 0, (2,))]) == [
        [(0, (0,))],
        [(0, (2,))],
    ]


def test_a_driver_that_ends_takes_up_nothing_more() -> None:
    one = job()
    loop = Loop([])

    def end(parts: list[Part]) -> list[Part]:
        loop.end()
        return parts

    loop.back = [end]
    assert ran(loop, [Part(one, 0, (0,)), Part(one, 0, (1,))], [Part(one, 0, (2,))]) == [[(0, (0,))]]
    assert loop.stops == 1


def test_a_start_that_fails_is_told_to_whoever_asks_for_the_functions() -> None:
    class Failing(Loop):
        def _start(self) -> Any:
            raise RewardError("no such file")

    loop = Failing([])
    ran(loop)
    with pytest.raises(RewardError, match="no such file"):
        loop.functions()
    assert loop.stops == 2


def test_the_functions_of_a_driver_that_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks earlier waits until then."""

    class Started:
        def wait(self) -> None:
            loop._functions = [ONE]

    loop = Loop([], [])
    with monkeypatch.context() as patched:
        patched.setattr(loop, "_has_started", Started())
        assert loop.functions() == [ONE]
    loop._functions = FUNCTIONS
    ran(loop)
    assert loop.functions() == FUNCTIONS
    assert loop.stops == 1


# --- starting and ending


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The arguments of processes that drivers start."""
    arguments: list[tuple[Any, ...]] = []

    class Process(Scripted):
        def __init__(self, *given: Any):
            super().__init__([])
            arguments.append((self, *given))

        def functions(self) -> list[Function]:
            return [ONE] if len(arguments) == 1 else []

    monkeypatch.setattr(module, "_Process", Process)
    return arguments


def test_a_driver_starts_a_process_where_there_is_none(started: list[tuple[Any, ...]]) -> None:
    log = io.BytesIO()
    driver = Driver("reward process 0", BEGIN, queue.SimpleQueue(), log)
    assert (driver.pid, driver.daemon, driver.name) == (None, True, "reward process 0")
    process = driver._start()
    assert started == [(process, "reward process 0", BEGIN, log)]
    assert driver._start() is process
    assert driver._functions == [ONE]
    assert driver.pid == 7
    driver._stop()
    assert process.stops == 1  # type: ignore[attr-defined]
    assert driver.pid is None
    driver._stop()
    again = driver._start()
    assert again is not process
    assert driver._functions == [ONE]  # as before: it says them once
    assert process.kills == again.kills == 0  # type: ignore[attr-defined]


def test_a_process_that_starts_while_the_driver_ends_is_killed(started: list[tuple[Any, ...]]) -> None:
    parts: queue.SimpleQueue[Any] = queue.SimpleQueue()
    driver = Driver("reward process 0", BEGIN, parts, io.BytesIO())
    driver.end()
    assert parts.get_nowait() is None
    process: Any = driver._start()
    assert process.kills == 1
    driver.end()
    assert process.kills == 2


# --- a process and its pipes


class Child:
    """A started process that is none: its pipes, and what is done with it."""

    def __init__(self, words: Any, **options: Any):
        self.words, self.options = words, options
        self.pid, self.returncode, self.waits = 2**31 - 7, None, []  # type: ignore[var-annotated]
        inputs, outputs, errors = os.pipe(), os.pipe(), os.pipe()
        self.requests, self.stdin = io.FileIO(inputs[0]), io.FileIO(inputs[1], "w")
        self.stdout, self.replies = io.FileIO(outputs[0]), io.FileIO(outputs[1], "w")
        self.stderr, self.errors = io.FileIO(errors[0]), io.FileIO(errors[1], "w")

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> None:
        self.waits.append(timeout)
        if timeout is not None and self.returncode is None:
            raise subprocess.TimeoutExpired("child", timeout)

    def close(self) -> None:
        for file in (self.requests, self.stdin, self.stdout, self.replies, self.errors):
            file.close()


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Child]]:
    children: list[Child] = []

    def start(*words: Any, **options: Any) -> Child:
        children.append(Child(*words, **options))
        return children[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(module, "_POLL_S", 0.0)
    yield lambda: children[-1]
    for one in children:
        one.close()


FAR = float("inf")


def test_how_a_process_is_started(child: Callable[[], Child], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("OTHER", "kept")
    for given, expected in ((None, "1"), ("7", "7")):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if given:
            monkeypatch.setenv("OMP_NUM_THREADS", given)
        process = _Process("p", BEGIN, io.BytesIO())
        options = child().options
        environment = options.pop("env")
        assert environment == {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": expected,
        }
        pipe = subprocess.PIPE
        # In a group of its own, by which it is ended with all that it has started.
        assert options == {"stdin": pipe, "stdout": pipe, "stderr": pipe, "bufsize": 0, "start_new_session": True}
        assert child().words[-2:] == ("realhf.rewards.process", str(os.getpid()))
        assert process.pid == child().pid


def test_what_is_sent_goes_out_while_answers_are_waited_for(child: Callable[[], Child]) -> None:
    process = _Process("p", BEGIN, io.BytesIO())
    work = Work(0, 0, of("x" * 20_000))  # more than a pipe holds
    process.send(work)
    frames, found = Frames(ToProcess), []
    while len(found) < 2:
        assert process.receive(FAR) == []
        found += frames.add(os.read(child().requests.fileno(), 2**20))
    assert found == [BEGIN, work]
    assert not process._unsent


def test_answers_are_put_together(child: Callable[[], Child]) -> None:
    process = _Process("p", BEGIN, io.BytesIO())
    content = frame(value(0, 1))
    child().replies.write(content[:3])
    assert process.receive(FAR) == []
    child().replies.write(content[3:] + content)
    assert process.receive(FAR) == [value(0, 1)] * 2


def ended(process: _Process, deadline: float = FAR) -> tuple[str, str]:
    """What is said of an end, which may show a look later than what was said before."""
    for _ in range(3):
        try:
            process.receive(deadline)
        except _EndError as end:
            return str(end), end.kind
    pytest.fail("it has not ended")


def test_what_an_ended_process_has_said_is_still_heard(child: Callable[[], Child]) -> None:
    process = _Process("p", BEGIN, io.BytesIO())
    child().replies.write(frame(value(0, 1)))
    child().replies.close()
    child().returncode = 3
    child().requests.close()  # what is sent to it goes nowhere
    process.send(Work(0, 0, []))
    assert process.receive(FAR) == [value(0, 1)]
    assert ended(process) == ("the process ended during the call (exit code 3)", "end")


def test_a_process_ends_though_another_one_holds_its_output(child: Callable[[], Child]) -> None:
    """One that a function has started, and that outlives it."""
    process = _Process("p", BEGIN, io.BytesIO())
    assert process.receive(FAR) == []
    child().returncode = -11
    assert ended(process) == ("the process ended during the call (SIGSEGV)", "end")
    assert child().waits == [5]


def test_a_process_that_closes_its_output_is_given_a_while_to_end(child: Callable[[], Child]) -> None:
    process = _Process("p", BEGIN, io.BytesIO())
    child().replies.close()
    assert ended(process) == ("the process ended during the call (it closed its output)", "end")
    assert child().waits == [5]


class Poll:
    """Finds nothing ready, whatever is."""

    def __init__(self, then: Callable[[], Any] = lambda: None):
        self.registered, self.limits_ms, self.then = [], [], then  # type: ignore[var-annotated]

    def register(self, *words: int) -> None:
        self.registered.append(words)

    def poll(self, limit_ms: float) -> list[Any]:
        self.limits_ms.append(limit_ms)
        self.then()
        return []


def test_a_process_is_waited_for_without_haste(child: Callable[[], Child], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its input is looked at while there is something to send, and written to once it takes something."""
    process, poll = _Process("p", BEGIN, io.BytesIO()), Poll()
    monkeypatch.setattr(module, "_POLL_S", 0.25)
    with monkeypatch.context() as patched:
        patched.setattr(module.select, "poll", lambda: poll)
        assert process.receive(FAR) == []
        assert poll.registered == [(child().stdout.fileno(), 1), (child().stdin.fileno(), 4)]  # POLLIN, POLLOUT
        os.set_blocking(child().requests.fileno(), False)
        assert child().requests.read(10) is None
        process._unsent.clear()
        poll.registered = []
        assert process.receive(FAR) == []
    assert poll.registered == [(child().stdout.fileno(), 1)]
    assert poll.limits_ms == [250.0, 250.0]


def test_the_last_words_of_a_process_that_ends_at_this_moment_are_heard(
    child: Callable[[], Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    process = _Process("p", BEGIN, io.BytesIO())

    def end() -> None:
        child().replies.write(frame(value(0, 1)))
        child().returncode = 0

    with monkeypatch.context() as patched:
        patched.setattr(module.select, "poll", lambda: Poll(end))
        assert process.receive(FAR) == []
    assert process.receive(FAR) == [value(0, 1)]
    assert ended(process) == ("the process ended during the call (exit code 0)", "end")


def test_what_is_no_message_ends_the_call(child: Callable[[], Child]) -> None:
    process = _Process("p", BEGIN, io.BytesIO())
    child().replies.write(b"\0\0\0\1\xc1")
    text, kind = ended(process)
    assert (text.partition(" (")[0], kind) == ("the process wrote what is no message", "end")


def test_silence_beyond_the_deadline_ends_the_call(child: Callable[[], Child], clock: list[float]) -> None:
    process = _Process("p", BEGIN, io.BytesIO())
    clock[0] = 100.0
    assert process.receive(101.0) == []  # at the deadline, and not behind it
    child().replies.write(frame(value(0, 0)))
    assert process.receive(101.0) == [value(0, 0)]  # late, but there
    assert ended(process, 101.0) == ("the call took too long, and the process did not react", "time")


def test_a_process_says_once_what_it_has_loaded(child: Callable[[], Child], clock: list[float]) -> None:
    process = _Process("p", BEGIN, io.BytesIO())
    child().replies.write(frame(Loaded([ONE, ASYNC])))
    deadlines = []
    receive = process.receive

    def noted(deadline: float) -> list[Any]:
        deadlines.append(deadline)
        return receive(deadline)

    process.receive = noted  # type: ignore[method-assign]
    assert process.functions() == [ONE, ASYNC]
    assert process.functions() == []
    assert deadlines == [1 + 300.0]  # from the start


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (NotLoaded("there is no file"), "^there is no file$"),
        (
            None,
            r"^p did not start: the process ended during the call \(exit code 1\); its output is in the worker's log$",
        ),
    ],
)
def test_a_process_that_loads_nothing(child: Callable[[], Child], message: Any, words: str) -> None:
    process = _Process("p", BEGIN, io.BytesIO())
    if message is None:
        child().returncode = 1
    else:
        child().replies.write(frame(message))
    with pytest.raises(RewardError, match=words):
        process.functions()


def test_a_process_is_killed_with_its_group_while_the_group_is_its_own(
    child: Callable[[], Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[tuple[int, int]] = []

    def killpg(group: int, number: int) -> None:
        killed.append((group, number))
        raise ProcessLookupError

    monkeypatch.setattr(os, "killpg", killpg)
    process = _Process("p", BEGIN, io.BytesIO())
    process.kill()
    assert killed == [(child().pid, signal.SIGKILL)]
    child().returncode = 0
    process.kill()
    assert len(killed) == 1
    process.stop()
    assert child().waits == [None]
    assert child().stdin.closed
    assert child().stdout.closed
    child().returncode = None
    process.stop()
    assert len(killed) == 2


@pytest.mark.parametrize(
    ("returncode", "words"),
    [
        (None, "it closed its output"),
        (0, "exit code 0"),
        (3, "exit code 3"),
        (-9, "SIGKILL, perhaps for want of memory"),
        (-1, "SIGHUP"),
    ],
)
def test_how_a_process_ended(returncode: int | None, words: str) -> None:
    assert _how(returncode) == words


class Log(io.BytesIO):
    flushes = 0

    def flush(self) -> None:
        self.flushes += 1


def copied(content: bytes, tmp_path: Path, log: Any) -> None:
    (tmp_path / "printed").write_bytes(content)
    source = io.FileIO(tmp_path / "printed")
    _copy_output(source, log, "p 0")
    assert source.closed


def test_lines_of_a_process_are_copied_with_its_name(tmp_path: Path) -> None:
    log = Log()
    copied(b"one\n\ntwo\nno end", tmp_path, log)
    assert log.getvalue() == b"[p 0] one\n[p 0] \n[p 0] two\n[p 0] no end\n"
    assert log.flushes == 4
    log = Log()
    copied(b"much\n" * 2**16, tmp_path, log)
    assert log.getvalue() == b"[p 0] much\n" * 2**16


def test_so_much_of_the_output_is_copied_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_OUTPUT_BYTES", 2**20)
    log, line = Log(), b"x" * (2**19 - 1) + b"\n"
    copied(2 * line, tmp_path, log)
    assert log.getvalue() == 2 * (b"[p 0] " + line)
    log = Log()
    copied(2 * line + b"\nb\nc\n", tmp_path, log)
    note = b"[p 0] more than 1 MiB were printed; the rest is left out\n"
    assert log.getvalue() == 2 * (b"[p 0] " + line) + b"[p 0] \n" + note


def test_output_goes_nowhere_once_the_log_is_closed(tmp_path: Path) -> None:
    log = Log()
    log.close()
    copied(b"one\n", tmp_path, log)


def test_a_process_s_output_is_copied_by_a_thread(child: Callable[[], Child]) -> None:
    log = Log()
    before = set(threading.enumerate())
    _Process("p 0", BEGIN, log)
    [thread] = set(threading.enumerate()) - before
    assert thread.daemon
    child().errors.write(b"one\n")
    child().errors.close()
    thread.join()
    assert log.getvalue() == b"[p 0] one\n"
