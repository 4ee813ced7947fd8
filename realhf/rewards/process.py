"""Entry of a reward process: `python -m realhf.rewards.process PARENT`, started by a worker, ends with it.

Requests come on standard input and replies go to standard output, both under numbers that the functions do not know:
they find an empty input, and their output goes to the log. Functions of one sample and of batches run one after the
other on the main thread, async ones all at once in a loop on a thread of their own. A further thread looks whether one
of them is stuck.
"""

import asyncio
import contextlib
import os
import queue
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import realhf
from realhf.base.errors import UserError
from realhf.rewards.confined import end_with
from realhf.rewards.messages import (
    Begin,
    Failed,
    Frames,
    FromProcess,
    Function,
    Kind,
    Loaded,
    NotLoaded,
    ToProcess,
    Value,
    Work,
    frame,
)
from realhf.rewards.noted import Noted
from realhf.rewards.sources import Reward, load_rewards
from realhf.rewards.values import BadValueError, as_reward, as_rewards

_READ_BYTES = 1 << 20
_SHOWN_FRAMES = 3
_OPEN_FILES = 65536
# How often a thread looks whether a call is stuck, as a part of the time that a call may take.
_LOOKS = 4
_OWN_CODE = f"{Path(realhf.__file__).parent}{os.sep}"


def main(parent: int) -> None:
    """Serves until the worker closes the pipe or ends."""
    end_with(parent)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    many = _OPEN_FILES if most == resource.RLIM_INFINITY else min(most, _OPEN_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (many, most))  # each of many async calls may have a connection
    requests, replies = os.dup(0), os.dup(1)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    _Server(requests, replies).serve()


@dataclass
class _Now:
    """The present call of the main thread: on `places` of a work, since `since_s`."""

    work: Work
    places: Sequence[int]
    since_s: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class _Raised:
    """The outcome of a call that raised."""

    error: BaseException


class _Server:
    def __init__(self, requests: int, replies: int):
        self._requests, self._replies = requests, replies
        self._lock = threading.Lock()  # replies come from several threads
        self._todo: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self._rewards: list[Reward] = []
        self._timeout_s: float
        self._turns: asyncio.Semaphore  # limits async calls; a call's time begins with its turn
        self._now: _Now | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: dict[asyncio.Task[None], tuple[Work, Sequence[int]]] = {}
        self._turned_s: float  # when the loop last turned, before which it has no tasks

    def serve(self) -> None:
        threading.Thread(target=self._read, args=(threading.get_ident(),), daemon=True).start()
        while True:
            work = self._todo.get()
            for places in self._calls(work):
                self._score(work, places)

    def _read(self, main_thread: int) -> None:
        frames = Frames(ToProcess)
        while content := os.read(self._requests, _READ_BYTES):
            for message in frames.add(content):
                match message:
                    case Begin():
                        self._begin(message, main_thread)
                    case Work() if self._rewards[message.reward].signature.is_async:
                        assert self._loop is not None
                        self._loop.call_soon_threadsafe(self._start_tasks, message)
                    case Work():
                        self._todo.put(message)
        end_group(0)

    def _begin(self, begin: Begin, main_thread: int) -> None:
        try:
            self._rewards = load_rewards(begin.rewards)
        except (UserError, SystemExit) as error:
            self._send(NotLoaded(str(error)))
            end_group(1)
        self._timeout_s = begin.timeout_s
        self._turns = asyncio.Semaphore(begin.concurrency)
        if any(reward.signature.is_async for reward in self._rewards):
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._run_loop, args=(self._loop,), daemon=True).start()
        threading.Thread(target=self._watch, args=(main_thread,), daemon=True).start()
        self._send(Loaded([_described(reward) for reward in self._rewards]))

    def _send(self, message: FromProcess) -> None:
        content = memoryview(frame(message))
        with self._lock:
            while content:
                content = content[os.write(self._replies, content) :]

    # --- scoring

    def _calls(self, work: Work) -> list[Sequence[int]]:
        """The places of the samples that are scored by one call each: a batch together, others one by one."""
        places = range(len(work.samples))
        return [places] if self._rewards[work.reward].signature.is_batch else [(place,) for place in places]

    def _score(self, work: Work, places: Sequence[int]) -> None:
        """Scores samples by one call on the main thread, and those of a batch that raised by one call each."""
        reward = self._rewards[work.reward]
        self._now = now = _Now(work, places)
        noted = Noted([work.samples[place] for place in places])
        try:
            outcome: Any = reward.function(**reward.signature.arguments(noted.samples, noted.arguments))
        except BaseException as error:
            outcome = _Raised(error)
        is_for_each = self._reply(work, places, outcome, now.since_s, noted)
        self._now = None
        for place in places if is_for_each else ():
            self._score(work, (place,))

    def _reply(self, work: Work, places: Sequence[int], outcome: Any, start_s: float, noted: Noted) -> bool:
        """Sends the scores of samples, or their failure. True: a batch raised, and each of its samples is to be scored
        by itself, so that only those are blamed that raise alone."""
        signature, seconds = self._rewards[work.reward].signature, time.monotonic() - start_s
        try:
            if isinstance(outcome, _Raised):
                raise outcome.error
            values = as_rewards(outcome, len(places), signature.style) if signature.is_batch else [outcome]
        except BadValueError as error:
            self._send(Failed(work.number, list(places), "count", str(error), seconds))
            return False
        except BaseException as error:
            kind, text = _kind_and_text(error, self._timeout_s)
            if kind == "exception" and len(places) > 1:
                return True
            self._send(Failed(work.number, list(places), kind, text, seconds))
            return False
        for i, (place, value) in enumerate(zip(places, values, strict=True)):
            try:
                reward = as_reward(value, signature.style, noted.samples[i].length)
            except BaseException as error:
                self._send(Failed(work.number, [place], *_kind_and_text(error), seconds / len(places)))
            else:
                each_s = seconds / len(places)
                self._send(Value(work.number, place, reward, each_s, noted.metrics, noted.extra(i)))
        return False

    # --- async functions

    def _run_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        def turn() -> None:
            self._turned_s = time.monotonic()
            loop.call_later(self._timeout_s / _LOOKS, turn)

        turn()
        loop.run_forever()

    def _start_tasks(self, work: Work) -> None:
        assert self._loop is not None
        for places in self._calls(work):
            task = self._loop.create_task(self._score_in_turn(work, places))
            self._tasks[task] = (work, places)
            task.add_done_callback(self._tasks.pop)

    async def _score_in_turn(self, work: Work, places: Sequence[int]) -> None:
        async with self._turns:
            await self._score_async(work, places)

    async def _score_async(self, work: Work, places: Sequence[int]) -> None:
        """As `_score`, in the loop."""
        reward, start_s = self._rewards[work.reward], time.monotonic()
        noted = Noted([work.samples[place] for place in places])
        try:
            outcome: Any = await self._call(reward, noted)
        except BaseException as error:
            outcome = _Raised(error)
        if self._reply(work, places, outcome, start_s, noted):
            await asyncio.gather(*(self._score_async(work, (place,)) for place in places))

    async def _call(self, reward: Reward, noted: Noted) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                return await reward.function(**reward.signature.arguments(noted.samples, noted.arguments))
        except TimeoutError as error:
            if limit.expired():
                raise _TooLongError from error
            raise  # the function's own

    # --- calls that are stuck

    def _watch(self, main_thread: int) -> None:
        while True:
            time.sleep(min(1.0, self._timeout_s / _LOOKS))
            limit_s = time.monotonic() - self._timeout_s
            if (now := self._now) is not None and now.since_s < limit_s:
                self._give_up(now.work, now.places, main_thread)
            if self._loop is not None and self._tasks and self._turned_s < limit_s - self._timeout_s / _LOOKS:
                self._give_up_loop()

    def _give_up_loop(self) -> None:
        """An async function that does not await holds up all others: it is the one that runs."""
        with contextlib.suppress(Exception):  # the loop may turn again at this moment
            task: Any = asyncio.current_task(self._loop)
            if task in self._tasks:
                self._give_up(*self._tasks[task], None)

    def _give_up(self, work: Work, places: Sequence[int], thread: int | None) -> None:
        stack = sys._current_frames().get(thread) if thread is not None else None
        at = f", at{_lines(traceback.extract_stack(stack))}" if stack is not None else ", without awaiting anything"
        text = f"the call took more than timeout_s={self._timeout_s:g} s{at}"
        self._send(Failed(work.number, list(places), "time", text, self._timeout_s, is_stuck=True))
        end_group(1)


def _described(reward: Reward) -> Function:
    of = reward.signature
    form = (of.is_batch, of.is_async, of.wants_tokens)
    return Function(reward.name, reward.place, reward.weight, *form, of.columns_asked, of.wants_token_texts)


class _TooLongError(Exception):
    """An async call took too long."""


def end_group(code: int) -> None:
    """Ends this process, and the processes that its functions started."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(code)


def _kind_and_text(error: BaseException, timeout_s: float = 0.0) -> tuple[Kind, str]:
    """The kind of a failure and its text: the exception, and the last places in the user's code."""
    if isinstance(error, BadValueError):
        return "value", str(error)
    if isinstance(error, _TooLongError):
        return "time", f"the call took more than timeout_s={timeout_s:g} s"
    try:
        what = "".join(traceback.format_exception_only(error)).strip()
    except Exception:  # an exception of the user's whose text raises
        what = type(error).__name__
    return "exception", f"{what}{_lines(traceback.extract_tb(error.__traceback__))}"


def _lines(stack: traceback.StackSummary) -> str:
    """` file:line in function: source` of the last frames, without those of this package if there are others."""
    own = [one for one in stack if not one.filename.startswith((_OWN_CODE, "<"))]
    shown = (own or list(stack))[-_SHOWN_FRAMES:]
    return "".join(f"\n  | {Path(one.filename).name}:{one.lineno} in {one.name}: {one.line}" for one in shown)


if __name__ == "__main__":
    main(int(sys.argv[1]))
