"""The order of forward and backward passes on every stage, and what a silent neighbour leads to."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from realhf.api.errors import RunError
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.engine.pipeline import Neighbours, forward_schedule, one_forward_one_backward
from realhf.parallel.groups import ParallelGroups

HIDDEN = 3


class Recorder(Neighbours):
    """Neighbours that answer at once with ones; notes what was sent to and received from which stage."""

    def __init__(self, pp: int, stage: int):
        layout = Layout(DeviceMesh(0, pp), ParallelStrategy(pp=pp))
        super().__init__(ParallelGroups(layout, stage), HIDDEN, torch.zeros(1, dtype=torch.float64), timeout_s=7)
        self.events: list[str] = []
        self.messages: list[tuple[int, tuple[int, ...] | None, int | None]] = []

    def _exchange(self, stage: int, send: Tensor | None, receive_tokens: int | None) -> Tensor | None:
        if send is not None or receive_tokens is not None:
            self.messages.append((stage, None if send is None else tuple(send.shape), receive_tokens))
        return None if receive_tokens is None else torch.ones(receive_tokens, HIDDEN, dtype=torch.float64)


def run(pp: int, stage: int, counts: list[int]) -> Recorder:
    recorder = Recorder(pp, stage)
    weight = torch.nn.Parameter(torch.ones(HIDDEN, dtype=torch.float64))

    def forward(i: int, hidden: Tensor | None) -> Tensor:
        assert (hidden is None) == (stage == 0)
        recorder.events.append(f"F{i}")
        output = weight * (torch.ones(counts[i], HIDDEN, dtype=torch.float64) if hidden is None else hidden)
        output.register_hook(lambda gradient: recorder.events.append(f"B{i}"))
        return output.sum() if stage == pp - 1 else output

    one_forward_one_backward(recorder, counts, forward)
    torch.testing.assert_close(weight.grad, torch.full_like(weight, sum(counts)))
    return recorder


@pytest.mark.parametrize(
    ("stage", "events"),
    [
        (0, "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4"),
        (1, "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4"),
        (2, "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4"),
    ],
)
def test_one_forward_one_backward_order(stage: int, events: str) -> None:
    assert " ".join(run(3, stage, [4, 2, 5, 1, 3]).events) == events


@pytest.mark.parametrize("pp", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_both_sides_of_a_link_see_the_same_messages(pp: int, count: int) -> None:
    counts = [3, 1, 4, 2, 5][:count]
    stages = [run(pp, stage, counts) for stage in range(pp)]
    for stage in range(pp - 1):
        up, down = (
            [m for m in stages[s].messages if m[0] == other] for s, other in ((stage, stage + 1), (stage + 1, stage))
        )
        for sender, receiver in ((up, down), (down, up)):
            sent = [shape for _, shape, _ in sender if shape is not None]
            received = [(tokens, HIDDEN) for _, _, tokens in receiver if tokens is not None]
            assert sent == received == [(n, HIDDEN) for n in counts]


def test_forward_schedule_sends_every_output_on() -> None:
    recorder = Recorder(3, 1)
    forward_schedule(recorder, [2, 4], lambda i, hidden: hidden * 2)
    assert recorder.messages == [(0, None, 2), (2, (2, HIDDEN), None), (0, None, 4), (2, (4, HIDDEN), None)]


def test_a_silent_neighbour_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class NeverDone:
        def wait(self, timeout: timedelta) -> None:
            raise RuntimeError(f"timed out after {timeout.total_seconds():g} s")

    layout = Layout(DeviceMesh(4, 4), ParallelStrategy(tp=2, pp=2))
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda operations: [NeverDone() for _ in operations])
    monkeypatch.setattr(dist, "P2POp", lambda *operation: operation)
    neighbours = Neighbours(ParallelGroups(layout, 7), HIDDEN, torch.zeros(1), timeout_s=7)
    with pytest.raises(RunError, match=r"rank 7 \(pipeline stage 1\) .* a message from rank 5, .*timed out after 7 s"):
        neighbours.exchange_previous(receive_tokens=2)
    neighbours.exchange_previous(send=torch.zeros(2, HIDDEN))
    with pytest.raises(RunError, match=r"rank 7 .* the delivery of a message to rank 5"):
        neighbours.flush()
