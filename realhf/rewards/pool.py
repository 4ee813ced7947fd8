"""The reward processes of a worker: samples in, one score a sample out."""

import logging
import math
import queue
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO, Annotated, Literal

from realhf.base.options import REWARD, Common, Option, Options
from realhf.rewards.details import Scalar
from realhf.rewards.driver import Driver, Parts
from realhf.rewards.jobs import Failure, Job, NoRewardError, Part, RewardError
from realhf.rewards.messages import Begin, Function, Value
from realhf.rewards.signature import Sample

logger = logging.getLogger("realhf.rewards")

OnError = Literal["fail", "zero", "drop"]

# A process gets this many parts of a step, so that slow samples do not wait behind each other.
_PARTS = 4
_MAX_PART = 64
BATCH_SAMPLES = 64
CONCURRENCY = 1024
# Async calls that a process is told of at a time.
_MAX_ASYNC = 4096
_SHOWN_FAILURES = 5


@dataclass(frozen=True, kw_only=True)
class FunctionOptions(Options):
    """How functions on texts are called.

    A call's time begins when it starts: an async call that waits for its turn has not begun. All async functions share
    one process besides `processes` (a pool takes 0 for 1). The number of processes has no influence on batches.

    Raises:
        UserError: at construction, a value is out of its range.
    """

    HEADING = REWARD
    WHERE = ""

    on_error: Annotated[
        OnError, Common("a function that fails ends the run, counts as a value of 0, or drops the sample")
    ] = "fail"
    timeout_s: Annotated[
        float, Option("longest one call of a function may take, in seconds", metavar="S", range=(0.01, 1e6), unit="s")
    ] = 60.0
    processes: Annotated[
        int,
        Option(
            "processes for functions in each worker (0: the host's cores, divided among workers)",
            range=(0, 1024),
            unit="processes (0: by the cores)",
        ),
    ] = 0
    concurrency: Annotated[int, Option("calls of async functions that a worker makes at a time", range=(1, 2**16))] = (
        CONCURRENCY
    )
    batch_samples: Annotated[
        int, Option("most samples that a function of batches gets at a time", range=(1, 2**20))
    ] = BATCH_SAMPLES
    seconds_per_sample: Annotated[
        float,
        Option("seconds that the functions work on a sample, for the planner", metavar="S", range=(0, 1e6), unit="s"),
    ] = 0.001


@dataclass(frozen=True, kw_only=True)
class Score:
    """The result of a sample.

    reward: the sum of weight * value over the functions that gave a value. Values of tokens count by their sum.
    of_tokens: where a function gave values of tokens, the reward of each: a function's value for the whole response is
        in that of the last one. Else empty.
    is_valid: False where a function failed, or none gave a value, and the policy is "drop"; then `reward` is 0.
    values: by function its value, None for no reward or a failure.
    failures: by function its failure.
    seconds: of all functions together, as their processes measured them.
    metrics: (sum, weight) by name of what the functions logged in the calls that the sample was in; extra: by column
        the values that they logged for it.
    """

    reward: float
    is_valid: bool
    values: dict[str, float | None]
    failures: dict[str, Failure]
    seconds: float
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    extra: dict[str, Scalar] = field(default_factory=dict)
    of_tokens: tuple[float, ...] = ()


class RewardPool:
    """Scores samples in processes of its own, which `close` ends, and this process however it ends.

    Args:
        rewards: names of the functions, see `RewardSource`.
        log: takes the output of functions; by default standard error, which is the worker's log.

    Raises:
        RewardError: a function cannot be loaded, see `load_rewards`.
    """

    def __init__(self, rewards: Sequence[str], options: FunctionOptions, log: IO[bytes] | None = None):
        self.options = options
        self._begin = Begin(tuple(rewards), options.timeout_s, options.concurrency)
        self._log = log or sys.stderr.buffer
        self._drivers: list[Driver] = []
        self._is_closed = False
        self._shown: dict[str, int] = {}
        self._lock = threading.Lock()
        # The first process says what the functions are: their code, with whatever it imports, stays out of this one.
        first = self._start("reward process 0", queue.SimpleQueue())
        try:
            self.functions: list[Function] = self._drivers[0].functions()
        except RewardError:
            self.close()
            raise
        forms = {function.is_async for function in self.functions}
        self._queues = {False: first} if False in forms else {True: first}  # by whether functions are async
        if False in forms:
            for i in range(1, options.processes):
                self._start(f"reward process {i}", first)
        if len(forms) > 1:
            self._queues[True] = self._start("async reward process", queue.SimpleQueue())

    def _start(self, name: str, parts: "queue.SimpleQueue[Parts | None]") -> "queue.SimpleQueue[Parts | None]":
        """Starts a process that takes parts from a queue; returns the queue."""
        driver = Driver(name, self._begin, parts, self._log)
        driver.start()
        self._drivers.append(driver)
        return parts

    @property
    def names(self) -> list[str]:
        """The names of the functions, for statistics."""
        return [function.name for function in self.functions]

    @property
    def wants_tokens(self) -> bool:
        """Whether a function asks for the tokens of responses."""
        return any(function.wants_tokens for function in self.functions)

    @property
    def wants_token_texts(self) -> bool:
        """Whether a function asks for the text of each token."""
        return any(function.wants_token_texts for function in self.functions)

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """The scores of the samples, in their order; blocks until all are there. Threads may call it side by side.

        Raises:
            NoRewardError: a function fails for a sample, or none gives it a reward, and `on_error` is "fail".
            RewardError: the processes cannot be started.
        """
        job = Job(self.functions, samples, is_strict=self.options.on_error == "fail")
        together = []
        for index, reward in enumerate(self.functions):
            for run in self._runs(reward, len(samples)):
                part = Part(job, index, tuple(run))
                if reward.is_async:
                    together.append(part)
                else:
                    self._queues[False].put([part])
        if together:
            self._queues[True].put(together)
        while not job.wait(1.0):  # every call has a deadline where it runs
            if self._is_closed:
                raise RewardError("the reward processes were closed during a call")
        scores = [self._score(job, index) for index in range(len(samples))]
        self._report(scores)
        return scores

    def close(self) -> None:
        """Ends the processes, at once."""
        self._is_closed = True
        for driver in self._drivers:
            driver.end()
        for driver in self._drivers:
            driver.join()

    def _runs(self, reward: Function, count: int) -> list[range]:
        if reward.is_batch:
            size = self.options.batch_samples
        elif reward.is_async:
            size = _MAX_ASYNC
        else:
            parts = _PARTS * self.options.processes if self.options.processes > 1 else 1
            size = min(_MAX_PART, max(1, math.ceil(count / parts)))
        return [range(begin, min(begin + size, count)) for begin in range(0, count, size)]

    def _score(self, job: Job, index: int) -> Score:
        values: dict[str, float | None] = {}
        failures: dict[str, Failure] = {}
        metrics: dict[str, tuple[float, float]] = {}
        extra: dict[str, Scalar] = {}
        total, seconds, has_reward = 0.0, 0.0, False
        for reward, row in zip(self.functions, job.values, strict=True):
            match row[index]:
                case Value(value=given, seconds=taken) as answer:
                    value = math.fsum(given) if isinstance(given, list) else given
                    values[reward.name], seconds = value, seconds + taken
                    extra |= answer.extra
                    for name, number in answer.metrics.items():
                        sum_, weight = metrics.get(name, (0.0, 0.0))
                        metrics[name] = (sum_ + number, weight + 1)
                    if value is not None:
                        total, has_reward = total + reward.weight * value, True
                case Failure() as failure:
                    values[reward.name], failures[reward.name], has_reward = None, failure, True
        if not has_reward:
            name, place = " and ".join(self.names), " and ".join(reward.place for reward in self.functions)
            reason = "no function gives this sample a reward (None)"
            failures[name] = Failure(name, job.samples[index], "none", reason, place)
            if self.options.on_error == "fail":
                raise NoRewardError(failures[name])
        is_valid = not (failures and self.options.on_error == "drop")
        return Score(
            reward=total if is_valid else 0.0,
            is_valid=is_valid,
            values=values,
            failures=failures,
            seconds=seconds,
            metrics=metrics,
            extra=extra,
            of_tokens=self._of_tokens(job, index) if is_valid else (),
        )

    def _of_tokens(self, job: Job, index: int) -> tuple[float, ...]:
        """See `Score.of_tokens`."""
        of_tokens: list[list[float]] = []
        of_whole = 0.0
        for reward, row in zip(self.functions, job.values, strict=True):
            match row[index]:
                case Value(value=list(values)):
                    of_tokens.append([reward.weight * value for value in values])
                case Value(value=float(value)):
                    of_whole += reward.weight * value
        sums = list(map(math.fsum, zip(*of_tokens, strict=True)))
        return (*sums[:-1], sums[-1] + of_whole) if sums else ()

    def _report(self, scores: Sequence[Score]) -> None:
        """Logs the first few failures of each function; statistics count all."""
        for score in scores:
            for name, failure in score.failures.items():
                with self._lock:
                    count = self._shown[name] = self._shown.get(name, 0) + 1
                if count <= _SHOWN_FAILURES:
                    treated = "counts as 0" if self.options.on_error == "zero" else "the sample is dropped"
                    more = "" if count < _SHOWN_FAILURES else " (further ones are counted only)"
                    logger.warning("%s; %s%s", failure.text, treated, more)
