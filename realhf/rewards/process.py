"""Entry of a reward process: `python -m realhf.rewards.process PARENT`, started by a worker, ends with it.

Requests come on standard input and replies go to standard output, both under numbers that the functions do not know:
they find an empty input, and what they print goes to the log. Functions of one sample and of batches run one after the
other on the main thread, async ones all at once in a loop on a thread of their own. A further thread looks whether one
of them is stuck.
"""

import asyncio
import contextlib
import ctypes
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
from realhf.rewards.signature import Sample
from realhf.rewards.sources import Reward, load_rewards
from realhf.rewards.values import BadValueError, as_reward, as_rewards

_PR_SET_PDEATHSIG = 1
_READ_BYTES = 1 << 20
_SHOWN_FRAMES = 3
_OPEN_FILES = 65536
# How often a thread looks whether a call is stuck, as a part of the time that a call may take.
_LOOKS = 4
_OWN_CODE = str(Path(realhf.__file__).parent)


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


def end_with(parent: int) -> None:
    """The system kills this process when the thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the request was made
        os._exit(1)


@dataclass
class _Now:
    """What the main thread does: a call on `places` of a work, since `since_s`."""

    work: Work
    places: Sequence[int]
    since_s: float = field(default_factory=time.monotonic)


class _Server:
    def __init__(self, requests: int, replies: int):
        self._requests, self._replies = requests, replies
        self._lock = threading.Lock()  # replies come from several threads
        self._todo: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self._rewards: list[Reward] = []
        self._timeout_s: float
        self._turns: asyncio.Semaphore  # of async calls; a call's time begins with its turn
        self._now: _Now | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: dict[asyncio.Task[None], tuple[Work, int]] = {}
        self._turned_s: float  # when the loop last turned, before which it has no tasks

    def serve(self) -> None:
        threading.Thread(target=self._read, args=(threading.get_ident(),), daemon=True).start()
        while True:
            work = self._todo.get()
            reward = self._rewards[work.reward]
            if reward.signature.is_batch:
                self._score_batch(work, reward)
            else:
                for place in range(len(work.samples)):
                    self._score_one(work, place, reward)

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

    # --- functions that are called one after the other

    def _score_one(self, work: Work, place: int, reward: Reward) -> None:
        arguments = reward.signature.arguments([work.samples[place]])
        self._now = _Now(work, (place,))
        try:
            value = as_reward(reward.function(**arguments), reward.signature.style)
        except BaseException as error:
            self._send(Failed(work.number, [place], *_kind_and_text(error), self._seconds()))
        else:
            self._send(Value(work.number, place, value, self._seconds()))
        finally:
            self._now = None

    def _score_batch(self, work: Work, reward: Reward) -> None:
        """A batch that raises is scored again sample by sample, so that only those are blamed that raise alone."""
        places = range(len(work.samples))
        self._now = _Now(work, places)
        try:
            returned = reward.function(**reward.signature.arguments(work.samples))
            values = as_rewards(returned, len(work.samples), reward.signature.style)
        except BadValueError as error:
            self._send(Failed(work.number, list(places), "count", str(error), self._seconds()))
        except BaseException as error:
            if len(places) == 1:
                self._send(Failed(work.number, [0], *_kind_and_text(error), self._seconds()))
            else:
                self._score_apart(work, reward)
        else:
            self._send_values(work, values, self._seconds() / len(places), reward)
        finally:
            self._now = None

    def _score_apart(self, work: Work, reward: Reward) -> None:
        for place, sample in enumerate(work.samples):
            self._now = _Now(work, (place,))
            try:
                returned = reward.function(**reward.signature.arguments([sample]))
                [value] = as_rewards(returned, 1, reward.signature.style)
                number = as_reward(value, reward.signature.style)
            except BaseException as error:
                self._send(Failed(work.number, [place], *_kind_and_text(error), self._seconds()))
            else:
                self._send(Value(work.number, place, number, self._seconds()))

    def _send_values(self, work: Work, values: Sequence[Any], seconds: float, reward: Reward) -> None:
        for place, value in enumerate(values):
            try:
                self._send(Value(work.number, place, as_reward(value, reward.signature.style), seconds))
            except BadValueError as error:
                self._send(Failed(work.number, [place], "value", str(error), seconds))

    def _seconds(self) -> float:
        assert self._now is not None
        return time.monotonic() - self._now.since_s

    # --- async functions

    def _run_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        def turn() -> None:
            self._turned_s = time.monotonic()
            loop.call_later(self._timeout_s / _LOOKS, turn)

        turn()
        loop.run_forever()

    def _start_tasks(self, work: Work) -> None:
        assert self._loop is not None
        is_batch = self._rewards[work.reward].signature.is_batch
        for place in [-1] if is_batch else range(len(work.samples)):
            task = self._loop.create_task(self._await_batch(work) if is_batch else self._await_one(work, place))
            self._tasks[task] = (work, place)
            task.add_done_callback(self._tasks.pop)

    async def _await_one(self, work: Work, place: int) -> None:
        async with self._turns:
            await self._do_one(work, place)

    async def _do_one(self, work: Work, place: int) -> None:
        reward, start_s = self._rewards[work.reward], time.monotonic()
        try:
            value = as_reward(await self._call(reward, [work.samples[place]]), reward.signature.style)
        except BaseException as error:
            self._send(
                Failed(work.number, [place], *_kind_and_text(error, self._timeout_s), time.monotonic() - start_s)
            )
        else:
            self._send(Value(work.number, place, value, time.monotonic() - start_s))

    async def _await_batch(self, work: Work) -> None:
        async with self._turns:
            await self._do_batch(work)

    async def _do_batch(self, work: Work) -> None:
        reward, start_s, count = self._rewards[work.reward], time.monotonic(), len(work.samples)
        try:
            values = as_rewards(await self._call(reward, work.samples), count, reward.signature.style)
        except BadValueError as error:
            self._send(Failed(work.number, [*range(count)], "count", str(error), time.monotonic() - start_s))
        except BaseException as error:
            kind, text = _kind_and_text(error, self._timeout_s)
            if count == 1 or kind == "time":
                self._send(Failed(work.number, [*range(count)], kind, text, time.monotonic() - start_s))
                return
            await asyncio.gather(*(self._do_one_of_batch(work, place) for place in range(count)))
        else:
            self._send_values(work, values, (time.monotonic() - start_s) / count, reward)

    async def _do_one_of_batch(self, work: Work, place: int) -> None:
        reward, start_s = self._rewards[work.reward], time.monotonic()
        style = reward.signature.style
        try:
            [value] = as_rewards(await self._call(reward, [work.samples[place]]), 1, style)
            number = as_reward(value, style)
        except BaseException as error:
            self._send(
                Failed(work.number, [place], *_kind_and_text(error, self._timeout_s), time.monotonic() - start_s)
            )
        else:
            self._send(Value(work.number, place, number, time.monotonic() - start_s))

    async def _call(self, reward: Reward, samples: Sequence[Sample]) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                return await reward.function(**reward.signature.arguments(samples))
        except TimeoutError as error:
            if limit.expired():
                raise _TooLongError from error
            raise  # the function's own

    # --- what is stuck

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
                work, place = self._tasks[task]
                places = range(len(work.samples)) if place < 0 else (place,)
                self._give_up(work, places, None)

    def _give_up(self, work: Work, places: Sequence[int], thread: int | None) -> None:
        stack = sys._current_frames().get(thread) if thread is not None else None
        at = f", at{_lines(traceback.extract_stack(stack))}" if stack is not None else ", without awaiting anything"
        text = f"the call took more than timeout_s={self._timeout_s:g} s{at}"
        self._send(Failed(work.number, list(places), "time", text, self._timeout_s, is_stuck=True))
        end_group(1)


def _described(reward: Reward) -> Function:
    of = reward.signature
    return Function(reward.name, reward.place, reward.weight, of.is_batch, of.is_async, of.wants_tokens)


class _TooLongError(Exception):
    """An async call took too long."""


def end_group(code: int) -> None:
    """Ends this process, and what its functions started."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(code)


def _kind_and_text(error: BaseException, timeout_s: float = 0.0) -> tuple[Kind, str]:
    """The kind of a failure and its text: what was raised, and the last places in the user's code."""
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
