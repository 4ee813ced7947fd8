"""Carries out a reallocation plan: round by round, the next one started while the last is on its way."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from realhf.geometry.boxes import Box
from realhf.realloc.execute.carriers import (
    Carrier,
    Message,
    TorchCarrier,
    Work,
    buffers_like,
    post,
    wait_for,
)
from realhf.realloc.execute.checksum import SumsByPeer, bit_sum
from realhf.realloc.execute.locations import Locations, Memory, locate
from realhf.realloc.plan.planner import ReallocationPlan


@dataclass(frozen=True)
class Reallocation:
    """One rank's part of a reallocation: the plan of all ranks, and this rank's boxes with their tensors.

    Each tensor is a view of the shape of its box. The device of a plan with index i is global rank i. A peer has
    `timeout_s` to answer for one bucket; `model_name` is for messages.
    """

    plan: ReallocationPlan
    rank: int
    source: Sequence[tuple[Box, Tensor]]
    target: Sequence[tuple[Box, Tensor]]
    carrier: Carrier = field(default_factory=TorchCarrier)
    model_name: str = "model"
    timeout_s: float = 600.0


def execute(part: Reallocation, *, eta: float = 1.0, arrived: SumsByPeer | None = None) -> None:
    """Fills the tensors of `target` from those of `source` on all ranks.

    With `eta` < 1 the target becomes eta * source + (1 - eta) * target, an exponential moving average of the sources
    that it was given, as for a reference model that follows the actor; its own values are then needed before. Each
    time it is rounded to the tensors' dtype: in bfloat16 changes below 1/256 of a value are lost, so keep averages
    of small `eta` in float32. `arrived` then gets the bit sums of the parts from each peer, for `verify`.

    Every rank that holds source or target boxes calls it with the same plan, made from exactly these boxes, and the
    same kind of carrier. The others return at once. A target may be the same view as the source of that
    name (nothing is copied), but must not overlap the storage of a source otherwise. Beyond the tensors it needs two
    buckets of memory. When it returns the source may change, and the target is complete.

    Raises:
        ReallocationError: a peer did not answer within `timeout_s` for one bucket, or died.
        ValueError: the tensors are not all of one dtype, or not of the size that the plan counts with; `eta` is not
            from 0 to 1, or less than 1 with a plan that forwards.
    """
    plan, rank, carrier, timeout_s = part.plan, part.rank, part.carrier, part.timeout_s
    write = _writer(plan, eta)
    with torch.no_grad():
        tensors = [tensor for _, tensor in (*part.source, *part.target)]
        _check_dtype(plan, tensors)
        located, memory = locate(plan, rank, part.source, part.target), Memory(tensors)
        here, there = located.to_copy(memory)
        copying = _start_copies(carrier, rank, here, there, memory) if eta == 1 else []
        under_way: deque[_UnderWay] = deque()
        for each_round in located.rounds:
            while under_way and each_round.forwards:  # forwarded parts have to arrive first
                under_way.popleft().finish(write, arrived, timeout_s)
            messages = [placed.message(memory) for placed in each_round.messages]
            # Averages need the received values beside the target.
            in_place = [message for message in messages if eta == 1 or message.peers_part == "receive"]
            beside = [message for message in messages if eta < 1 and message.peers_part == "send"]
            buffer_bytes = carrier.packed_bytes(in_place) + sum(view.nbytes for m in beside for view in m.views)
            taken_bytes = max(buffer_bytes, each_round.moved_bytes)
            while under_way and sum(each.taken_bytes for each in under_way) + taken_bytes > 2 * plan.bucket_bytes:
                under_way.popleft().finish(write, arrived, timeout_s)
            label = (
                f"reallocation of {part.model_name}, bucket {each_round.index + 1} of {len(plan.rounds)}: rank {rank}"
            )
            under_way.append(_start(carrier, in_place, beside, taken_bytes, label))
        if eta < 1:
            for ours, wanted in zip(here.views(memory), there.views(memory), strict=True):
                write(wanted, ours)
        wait_for(copying, f"reallocation of {part.model_name}: rank {rank} copying", timeout_s)
        while under_way:
            under_way.popleft().finish(write, arrived, timeout_s)


@dataclass(frozen=True)
class _UnderWay:
    """A round that was started. `arriving`: the peer, a part of the target, the buffer in which its new values arrive.
    `taken_bytes`: of all buffers together, or moved in one direction, where that is more.

    A rank posts its own part of a round before it waits for any of it, and waits only for peers in the same or an
    earlier round, whatever the meshes. By induction over the rounds, no rank waits forever.
    """

    label: str
    works: Sequence[Work]
    taken_bytes: int
    arriving: Sequence[tuple[int, Tensor, Tensor]]

    def finish(self, write: Callable[[Tensor, Tensor], object], arrived: SumsByPeer | None, timeout_s: float) -> None:
        wait_for(self.works, self.label, timeout_s)
        for peer, wanted, values in self.arriving:
            if arrived is not None:
                arrived.setdefault(peer, []).append(bit_sum(values))
            write(wanted, values)


def _start(
    carrier: Carrier, in_place: Sequence[Message], beside: Sequence[Message], taken_bytes: int, label: str
) -> _UnderWay:
    """Posts messages from and to where their views are, and those `beside` to buffers: one for each message, in which
    the parts lie one behind the other, so that nothing is packed."""
    buffered: list[Message] = []
    arriving: list[tuple[int, Tensor, Tensor]] = []
    for message in beside:
        buffers = buffers_like(message.views)
        buffered.append(replace(message, views=buffers, parts=None))
        arriving += [(message.peer, *pair) for pair in zip(message.views, buffers, strict=True)]
    return _UnderWay(label, post(carrier, [*in_place, *buffered], label), taken_bytes, arriving)


def _start_copies(carrier: Carrier, rank: int, here: Locations, there: Locations, memory: Memory) -> list[Work]:
    if not here.locations:
        return []
    return carrier.copy(
        Message("receive", rank, (), here.views(memory), here.parts(memory)),
        Message("send", rank, (), there.views(memory), there.parts(memory)),
    )


def _writer(plan: ReallocationPlan, eta: float) -> Callable[[Tensor, Tensor], object]:
    """The function that writes new values into a part of the target."""
    if not 0 <= eta <= 1:
        raise ValueError(f"eta={eta:g} is the weight of the source in an average; give a number from 0 to 1")
    if eta == 1:
        return Tensor.copy_
    if any(transfer.is_forwarded for transfer in plan.transfers):
        raise ValueError(
            f"eta={eta:g} with a plan that forwards: a device would send on averages instead of the source's values; "
            "plan by messages or by broadcasts"
        )
    return lambda target, values: target.lerp_(values, eta)


def _check_dtype(plan: ReallocationPlan, tensors: Sequence[Tensor]) -> None:
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        raise ValueError(f"a reallocation moves tensors of one dtype, not of {sorted(map(str, dtypes))}; split it")
    if tensors and tensors[0].element_size() != plan.element_bytes:
        raise ValueError(
            f"the plan counts {plan.element_bytes} bytes an element, {tensors[0].dtype} has "
            f"{tensors[0].element_size()}; plan with element_bytes={tensors[0].element_size()}"
        )
