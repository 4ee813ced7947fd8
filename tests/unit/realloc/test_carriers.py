"""Messages that cannot be started: who is named; and the order of broadcasts."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from realhf.geometry.boxes import Box
from realhf.parallel.waiting import Waits
from realhf.realloc.execute.carriers import BroadcastCarrier, Message, ReallocationError, TorchCarrier, post


def test_the_peer_that_cannot_be_reached_is_named_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def send(tensor: torch.Tensor, peer: int, group: object) -> None:
        if peer == 3:
            raise RuntimeError("connection closed by peer")

    monkeypatch.setattr(dist, "isend", send)
    boxes = [Box(name, (0,), (4,)) for name in ("model.norm.weight", "model.embed_tokens.weight")]
    messages = [Message("receive", peer, [box], [torch.zeros(4)]) for peer in (2, 3, 5) for box in boxes]
    with pytest.raises(ReallocationError) as raised:
        post(TorchCarrier(), messages, "bucket 1 of 2: rank 0")
    assert str(raised.value) == (
        "bucket 1 of 2: rank 0 could not reach rank 3 to receive model.norm.weight: connection closed by peer"
    )


def messages_of_root() -> list[Message]:
    """Of rank 1 in a round: what it sends to ranks 2 and 3, and what it receives from rank 0."""
    first, second = Box("first", (0,), (4,)), Box("second", (0,), (2,))
    own, other = torch.ones(4), torch.zeros(2)
    return [
        *(Message("receive", peer, [first], [own], broadcast=(1, 2, 3)) for peer in (2, 3)),
        Message("send", 0, [second], [other], broadcast=(0, 1)),
    ]


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_broadcast_over_nccl_starts_behind_the_last_one_on_the_device(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A root has one broadcast for all of its messages, and all ranks the order of the groups. Over gloo all start."""
    done: list[str] = []

    def broadcast(tensor: torch.Tensor, root: int, group: str, async_op: bool) -> str:
        done.append(f"{tensor.numel()} bytes from {root} to {group}")
        return group

    class OrderedWaits(Waits):
        def order(self, work: Any, timeout_s: float) -> None:
            done.append(f"behind {work}")

    monkeypatch.setattr(dist, "broadcast", broadcast)
    monkeypatch.setattr(dist, "get_backend", lambda group: backend)
    groups: Any = {(0, 1): "a pair", (1, 2, 3): "three"}
    carrier = BroadcastCarrier(groups, TorchCarrier(), OrderedWaits())
    works = carrier.post(messages_of_root())
    behind = ["behind a pair"] if backend == "nccl" else []
    assert done == ["8 bytes from 0 to a pair", *behind, "16 bytes from 1 to three"]
    assert [[message.peer for message in work.messages] for work in works] == [[0], [2, 3]]


def test_a_broadcast_that_cannot_start_names_all_of_its_receivers(monkeypatch: pytest.MonkeyPatch) -> None:
    def broadcast(*arguments: object, **options: object) -> None:
        raise RuntimeError("connection closed by peer")

    monkeypatch.setattr(dist, "broadcast", broadcast)
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    with pytest.raises(ReallocationError, match="rank 2 to receive first, rank 3 to receive first: connection closed"):
        post(BroadcastCarrier({(1, 2, 3): None}, TorchCarrier()), messages_of_root()[:2], "bucket 1 of 2: rank 1")  # type: ignore[dict-item]
