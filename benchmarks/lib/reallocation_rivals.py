"""What benchmarks/reallocation.py sets beside the executor: bare messages, and whole parameters for all."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from realhf.architecture.model import DecoderConfig
from realhf.geometry.boxes import Box, device_boxes
from realhf.geometry.layout import Layout
from realhf.geometry.parameters import decoder_parameters
from realhf.realloc.execute.carriers import Carrier, Message, post, wait_for
from realhf.realloc.plan.planner import ReallocationPlan

Held = Sequence[tuple[Box, Tensor]]


class RawMessages:
    """The messages of a plan, round by round, each one piece of the memory that the parameters lie in, and one copy of
    as many bytes as the rank copies within it: what the carrier can do."""

    def __init__(
        self, plan: ReallocationPlan, rank: int, carrier: Carrier, source: Tensor, target: Tensor, timeout_s: float
    ):
        """`source`, `target`: all parameters of this rank, as one vector each; the target is overwritten."""
        self._carrier, self._timeout_s = carrier, timeout_s
        outgoing, incoming = _Pieces(max(source, target, key=len)), _Pieces(target)
        self._rounds = [
            [
                *(Message("receive", peer, boxes, [outgoing.next(boxes)]) for peer, boxes in each_round.sends.items()),
                *(Message("send", peer, boxes, [incoming.next(boxes)]) for peer, boxes in each_round.receives.items()),
            ]
            for each_round in plan.rounds_of(rank)
        ]
        copied = plan.local_copies.get(rank, ())
        self._copy = (incoming.next(copied), source[: sum(box.size for box in copied)])

    def __call__(self) -> None:
        for messages in self._rounds:
            wait_for(post(self._carrier, messages, "raw"), "raw", self._timeout_s)
        target, source = self._copy
        target.copy_(source)


class _Pieces:
    """Takes a vector piece by piece, from its beginning again when it is used up."""

    def __init__(self, flat: Tensor):
        self._flat, self._start = flat, 0

    def next(self, boxes: Sequence[Box]) -> Tensor:
        size = sum(box.size for box in boxes)
        start = self._start if self._start + size <= len(self._flat) else 0
        self._start = start + size
        return self._flat[start : start + size]


def gather_and_slice(
    model: DecoderConfig, source: Layout, rank: int, held: Held, wanted: Held, group: dist.ProcessGroup
) -> None:
    """Every parameter becomes whole on every process, from one holder of each part; each copies its own part out."""
    own, targets = dict(held), {box.name: (box, tensor) for box, tensor in wanted}
    holders: dict[str, dict[Box, int]] = {}
    for device in source.mesh.devices:
        for box in device_boxes(model, source, device):
            holders.setdefault(box.name, {}).setdefault(box, device)
    for spec in decoder_parameters(model):
        whole = torch.empty(spec.shape)
        for box, holder in holders[spec.name].items():
            place = whole[box.slices_in(Box(spec.name, (0,) * len(spec.shape), spec.shape))]
            part = own[box] if rank == holder else torch.empty(box.shape)
            dist.broadcast(part, holder, group=group)
            place.copy_(part)
        if spec.name in targets:
            box, tensor = targets[spec.name]
            tensor.copy_(whole[tuple(slice(a, a + n) for a, n in zip(box.offset, box.shape, strict=True))])
