"""Reallocations with a rank that is late, gone or killed: who is named, and when."""

import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from realhf.cpu import host_group
from realhf.geometry.boxes import Box
from realhf.realloc.execute.carriers import (
    Carrier,
    HostCarrier,
    Message,
    ReallocationError,
    TorchCarrier,
    Work,
)
from realhf.realloc.execute.executor import Reallocation, execute
from realhf.realloc.plan.planner import plan_reallocation
from tests.distributed.pool import run_distributed
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.distributed

ONE_LAYER = Box("model.layers.0.mlp.up_proj.weight", (0, 0), (64, 8))


def wait_for_a_peer_that_does_not_send(rank: int, folder: Path) -> str:
    """Rank 1 waits for rank 0, which is there but never sends; rank 2 for rank 3, which has left."""
    torch.distributed.barrier()  # nobody leaves while another still connects
    if rank == 3:
        torch.distributed.destroy_process_group()
    if rank == 0:
        wait_until(lambda: all((folder / f"rank-{waiting}").exists() for waiting in (1, 2)))
    if rank in (0, 3):
        return ""
    plan = plan_reallocation({0 if rank == 1 else 3: [ONE_LAYER]}, {rank: [ONE_LAYER]}, bucket_bytes=1024)
    target = [(ONE_LAYER, torch.zeros(ONE_LAYER.shape))]
    with pytest.raises(ReallocationError) as raised:
        execute(
            Reallocation(plan, rank, [], target, model_name="critic", timeout_s=1.5 if rank == 1 else 2 * PATIENCE_S)
        )
    (folder / f"rank-{rank}").touch()
    return str(raised.value)


def test_a_peer_that_is_late_or_gone_is_named_within_the_deadline(tmp_path: Path) -> None:
    _, late, gone, _ = run_distributed(wait_for_a_peer_that_does_not_send, 4, tmp_path)
    assert "reallocation of critic, bucket 1 of 2: rank 1 waited" in late
    assert "s (at most 1.5) in vain for rank 0 to send" in late
    assert "bucket 1 of 2: rank 2" in gone
    assert "rank 3 to send" in gone
    assert ONE_LAYER.name in late
    assert ONE_LAYER.name in gone


class KillsItself:
    """A carrier whose rank is gone, without a word, when it comes to the fifth round."""

    def __init__(self, carrier: Carrier):
        self._carrier, self._rounds = carrier, 0

    def packed_bytes(self, messages: Sequence[Message]) -> int:
        return self._carrier.packed_bytes(messages)

    def copy(self, here: Message, there: Message) -> list[Work]:
        return self._carrier.copy(here, there)

    def post(self, messages: Sequence[Message]) -> list[Work]:
        self._rounds += 1
        if self._rounds == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return self._carrier.post(messages)


KILLED = 1
LARGE = Box("model.embed_tokens.weight", (0, 0), (2048, 1024))  # 8 buckets for each of three ranks, from one
SMALL = Box("model.norm.weight", (0,), (4096,))


def lose_a_peer(rank: int, over_host_memory: bool) -> str:
    """Ranks 0, 2 and 3 receive from rank 1, rank 0 sends to it too; what they say when it is killed half way."""
    memory = torch.distributed.new_group(list(range(4)), backend=host_group.BACKEND)
    carrier = HostCarrier(memory) if over_host_memory else TorchCarrier()
    torch.distributed.barrier()
    others = [0, 2, 3]
    plan = plan_reallocation(
        {KILLED: [LARGE], 0: [SMALL]},
        {**{other: [LARGE] for other in others}, KILLED: [SMALL]},
        bucket_bytes=2**20,
        by="messages",
    )
    tensors = {box: torch.ones(box.shape) for box in (LARGE, SMALL)}
    source = [(box, tensors[box]) for box in {KILLED: [LARGE], 0: [SMALL]}.get(rank, [])]
    target = [(box, tensors[box]) for box in ([SMALL] if rank == KILLED else [LARGE])]
    with pytest.raises(ReallocationError) as raised:
        execute(
            Reallocation(
                plan,
                rank,
                source,
                target,
                KillsItself(carrier) if rank == KILLED else carrier,
                model_name="actor",
                timeout_s=2 * PATIENCE_S,
            )
        )
    return str(raised.value)


@pytest.mark.parametrize("over_host_memory", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_all_others_leave_when_a_rank_is_killed_and_name_it_and_the_bucket(over_host_memory: bool) -> None:
    for rank, message in enumerate(run_distributed(lose_a_peer, 4, over_host_memory, killed=KILLED)):
        if rank == KILLED:
            continue
        assert f"rank {KILLED} to send {LARGE.name}" in message
        assert re.search(rf"reallocation of actor, bucket \d+ of 24: rank {rank} ", message), message
