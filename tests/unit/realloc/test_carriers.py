"""Messages that cannot be started: who is named."""

import pytest
import torch
import torch.distributed as dist

from realhf.geometry.boxes import Box
from realhf.realloc.execute.carriers import Message, ReallocationError, TorchCarrier, post


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
