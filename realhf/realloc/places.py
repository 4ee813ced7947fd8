"""Where the boxes of a plan lie in a rank's tensors: found once, since from one reallocation to the next only the
addresses of the tensors change."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

from torch import Tensor

from realhf.realloc.held import by_name, holder_of, holds
from realhf.realloc.layout import Box
from realhf.realloc.planner import ReallocationPlan

Held = Sequence[tuple[Box, Tensor]]


@dataclass(frozen=True, slots=True)
class Place:
    """A part of number `index` of a rank's tensors, from `offset` on; in elements."""

    index: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def view(self, tensors: Sequence[Tensor]) -> Tensor:
        holder = tensors[self.index]
        return holder.as_strided(self.shape, self.strides, holder.storage_offset() + self.offset)


@dataclass(frozen=True)
class PlacedMessage:
    """`boxes` that go to `peer` or come from it; `peers_part` is the peer's."""

    peers_part: Literal["send", "receive"]
    peer: int
    boxes: tuple[Box, ...]
    places: tuple[Place, ...]


@dataclass(frozen=True)
class PlacedRound:
    """What a rank does in round `index`, as the plan's `DeviceRound` says."""

    index: int
    forwards: bool
    messages: tuple[PlacedMessage, ...]


@dataclass(frozen=True)
class Places:
    """What a rank does, in the tensors of its source boxes and, after them, its target boxes."""

    rounds: tuple[PlacedRound, ...]
    copies: tuple[tuple[Place, Place], ...]  # (from, to)


def places_of(plan: ReallocationPlan, rank: int, source: Held, target: Held) -> Places:
    """Where what `rank` sends, receives and copies lies in the tensors of `source` and `target`.

    The plan keeps what was found last for each rank, and it is found again only for other boxes or strides.

    Raises:
        ValueError: the tensors are not those of the layouts that were planned for.
    """
    arrangement = [[(box, tensor.shape, tensor.stride()) for box, tensor in held] for held in (source, target)]
    known = cast(tuple[object, Places] | None, plan.found_by_device.get(rank))
    if known is None or known[0] != arrangement:
        known = arrangement, _find(plan, rank, source, target)
        plan.found_by_device[rank] = known
    return known[1]


def _find(plan: ReallocationPlan, rank: int, source: Held, target: Held) -> Places:
    ours, wanted = _Side(source, 0), _Side(target, len(source))
    rounds = []
    for each_round in plan.device_rounds.get(rank, ()):
        messages = []
        for peer, boxes in sorted(each_round.sends.items()):
            # What the rank holds from the start, or else what it received in an earlier round.
            places = tuple((ours if ours.holds(box) else wanted).place(box) for box in boxes)
            messages.append(PlacedMessage("receive", peer, boxes, places))
        for peer, boxes in sorted(each_round.receives.items()):
            messages.append(PlacedMessage("send", peer, boxes, tuple(map(wanted.place, boxes))))
        rounds.append(PlacedRound(each_round.index, each_round.forwards, tuple(messages)))
    copies = tuple((ours.place(box), wanted.place(box)) for box in plan.local_copies.get(rank, ()))
    return Places(tuple(rounds), copies)


class _Side:
    """What a rank holds of source or target: its tensors are numbered from `first_index` on."""

    def __init__(self, held: Held, first_index: int):
        self._held = by_name(held)
        self._index_of = {id(tensor): first_index + at for at, (_, tensor) in enumerate(held)}

    def holds(self, box: Box) -> bool:
        return holds(self._held, box)

    def place(self, box: Box) -> Place:
        holder, tensor = holder_of(self._held, box)
        strides = tensor.stride()
        begin = sum((a - b) * s for a, b, s in zip(box.offset, holder.offset, strides, strict=True))
        return Place(self._index_of[id(tensor)], begin, box.shape, strides)
