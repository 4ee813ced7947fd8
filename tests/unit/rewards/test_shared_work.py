"""A pool of reward processes: which there are, how samples are shared out, and what comes of their values."""

import io
import queue
import sys
from collections.abc import Callable
from typing import Any

import pytest

from realhf.base.errors import UserError
from realhf.rewards import pool as module
from realhf.rewards.jobs import Failure, Job, RewardError
from realhf.rewards.messages import Begin, Function, Kind, Value
from realhf.rewards.pool import FunctionOptions, RewardPool, Score
from tests.unit.rewards.samples import of


def function(name: str, weight: float = 1.0, *, is_batch: bool = False, is_async: bool = False) -> Function:
    return Function(name, f"{name} (r.py)", weight, is_batch, is_async, name == "tokens")


ONE, BATCH, ASYNC = function("one"), function("batch", is_batch=True), function("async", is_async=True)
ASYNC_BATCH = function("both", is_batch=True, is_async=True)


class Drivers:
    """Those that pools start, in place of threads and processes."""

    def __init__(self) -> None:
        self.functions: list[Function] = [ONE]
        self.made: list[Any] = []
        self.calls: list[Any] = []
        self.error: Exception | None = None

    def __call__(self, name: str, begin: Begin, parts: Any, log: Any) -> Any:
        drivers = self

        class Driver:
            def start(self) -> None:
                drivers.calls.append(("start", name))

            def functions(self) -> list[Function]:
                drivers.calls.append(("functions", name))
                if drivers.error is not None:
                    raise drivers.error
                return drivers.functions

            def end(self) -> None:
                drivers.calls.append(("end", name))

            def join(self) -> None:
                drivers.calls.append(("join", name))

        self.made.append((name, begin, parts, log))
        return Driver()


@pytest.fixture
def drivers(monkeypatch: pytest.MonkeyPatch) -> Drivers:
    found = Drivers()
    monkeypatch.setattr(module, "Driver", found)
    return found


def pool_of(drivers: Drivers, *functions: Function, **options: Any) -> RewardPool:
    drivers.functions = list(functions)
    return RewardPool(["r.py:f"], FunctionOptions(**options), io.BytesIO())


# --- processes


@pytest.mark.parametrize(
    ("functions", "names", "queues"),
    [
        ([ONE], ["reward process 0", "reward process 1", "reward process 2"], [0, 0, 0]),
        ([ONE, BATCH], ["reward process 0", "reward process 1", "reward process 2"], [0, 0, 0]),
        ([ASYNC], ["reward process 0"], [0]),
        (
            [ASYNC, ONE],
            ["reward process 0", "reward process 1", "reward process 2", "async reward process"],
            [0, 0, 0, 1],
        ),
    ],
)
def test_async_functions_share_a_process_and_others_have_as_many_as_asked_for(
    functions: list[Function], names: list[str], queues: list[int], drivers: Drivers
) -> None:
    drivers.functions = functions
    log = io.BytesIO()
    pool = RewardPool(["r.py:f", "r.py:g"], FunctionOptions(processes=3, timeout_s=7.0, concurrency=5), log)
    assert [name for name, *_ in drivers.made] == names
    different: list[Any] = []
    for _, begin, parts, used in drivers.made:
        assert begin == Begin(("r.py:f", "r.py:g"), 7.0, 5)
        assert used is log
        if not any(parts is one for one in different):
            different.append(parts)
    assert [next(i for i, one in enumerate(different) if one is parts) for _, _, parts, _ in drivers.made] == queues
    assert drivers.calls[:2] == [("start", "reward process 0"), ("functions", "reward process 0")]
    assert drivers.calls[2:] == [("start", name) for name in names[1:]]
    assert pool.functions == functions
    by_form = {one.is_async: different[-1] if one.is_async else different[0] for one in functions}
    assert pool._queues == by_form
    assert pool.names == [one.name for one in functions]


def test_what_functions_print_goes_to_the_worker_s_log(drivers: Drivers, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = io.TextIOWrapper(io.BytesIO())
    monkeypatch.setattr(sys, "stderr", errors)
    RewardPool(["r.py:f"], FunctionOptions())
    assert drivers.made[0][3] is errors.buffer


def test_tokens_are_wanted_where_a_function_asks_for_them(drivers: Drivers) -> None:
    assert not pool_of(drivers, ONE, BATCH).wants_tokens
    assert pool_of(drivers, ONE, function("tokens")).wants_tokens


def test_a_pool_whose_functions_cannot_be_loaded_ends(drivers: Drivers) -> None:
    drivers.error = RewardError("no such file")
    with pytest.raises(RewardError, match="no such file"):
        RewardPool(["r.py:f"], FunctionOptions(processes=2), io.BytesIO())
    name = "reward process 0"
    assert drivers.calls == [("start", name), ("functions", name), ("end", name), ("join", name)]


def test_a_pool_ends_all_its_processes_before_it_waits_for_one(drivers: Drivers) -> None:
    pool = pool_of(drivers, ONE, processes=2)
    drivers.calls.clear()
    pool.close()
    names = ["reward process 0", "reward process 1"]
    assert drivers.calls == [(what, name) for what in ("end", "join") for name in names]


# --- sharing out


@pytest.mark.parametrize(
    ("reward", "processes", "count", "sizes"),
    [
        (ONE, 1, 20, [20]),
        (ONE, 1, 0, []),
        (ONE, 1, 130, [64, 64, 2]),
        (ONE, 2, 20, [3] * 6 + [2]),  # four parts a process, rounded up
        (ONE, 2, 16, [2] * 8),
        (ONE, 2, 3, [1, 1, 1]),
        (ONE, 2, 1000, [64] * 15 + [40]),
        (BATCH, 2, 20, [7, 7, 6]),
        (ASYNC_BATCH, 1, 7, [7]),
        (ASYNC, 2, 4097, [4096, 1]),
    ],
)
def test_how_many_samples_a_process_is_told_of_at_a_time(
    reward: Function, processes: int, count: int, sizes: list[int], drivers: Drivers
) -> None:
    runs = pool_of(drivers, reward, processes=processes, batch_samples=7)._runs(reward, count)
    assert [len(run) for run in runs] == sizes
    assert [index for run in runs for index in run] == list(range(count))


class Answering:
    """A queue whose parts are scored at once: a sample's value is `10 * function + sample`."""

    def __init__(self) -> None:
        self.parts: list[Any] = []

    def put(self, parts: Any) -> None:
        self.parts.append([(part.reward, part.indices) for part in parts])
        for part in parts:
            for index in part.indices:
                part.job.put(part.reward, index, Value(0, 0, 10.0 * part.reward + index, 0.5))


def test_parts_go_one_by_one_and_those_of_async_functions_together(
    drivers: Drivers, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = pool_of(drivers, ONE, ASYNC, BATCH, ASYNC_BATCH, batch_samples=2)
    others, together = Answering(), Answering()
    pool._queues = {False: others, True: together}  # type: ignore[dict-item]
    reported: list[Any] = []
    monkeypatch.setattr(pool, "_report", reported.append)
    scores = pool.score(of("abc"))
    assert reported == [scores]
    assert others.parts == [[(0, (0, 1, 2))], [(2, (0, 1))], [(2, (2,))]]
    assert together.parts == [[(1, (0, 1, 2)), (3, (0, 1)), (3, (2,))]]
    assert scores == [
        Score(
            reward=60.0 + 4 * index,
            is_valid=True,
            values={"one": index, "async": 10.0 + index, "batch": 20.0 + index, "both": 30.0 + index},
            failures={},
            seconds=2.0,
        )
        for index in range(3)
    ]
    pool = pool_of(drivers, ONE)
    pool._queues = {False: others}  # type: ignore[dict-item]  # nothing is put where no process takes it
    assert pool.score([]) == []


def test_a_call_waits_until_it_is_done_or_the_pool_is_closed(drivers: Drivers, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of(drivers, ONE)
    pool._queues = {False: Answering()}  # type: ignore[dict-item]
    waits = [False, False, True]
    monkeypatch.setattr(Job, "wait", lambda self, seconds: waits.pop(0) if seconds == 1.0 else None)
    assert len(pool.score(of("a"))) == 1
    assert waits == []
    waits = [False]
    pool.close()
    with pytest.raises(RewardError, match=r"^the reward processes were closed during a call$"):
        pool.score(of("a"))


# --- scores

PLACES = {"one": "one (r.py)", "two": "two (r.py)"}


def scored(drivers: Drivers, on_error: Any, *row: Any) -> Score:
    """The score of a sample for which two functions, with weights 2 and 10, gave these values (text: a failure)."""
    pool = pool_of(drivers, function("one", 2.0), function("two", 10.0), on_error=on_error)
    job = Job(pool.functions, of("ab"), is_strict=False)
    for reward, value in enumerate(row):
        failure = job.failure(reward, 1, "value", str(value))
        job.values[reward][1] = failure if isinstance(value, str) else Value(0, 0, value, 0.25 * (reward + 1))
    return pool._score(job, 1)


def failure(name: str, reason: str) -> Failure:
    kind: Kind = "none" if reason == NO_REWARD else "value"
    return Failure(name, of("ab")[1], kind, reason, PLACES.get(name, "one (r.py) and two (r.py)"))


NO_REWARD = "no function gives this sample a reward (None)"
SCORES: list[tuple[Any, tuple[Any, Any], Any]] = [
    ("fail", (3.0, 0.5), (11.0, True, {}, 0.75)),
    ("fail", (None, 0.5), (5.0, True, {}, 0.75)),
    ("fail", (0.0, None), (0.0, True, {}, 0.75)),
    ("zero", ("bad", 0.5), (5.0, True, {"one": "bad"}, 0.5)),
    ("drop", ("bad", 0.5), (0.0, False, {"one": "bad"}, 0.5)),
    ("zero", ("bad", None), (0.0, True, {"one": "bad"}, 0.5)),
    ("zero", ("bad", "worse"), (0.0, True, {"one": "bad", "two": "worse"}, 0.0)),
    ("zero", (None, None), (0.0, True, {"one and two": NO_REWARD}, 0.75)),
    ("drop", (None, None), (0.0, False, {"one and two": NO_REWARD}, 0.75)),
]


@pytest.mark.parametrize(("on_error", "row", "expected"), SCORES)
def test_the_score_of_values_and_failures(on_error: Any, row: Any, expected: Any, drivers: Drivers) -> None:
    reward, is_valid, failures, seconds = expected
    values = [None if isinstance(value, str) else value for value in row]
    assert scored(drivers, on_error, *row) == Score(
        reward=reward,
        is_valid=is_valid,
        values=dict(zip(PLACES, values, strict=True)),
        failures={name: failure(name, reason) for name, reason in failures.items()},
        seconds=seconds,
    )


def test_a_sample_without_a_reward_is_an_error_of_the_run(drivers: Drivers) -> None:
    with pytest.raises(RewardError) as caught:
        scored(drivers, "fail", None, None)
    told = failure("one and two", NO_REWARD).text
    assert (
        str(caught.value) == f"{told}; return a number, or let such samples count with --reward.on-error zero, or drop"
    )


@pytest.mark.parametrize(("on_error", "treated"), [("zero", "counts as 0"), ("drop", "the sample is dropped")])
def test_the_first_failures_of_each_function_are_told(
    on_error: Any, treated: str, drivers: Drivers, caplog: pytest.LogCaptureFixture
) -> None:
    pool = pool_of(drivers, ONE, on_error=on_error)

    def score(*names: str) -> Score:
        return Score(
            reward=0.0, is_valid=True, values={}, failures={name: failure(name, "bad") for name in names}, seconds=0.0
        )

    for _ in range(3):
        pool._report([score("one"), score("one"), score()])
    pool._report([score("two")])
    last = " (further ones are counted only)"
    told = [failure("one", "bad").text + f"; {treated}" + (last if i == 4 else "") for i in range(5)]
    assert [record.getMessage() for record in caplog.records] == [*told, failure("two", "bad").text + f"; {treated}"]


# --- options


def test_what_holds_where_nothing_is_said() -> None:
    expected = FunctionOptions(on_error="fail", timeout_s=60.0, processes=0, concurrency=1024, batch_samples=64)
    assert FunctionOptions() == expected


@pytest.mark.parametrize(
    ("name", "low", "high", "below", "above"),
    [
        ("timeout_s", 0.01, 1e6, 0.009, 1.001e6),
        ("processes", 0, 1024, -1, 1025),
        ("concurrency", 1, 2**16, 0, 2**16 + 1),
        ("batch_samples", 1, 2**20, 0, 2**20 + 1),
    ],
)
def test_the_range_of_options(name: str, low: Any, high: Any, below: Any, above: Any) -> None:
    make: Callable[..., FunctionOptions] = FunctionOptions
    for value in (low, high):
        assert getattr(make(**{name: value}), name) == value
    for value in (below, above):
        with pytest.raises(UserError, match=name):
            make(**{name: value})


def test_a_queue_of_its_own_for_each_pool(drivers: Drivers) -> None:
    pool_of(drivers, ONE)
    pool_of(drivers, ONE)
    first, second = (parts for _, _, parts, _ in drivers.made)
    assert isinstance(first, queue.SimpleQueue)
    assert first is not second
