"""A reward process whose requests a test writes down, and what stands for time, threads and ends."""

import asyncio
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from realhf.rewards import driver
from realhf.rewards import process as module
from realhf.rewards.messages import (
    Frames,
    FromProcess,
)
from realhf.rewards.process import _Server
from realhf.rewards.signature import recognise
from realhf.rewards.sources import Reward

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


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The time, which goes on by a second whenever it is asked for; the list has how late it is."""
    now = [0.0]

    def monotonic() -> float:
        now[0] += 1
        return now[0]

    monkeypatch.setattr(driver.time, "monotonic", monotonic)
    yield now
    monkeypatch.undo()
