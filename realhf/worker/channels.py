"""Channels between a worker's threads and the rest of its process."""

import queue
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from realhf.rundir.flight_recorder import ActivityWriter
from realhf.transport.messages import CheckpointWritten, Move, Reply


class Fail(Protocol):
    def __call__(self, error: BaseException, request_id: int | None = None, /) -> None: ...


@dataclass(frozen=True)
class Channels:
    """activity: says what the threads are doing, in words.
    moves: moves of parameters, as they come in; None ends the thread that takes them (`MoveThread`).
    report: called by other threads when a move has ended or a checkpoint has been written.
    fail: called by another thread with the exception of a move, of a late message on a stream, or of a call beside the
        devices, and the id of the request; ends the process.
    """

    activity: ActivityWriter
    moves: queue.SimpleQueue[Move | None]
    report: Callable[[Reply | CheckpointWritten], None]
    fail: Fail
