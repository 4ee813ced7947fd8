"""Moves of parameters beside calls: their order, who waits for whom, and what is said of both threads."""

import queue
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.rundir.flight_recorder import ActivityWriter
from realhf.transport.messages import BatchKey, FollowParameters, Move, PrepareMove, Reallocate, Reply
from realhf.worker.channels import Channels
from realhf.worker.move_thread import MoveThread
from tests.waiting import PATIENCE_S

BATCH = BatchKey("train", 2)
LAYOUT = Layout(DeviceMesh(0, 1), ParallelStrategy())
COPY = Reallocate(request_id=1, batch=BATCH, call="actor_generate", model="actor", layout=LAYOUT, version=0)
AVERAGE = FollowParameters(request_id=2, batch=BATCH, name="reference_follows_actor")
PREPARE = PrepareMove(request_id=0, batch=BATCH, name="actor_generate", model="actor", layout=LAYOUT)


class Worker:
    """A thread whose moves are `carry_out`; what it reports, how it fails, and its activity."""

    def __init__(self, carry_out: Callable[[Move], None], timeout_s: float = PATIENCE_S):
        self.replies: list[Reply] = []
        self.failures: queue.SimpleQueue[Exception] = queue.SimpleQueue()
        with tempfile.NamedTemporaryFile() as file:
            self.activity = ActivityWriter(Path(file.name))
        self.moves: queue.SimpleQueue[Move | None] = queue.SimpleQueue()
        channels = Channels(self.activity, self.moves, self.replies.append, self.failures.put)
        self.thread = MoveThread(channels, carry_out, torch.device("cpu"), timeout_s)


def test_moves_are_carried_out_in_their_order_and_answered() -> None:
    done: list[Move] = []
    worker = Worker(done.append)
    for move in (COPY, AVERAGE):
        worker.moves.put(move)
    worker.thread.wait()  # nothing was prepared for
    worker.thread.close()
    assert done == [COPY, AVERAGE]
    assert [reply.request_id for reply in worker.replies] == [1, 2]
    assert [reply.span.phase for reply in worker.replies] == ["sending", "sending"]
    assert [reply.span.name for reply in worker.replies] == [
        "actor_generate of step 3",
        "reference_follows_actor of step 3",
    ]


def test_calls_wait_for_the_move_that_they_prepared_for_and_for_no_other() -> None:
    may_end = threading.Event()
    worker = Worker(lambda move: None if move is AVERAGE else _wait(may_end))
    worker.thread.prepared(PREPARE)
    going_on = threading.Thread(target=worker.thread.wait)
    going_on.start()
    worker.moves.put(AVERAGE)
    worker.moves.put(COPY)
    assert going_on.is_alive()
    assert [reply.request_id for reply in worker.replies] in ([], [2])
    may_end.set()
    going_on.join(PATIENCE_S)
    assert not going_on.is_alive()
    assert [reply.span.phase for reply in worker.replies] == ["sending", "reallocation"]
    worker.thread.wait()  # once is enough
    worker.thread.close()


def test_the_activity_names_what_is_sent_beside_a_call() -> None:
    critic, during = "critic_train_step of step 2: compute", []
    worker = Worker(lambda _: during.extend((worker.activity.text, worker.activity.main)))
    worker.activity.set(critic)
    worker.moves.put(COPY)
    worker.thread.close()
    assert during == [f"{critic}; and actor_generate of step 3: sending", critic]
    assert worker.activity.text == worker.activity.main == critic


def test_what_a_move_raises_ends_the_worker() -> None:
    error = RuntimeError("the cable is out")

    def fails(_: Move) -> None:
        raise error

    worker = Worker(fails)
    worker.moves.put(COPY)
    assert worker.failures.get(timeout=PATIENCE_S) is error
    assert worker.replies == []


def test_calls_do_not_wait_for_ever_for_a_move_that_does_not_come() -> None:
    worker = Worker(lambda _: None, timeout_s=0.01)
    worker.thread.prepared(PREPARE)
    with pytest.raises(TimeoutError, match="reallocation for actor_generate of step 3: waited"):
        worker.thread.wait()


def test_a_move_that_is_being_carried_out_has_deadlines_of_its_own() -> None:
    """What it says when it fails names the peer; the thread of calls must not be the first to give up."""
    has_begun, may_end = threading.Event(), threading.Event()

    def carry_out(_: Move) -> None:
        has_begun.set()
        _wait(may_end)

    worker = Worker(carry_out, timeout_s=0.01)
    worker.moves.put(COPY)
    _wait(has_begun)
    worker.thread.prepared(PREPARE)
    going_on = threading.Thread(target=worker.thread.wait)
    going_on.start()
    going_on.join(0.2)  # twenty times the deadline
    assert going_on.is_alive()
    may_end.set()
    going_on.join(PATIENCE_S)
    assert not going_on.is_alive()
    worker.thread.close()


def _wait(event: threading.Event) -> None:
    assert event.wait(PATIENCE_S)
