"""Projections that one side keeps fused, in one tensor: boxes are views of it, and layouts differ as otherwise."""

import queue
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch import Tensor

from realhf.geometry.boxes import Box
from realhf.realloc.execute.carriers import Message, Work
from realhf.realloc.execute.executor import Reallocation, execute
from realhf.realloc.execute.verification import verify
from realhf.realloc.plan.planner import plan_reallocation
from tests.waiting import PATIENCE_S

HIDDEN, KV_HEADS, HEAD_DIM, QUERIES = 6, 6, 2, 2  # two query heads for each of six key-value heads
ROWS = {"q": QUERIES * HEAD_DIM, "k": HEAD_DIM, "v": HEAD_DIM}  # of one key-value head
WHOLE = {
    name: torch.arange(KV_HEADS * rows * HIDDEN).view(-1, HIDDEN) + 1000.0 * place
    for place, (name, rows) in enumerate(ROWS.items())
}

Held = list[tuple[Box, Tensor]]


def fused(rank: int, tp: int) -> tuple[Tensor, Held]:
    """As Megatron has it: one matrix, with the rows of the queries, the key and the value for each of the rank's
    key-value heads; and its boxes."""
    heads = range(rank * KV_HEADS // tp, (rank + 1) * KV_HEADS // tp)
    whole = torch.cat([WHOLE[name].unflatten(0, (KV_HEADS, -1))[head] for head in heads for name in ROWS])
    held, at = [], 0
    for head in heads:
        for name, rows in ROWS.items():
            held.append((Box(name, (head * rows, 0), (rows, HIDDEN)), whole[at : at + rows]))
            at += rows
    return whole, held


def unfused(rank: int, tp: int) -> tuple[list[Tensor], Held]:
    tensors = {name: whole.chunk(tp)[rank].clone() for name, whole in WHOLE.items()}
    held = [(Box(name, (rank * tensor.shape[0], 0), tuple(tensor.shape)), tensor) for name, tensor in tensors.items()]
    return list(tensors.values()), held


class Wires:
    """Messages between threads: a queue for each pair of ranks."""

    def __init__(self) -> None:
        self.queues: defaultdict[tuple[int, int], queue.Queue[list[Tensor]]] = defaultdict(queue.Queue)

    def of(self, rank: int) -> "Wire":
        return Wire(self, rank)


class Wire:
    """The carrier of one rank."""

    def __init__(self, wires: Wires, rank: int):
        self._wires, self._rank = wires, rank

    def packed_bytes(self, messages: Sequence[Message]) -> int:
        return 0

    def post(self, messages: Sequence[Message]) -> list[Work]:
        for message in messages:
            if message.peers_part == "receive":
                self._wires.queues[self._rank, message.peer].put([view.clone() for view in message.views])
        return [Work([message], self._arrival(message)) for message in messages if message.peers_part == "send"]

    def copy(self, here: Message, there: Message) -> list[Work]:
        for ours, wanted in zip(here.views, there.views, strict=True):
            wanted.copy_(ours)
        return []

    def _arrival(self, message: Message) -> Callable[[timedelta], None]:
        def wait(timeout: timedelta) -> None:
            sent = self._wires.queues[message.peer, self._rank].get(timeout=PATIENCE_S)
            for view, values in zip(message.views, sent, strict=True):
                view.copy_(values)

        return wait


@pytest.mark.parametrize("is_fused", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize(("source_tp", "target_tp", "first"), [(2, 3, 1), (3, 2, 0), (1, 6, 0), (6, 1, 5)])
def test_from_fused_and_to_fused_projections(
    source_tp: int, target_tp: int, first: int, is_fused: tuple[bool, bool]
) -> None:
    """`source_tp` devices from 0 on to `target_tp` devices from `first` on."""
    source = {rank: (fused if is_fused[0] else unfused)(rank, source_tp) for rank in range(source_tp)}
    expected = {first + rank: (fused if is_fused[1] else unfused)(rank, target_tp) for rank in range(target_tp)}
    target = {first + rank: (fused if is_fused[1] else unfused)(rank, target_tp) for rank in range(target_tp)}
    for _, held in target.values():
        for _, view in held:
            view.fill_(-7)
    plan = plan_reallocation(
        {rank: [box for box, _ in held] for rank, (_, held) in source.items()},
        {rank: [box for box, _ in held] for rank, (_, held) in target.items()},
        bucket_bytes=200,
    )
    wires, ranks = Wires(), sorted({*source, *target})

    def move(rank: int) -> None:
        ours, wanted = (side[rank][1] if rank in side else [] for side in (source, target))
        execute(Reallocation(plan, rank, ours, wanted, wires.of(rank)))
        verify(Reallocation(plan, rank, ours, wanted, wires.of(rank)))

    with ThreadPoolExecutor(len(ranks)) as pool:
        list(pool.map(move, ranks))
    for rank, (got, _) in target.items():
        for one, other in zip(got, expected[rank][0], strict=True):
            assert torch.equal(one, other)
    assert sum(plan.received_bytes.values()) == sum(plan.lacking_bytes.values())
