"""The thread of a reward process: what it says to it, and what it makes of answers and of silence."""

import io
import queue
from collections.abc import Callable
from typing import Any

import pytest

from realhf.rewards import driver as module
from realhf.rewards.driver import Driver, _EndError
from realhf.rewards.jobs import Job, Part, RewardError
from realhf.rewards.messages import (
    Begin,
    Failed,
    Function,
    NotLoaded,
    Value,
    Work,
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

    def __init__(self, answers: list[Any], functions: list[Function] = FUNCTIONS):
        self.answers, self.sent, self.deadlines = answers, [], []  # type: ignore[var-annotated]
        self.loaded = functions
        self.kills = self.stops = 0

    def functions(self) -> list[Function]:
        return self.loaded

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
    assert driver._process is None
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
    assert driver._process is None


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
            super().__init__([], [ONE])
            arguments.append((self, *given))

    monkeypatch.setattr(module, "_Process", Process)
    return arguments


def test_a_driver_starts_a_process_where_there_is_none(started: list[tuple[Any, ...]]) -> None:
    log = io.BytesIO()
    driver = Driver("reward process 0", BEGIN, queue.SimpleQueue(), log)
    assert (driver._process, driver.daemon, driver.name) == (None, True, "reward process 0")
    process = driver._start()
    assert started == [(process, "reward process 0", BEGIN, log)]
    assert driver._start() is process
    assert driver._functions == [ONE]
    assert driver._process is process
    driver._stop()
    assert process.stops == 1  # type: ignore[attr-defined]
    assert driver._process is None
    driver._stop()
    again = driver._start()
    assert again is not process
    assert driver._functions == [ONE]
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
