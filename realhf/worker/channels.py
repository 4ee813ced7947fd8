"""What a worker's threads and the rest of its process say to each other."""

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
    """activity: what the threads are doing.
    moves: moves of parameters, as they come in; None ends the thread that takes them (`MoveThread`).
    report: told, from other threads, of moves that have ended and checkpoints that have been written.
    fail: told, from another thread, what a move raised, what came too late on a stream, or what a call beside the
        devices raised, with the id of its request; ends the process.
    """

    activity: ActivityWriter
    moves: queue.SimpleQueue[Move | None]
    report: Callable[[Reply | CheckpointWritten], None]
    fail: Fail
