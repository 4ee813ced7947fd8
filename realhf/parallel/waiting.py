"""Waiting for what other ranks do, with a deadline: on the host, or over NCCL by the order of streams.

A work of gloo, or of host memory, is waited for by the thread that needs it. With NCCL that thread would ask the device
over and over, once a message, and launch nothing meanwhile. There the current stream waits, the thread goes on, and
another thread looks whether the stream has got there in time.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn, Protocol

import torch
import torch.distributed as dist

from realhf.base.errors import RunError

LOOK_EVERY_S = 1.0

What = Callable[[], str]  # who waits for what, for the text of an error


class Waits(Protocol):
    """How this process waits. `wait` is both of the others."""

    def order(self, work: dist.Work, timeout_s: float) -> None:
        """What the thread does next, on the host or on the current stream, comes behind `work`.

        Raises:
            RuntimeError: it failed, or was waited for in vain.
        """

    def watch(self, timeout_s: float, what: What) -> None:
        """Ends the process where what is on the current stream by now is not done in time."""

    def wait(self, work: dist.Work, timeout_s: float, what: What) -> None: ...

    def close(self) -> None:
        """No deadline is kept any more."""


class HostWaits:
    """The thread waits itself, and gets the error."""

    def order(self, work: dist.Work, timeout_s: float) -> None:
        work.wait(timedelta(seconds=timeout_s))

    def watch(self, timeout_s: float, what: What) -> None:
        """Nothing is left to be watched."""

    def wait(self, work: dist.Work, timeout_s: float, what: What) -> None:
        self.order(work, timeout_s)

    def close(self) -> None:
        """There is nothing to be closed."""


HOST_WAITS = HostWaits()


class Mark(Protocol):
    """A place on a stream, as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether the stream has got there."""


@dataclass(frozen=True)
class _Watched:
    mark: Mark
    deadline: float
    timeout_s: float
    what: What


class StreamWaits:
    """The current stream waits; a thread keeps the deadlines and tells `fail`, which is to end the process: a thread
    that asks the device for a value meanwhile would wait for ever.

    A mark holds no tensor. What is freed behind `order` is used again on the same stream, and so in its order.

    Args:
        fail: gets a RunError, from the thread.
        mark: marks the current stream (default: a CUDA event).
        look_every_s: how late an error may come.
    """

    def __init__(
        self,
        fail: Callable[[Exception], object],
        mark: Callable[[], Mark] | None = None,
        look_every_s: float = LOOK_EVERY_S,
    ):
        self._fail, self._mark, self._look_every_s = fail, mark or _event, look_every_s
        self._watched: list[_Watched] = []
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="deadlines", daemon=True)
        self._thread.start()

    def order(self, work: dist.Work, timeout_s: float) -> None:
        work.wait()

    def watch(self, timeout_s: float, what: What) -> None:
        watched = _Watched(self._mark(), time.monotonic() + timeout_s, timeout_s, what)
        with self._lock:
            self._watched.append(watched)

    def wait(self, work: dist.Work, timeout_s: float, what: What) -> None:
        self.order(work, timeout_s)
        self.watch(timeout_s, what)

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(self._look_every_s):
            with self._lock:
                seen = list(self._watched)
            try:
                late = self._look(seen)
            except RuntimeError as error:  # the device is lost
                late = error
            if late is not None:
                self._fail(late)
                return

    def _look(self, seen: list[_Watched]) -> Exception | None:
        """Forgets what is done; what the first one that is late is to be told."""
        pending = [watched for watched in seen if not watched.mark.query()]
        with self._lock:
            self._watched[: len(seen)] = pending
        late = min((w for w in pending if w.deadline < time.monotonic()), key=lambda w: w.deadline, default=None)
        return None if late is None else RunError(f"{late.what()}: timed out after {late.timeout_s:g} s")


def waits_on(device: torch.device, fail: Callable[[Exception], object]) -> Waits:
    """What is right for works between devices of this kind; `fail` as for `StreamWaits`."""
    return StreamWaits(fail) if device.type == "cuda" else HOST_WAITS


def end_process(error: Exception) -> NoReturn:
    """For processes that have nobody to tell."""
    print(error, file=sys.stderr, flush=True)
    os._exit(1)


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record()
    return event
