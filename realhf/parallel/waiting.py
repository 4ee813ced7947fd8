"""Waiting for other ranks, with a deadline: on the host, or with NCCL by the order of streams.

With gloo and host memory, the thread that needs a work waits for it. With NCCL such a thread would poll the device for
every message and launch nothing meanwhile. There the current stream waits instead and the thread goes on; another
thread checks that the stream passes each mark in time.
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

What = Callable[[], str]  # describes the wait, for the text of an error


class Waits:
    """How this process waits: here the thread waits itself, the error is raised in it, and nothing is left to watch."""

    def order(self, work: dist.Work, timeout_s: float) -> None:
        """Makes the thread's next work, on the host or on the current stream, come after `work`.

        Raises:
            RuntimeError: `work` failed, or was not done in time.
        """
        work.wait(timedelta(seconds=timeout_s))

    def watch(self, timeout_s: float, what: What) -> None:
        """Ends the process if the present work of the current stream is not done in time."""

    def wait(self, work: dist.Work, timeout_s: float, what: What) -> None:
        """`order`, and then `watch`."""
        self.order(work, timeout_s)
        self.watch(timeout_s, what)

    def close(self) -> None:
        """Stops watching deadlines."""


HOST_WAITS = Waits()


class Mark(Protocol):
    """A point on a stream, as `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether the stream has passed it."""


@dataclass(frozen=True)
class _Watched:
    mark: Mark
    deadline: float
    timeout_s: float
    what: What


class StreamWaits(Waits):
    """The current stream waits, and a thread of its own watches the deadlines.

    If one is missed, the thread calls `fail`, which must end the process: a thread that reads a value from the device
    would wait for ever. A mark holds no tensor: memory that is freed after `order` is reused on the same stream, and so
    in its order.

    Args:
        fail: is called with a RunError, on the watching thread.
        mark: marks the current stream (default: a CUDA event).
        look_every_s: how late an error may be noticed.
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
        """Forgets the marks that were passed; returns the error for the first that is late, None if none is."""
        pending = [watched for watched in seen if not watched.mark.query()]
        with self._lock:
            self._watched[: len(seen)] = pending
        late = min((w for w in pending if w.deadline < time.monotonic()), key=lambda w: w.deadline, default=None)
        return None if late is None else RunError(f"{late.what()}: timed out after {late.timeout_s:g} s")


def waits_on(device: torch.device, fail: Callable[[Exception], object]) -> Waits:
    """How to wait for works between devices of this kind; `fail` as for `StreamWaits`."""
    return StreamWaits(fail) if device.type == "cuda" else HOST_WAITS


def end_process(error: Exception) -> NoReturn:
    """Prints the error and ends the process; for processes without a connection to a master."""
    print(error, file=sys.stderr, flush=True)
    os._exit(1)


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record()
    return event
