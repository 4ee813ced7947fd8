"""Schedules carried out without neighbours, and what a silent neighbour leads to."""

from datetime import timedelta
from itertools import permutations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from realhf.base.errors import RunError
from realhf.engine.pipeline import Neighbours, Transfer, run_forward, run_training
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.geometry.pipeline_schedule import Pass, training_order
from realhf.parallel.groups import ParallelGroups

HIDDEN = 3


class Recorder(Neighbours):
    """Neighbours that answer at once with ones; notes the tokens sent to and received from each stage."""

    def __init__(self, pp: int, stage: int, chunks: int = 1):
        layout = Layout(DeviceMesh(0, pp), ParallelStrategy(pp=pp, chunks=chunks))
        super().__init__(ParallelGroups(layout, stage), HIDDEN, torch.zeros(1, dtype=torch.float64), timeout_s=7)
        self.messages: list[tuple[str, int, int]] = []

    def receive(self, stage: int, tokens: int) -> Transfer:
        self.messages.append(("from", stage, tokens))
        return Transfer(torch.ones(tokens, HIDDEN, dtype=torch.float64), stage)

    def send(self, stage: int, tensor: Tensor) -> None:
        assert tensor.shape[1:] == (HIDDEN,)
        self.messages.append(("to", stage, len(tensor)))


def run(pp: int, stage: int, chunks: int, counts: list[int]) -> Recorder:
    recorder = Recorder(pp, stage, chunks)
    weight = torch.nn.Parameter(torch.ones(HIDDEN, dtype=torch.float64))
    events: list[Pass] = []

    def forward(run: Pass, hidden: Tensor | None) -> Tensor:
        virtual, i = run.chunk * pp + stage, run.micro_batch
        assert (hidden is None) == (virtual == 0)
        events.append(run)
        output = weight * (torch.ones(counts[i], HIDDEN, dtype=torch.float64) if hidden is None else hidden)
        output.register_hook(lambda gradient: events.append(Pass("backward", run.chunk, i)))
        return output.sum() if virtual == pp * chunks - 1 else output

    run_training(recorder, counts, forward)
    torch.testing.assert_close(weight.grad, torch.full_like(weight, chunks * sum(counts)))
    assert events == training_order(pp, stage, chunks, len(counts))
    return recorder


@pytest.mark.parametrize(("pp", "chunks"), [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (2, 3), (3, 2)])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_both_sides_of_a_link_see_the_same_messages(pp: int, chunks: int, count: int) -> None:
    counts = [3, 1, 4, 2, 5][:count]
    stages = [run(pp, stage, chunks, counts).messages for stage in range(pp)]
    for one, other in permutations(range(pp), 2):
        sent = [tokens for kind, stage, tokens in stages[one] if (kind, stage) == ("to", other)]
        received = [tokens for kind, stage, tokens in stages[other] if (kind, stage) == ("from", one)]
        assert sent == received
    links = 2 * (pp * chunks - 1)
    assert sum(tokens for messages in stages for kind, _, tokens in messages if kind == "to") == links * sum(counts)


def test_forward_sends_every_output_on() -> None:
    recorder = Recorder(3, 1)
    run_forward(recorder, [2, 4], lambda run, hidden: hidden * 2)
    links = {
        (kind, stage): [n for k, s, n in recorder.messages if (k, s) == (kind, stage)]
        for kind, stage, _ in recorder.messages
    }
    assert links == {("from", 0): [2, 4], ("to", 2): [2, 4]}


def test_nothing_is_sent_of_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "isend", None)
    monkeypatch.setattr(dist, "irecv", None)
    layout = Layout(DeviceMesh(0, 2), ParallelStrategy(pp=2))
    neighbours = Neighbours(ParallelGroups(layout, 0), HIDDEN, torch.zeros(1), timeout_s=7)
    neighbours.send(1, torch.zeros(0, HIDDEN))
    assert neighbours.take(neighbours.receive(1, 0)).shape == (0, HIDDEN)
    neighbours.flush()


def test_a_silent_neighbour_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class NeverDone:
        def wait(self, timeout: timedelta) -> None:
            raise RuntimeError(f"timed out after {timeout.total_seconds():g} s")

    layout = Layout(DeviceMesh(4, 4), ParallelStrategy(tp=2, pp=2))
    monkeypatch.setattr(dist, "isend", lambda *message: NeverDone())
    monkeypatch.setattr(dist, "irecv", lambda *message: NeverDone())
    neighbours = Neighbours(ParallelGroups(layout, 7), HIDDEN, torch.zeros(1), timeout_s=7)
    with pytest.raises(RunError, match=r"rank 7 \(pipeline stage 1\) .* a message from rank 5, .*timed out after 7 s"):
        neighbours.take(neighbours.receive(0, tokens=2))
    neighbours.send(0, torch.zeros(2, HIDDEN))
    with pytest.raises(RunError, match=r"rank 7 .* the delivery of a message to rank 5"):
        neighbours.flush()
