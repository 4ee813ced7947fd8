"""Over NCCL streams are ordered, and no thread polls: messages of every kind, against works and streams played here."""

import gc
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

from realhf.base.errors import RunError
from realhf.engine.generate.ring import BatchMessages
from realhf.engine.pipeline import Neighbours
from realhf.geometry.boxes import Box
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.parallel.groups import ParallelGroups
from realhf.parallel.waiting import HOST_WAITS, StreamWaits, Waits
from realhf.realloc.execute.carriers import Message, TorchCarrier, post, wait_for
from tests.waiting import wait_until

LAYOUT = Layout(DeviceMesh(0, 2), ParallelStrategy(pp=2))
TIMEOUT_S = 7.0


class Stream:
    """Gets to no place that is marked on it before it is `done`."""

    def __init__(self) -> None:
        self.done, self.marks = False, 0

    def mark(self) -> "Stream":
        self.marks += 1
        return self

    def query(self) -> bool:
        return self.done


class Backend:
    """Starts works that note how they are waited for: None is without a deadline, which only orders a stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.waited: list[timedelta | None] = []
        start = lambda tensor, peer, group=None: self  # noqa: E731
        for name in ("isend", "irecv"):
            monkeypatch.setattr(dist, name, start)
        monkeypatch.setattr(dist, "P2POp", lambda *operation, **options: operation)
        monkeypatch.setattr(dist, "batch_isend_irecv", lambda operations: [self] * len(operations))

    def wait(self, timeout: timedelta | None = None) -> None:
        self.waited.append(timeout)


def pipeline(waits: Waits) -> None:
    neighbours = Neighbours(ParallelGroups(LAYOUT, 0, waits=waits), 3, torch.zeros(1), TIMEOUT_S)
    neighbours.take(neighbours.receive(1, tokens=2))
    neighbours.send(1, torch.zeros(2, 3))
    neighbours.flush()


def ring(waits: Waits) -> None:
    messages = BatchMessages(ParallelGroups(LAYOUT, 0, waits=waits), torch.zeros(0, 3), TIMEOUT_S)
    messages.expect_hidden(step=3, rows=2)
    messages.send_hidden(torch.zeros(2, 3))
    messages.receive_tokens(2)


def reallocation(waits: Waits) -> None:
    boxes = [Box("model.norm.weight", (0,), (4,))]
    messages = [Message(end, 1, boxes, [torch.zeros(4)]) for end in ("send", "receive")]
    label = "reallocation of actor, bucket 1 of 2: rank 0"
    wait_for(post(TorchCarrier(waits=waits), messages, label), label, TIMEOUT_S)


NAMED = {
    pipeline: r"rank 0 \(pipeline stage 0\) waited for a message from rank 1",
    ring: "generate: rank 0 waited for the tokens of decode step 3 from rank 1",
    reallocation: r"reallocation of actor, bucket 1 of 2: rank 0 waited in vain for rank 1 to send model.norm.weight",
}


@pytest.mark.parametrize("messages", NAMED)
def test_only_streams_wait(monkeypatch: pytest.MonkeyPatch, messages: Callable[[Waits], None]) -> None:
    """Two messages each. On the host both have the deadline; over streams none has, and what is late is named."""
    backend, stream, failed = Backend(monkeypatch), Stream(), []
    messages(HOST_WAITS)
    assert len(backend.waited) == 2
    assert all(timeout is not None and 0 < timeout.total_seconds() <= TIMEOUT_S for timeout in backend.waited)
    backend.waited.clear()

    clock = time.monotonic
    waits = StreamWaits(failed.append, stream.mark, look_every_s=0.01)
    messages(waits)
    assert backend.waited == [None, None]
    assert stream.marks in (1, 2)  # works of one bucket are looked after together
    assert not failed
    monkeypatch.setattr(time, "monotonic", lambda: clock() + TIMEOUT_S)
    wait_until(lambda: bool(failed), "a stream that is late")
    [error] = failed
    assert isinstance(error, RunError)
    assert error.args[0].endswith(": timed out after 7 s")
    with pytest.raises(RunError, match=NAMED[messages]):
        raise error
    waits.close()


def test_a_stream_in_time_fails_nobody_and_no_tensor_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    Backend(monkeypatch)
    stream, failed = Stream(), []
    waits = StreamWaits(failed.append, stream.mark, look_every_s=0.01)
    messages = BatchMessages(ParallelGroups(LAYOUT, 0, waits=waits), torch.zeros(0, 3), TIMEOUT_S)
    messages.expect_hidden(step=0, rows=2)
    held = weakref.ref(messages.receive_tokens(2))
    gc.collect()
    assert held() is None, "its memory is to be used again, whatever is still watched"
    assert len(waits._watched) == 1
    stream.done = True
    wait_until(lambda: not waits._watched, "what is done to be forgotten")
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + TIMEOUT_S)
    waits.close()
    assert not failed


def test_a_device_that_is_lost_is_told() -> None:
    class Lost:
        def query(self) -> bool:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    failed: list[Exception] = []
    waits = StreamWaits(failed.append, Lost, look_every_s=0.01)
    waits.watch(TIMEOUT_S, partial(str, "a step"))
    wait_until(lambda: bool(failed), "the error")
    assert "illegal memory access" in str(failed[0])
    waits.close()
    assert "deadlines" not in {thread.name for thread in threading.enumerate()}
