"""Where the boxes of a plan lie in a rank's tensors.

Found once: from one reallocation to the next only the addresses of the tensors change.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import cast, overload

import numpy as np
from torch import Tensor

from realhf.cpu.host_group import Parts, rows_of
from realhf.geometry.boxes import Box
from realhf.realloc.execute.carriers import Message, PeersPart
from realhf.realloc.execute.held import by_name, holder_of, holds
from realhf.realloc.plan.planner import ReallocationPlan

Held = Sequence[tuple[Box, Tensor]]


@dataclass(frozen=True, slots=True)
class Location:
    """A part of number `index` of a rank's tensors, from `offset` on; in elements."""

    index: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def view(self, tensors: Sequence[Tensor]) -> Tensor:
        holder = tensors[self.index]
        return holder.as_strided(self.shape, self.strides, holder.storage_offset() + self.offset)


class Memory:
    """The tensors of a rank, source boxes first, and where they lie."""

    def __init__(self, tensors: Sequence[Tensor]):
        self.tensors = tensors
        self._addresses = [tensor.data_ptr() for tensor in tensors]
        self._items = [tensor.element_size() for tensor in tensors]
        self.addresses = np.array(self._addresses, np.int64)

    def is_same(self, one: Location, other: Location) -> bool:
        """Whether two locations of one shape are of the same memory."""
        return one.strides == other.strides and self._first_byte(one) == self._first_byte(other)

    def _first_byte(self, place: Location) -> int:
        return self._addresses[place.index] + place.offset * self._items[place.index]


class Locations:
    """Several locations in order."""

    def __init__(self, locations: Sequence[Location], item_bytes: int):
        self.locations, self.item_bytes = tuple(locations), item_bytes
        rows = [
            (place.index, *row)
            for place in locations
            for row in rows_of(place.offset * item_bytes, place.shape, place.strides, item_bytes)
        ]
        table = np.array(rows, np.int64).reshape(-1, 5)
        self._holders, self._rows = table[:, 0], table[:, 1:]

    def views(self, memory: Memory) -> "Views":
        return Views(self.locations, memory.tensors)

    def parts(self, memory: Memory) -> Parts:
        rows = self._rows.copy()
        rows[:, 0] += memory.addresses[self._holders]
        return Parts(rows, memory.tensors)


class Views(Sequence[Tensor]):
    """The views of locations, made on demand: over a host's memory nothing asks for them."""

    def __init__(self, locations: Sequence[Location], tensors: Sequence[Tensor]):
        self._locations, self._tensors = locations, tensors

    def __len__(self) -> int:
        return len(self._locations)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | Sequence[Tensor]:
        return self._all[index]

    @cached_property
    def _all(self) -> list[Tensor]:
        return [place.view(self._tensors) for place in self._locations]


@dataclass(frozen=True)
class LocatedMessage:
    """`boxes` that go to `peer` or come from it; `peers_part` is the peer's. `broadcast`: as `Message`."""

    peers_part: PeersPart
    peer: int
    boxes: tuple[Box, ...]
    parts: Locations
    broadcast: tuple[int, ...] = ()

    def message(self, memory: Memory) -> Message:
        views, parts = self.parts.views(memory), self.parts.parts(memory)
        return Message(self.peers_part, self.peer, self.boxes, views, parts, self.broadcast)


@dataclass(frozen=True)
class LocatedRound:
    """The work of a rank in round `index`, from the plan's `DeviceRound`. `moved_bytes`: that it sends, or receives,
    where that is more."""

    index: int
    forwards: bool
    moved_bytes: int
    messages: tuple[LocatedMessage, ...]


@dataclass(frozen=True)
class LocatedPlan:
    """A rank's part of a plan: its rounds, and the parts that it copies from source to target."""

    rounds: tuple[LocatedRound, ...]
    copied: Locations
    copies: Locations

    def to_copy(self, memory: Memory) -> tuple[Locations, Locations]:
        """(from, to) of the parts to copy: without those that lie in the same memory in both."""
        pairs = list(zip(self.copied.locations, self.copies.locations, strict=True))
        apart = [pair for pair in pairs if not memory.is_same(*pair)]
        if len(apart) == len(pairs):
            return self.copied, self.copies
        item = self.copied.item_bytes
        return Locations([here for here, _ in apart], item), Locations([there for _, there in apart], item)


def locate(plan: ReallocationPlan, rank: int, source: Held, target: Held) -> LocatedPlan:
    """Where the parts that `rank` sends, receives and copies lie in the tensors of `source` and `target`.

    The plan caches the last result of each rank. Other boxes or strides are located again.

    Raises:
        ValueError: the tensors are not those of the layouts that were planned for.
    """
    arrangement = [[(box, tensor.shape, tensor.stride()) for box, tensor in held] for held in (source, target)]
    known = cast(tuple[object, LocatedPlan] | None, plan.found_by_device.get(rank))
    if known is None or known[0] != arrangement:
        known = arrangement, _find(plan, rank, source, target)
        plan.found_by_device[rank] = known
    return known[1]


def _find(plan: ReallocationPlan, rank: int, source: Held, target: Held) -> LocatedPlan:
    ours, wanted, item = _Side(source, 0), _Side(target, len(source)), plan.element_bytes

    @cache  # a forwarded part lies where it was received
    def parts(boxes: tuple[Box, ...]) -> Locations:
        """Where boxes lie that the rank holds from the start or receives; it never receives one that it holds."""
        return Locations([(ours if holds(ours.held, box) else wanted).location(box) for box in boxes], item)

    rounds = []
    for each_round in plan.rounds_of(rank):
        sends, receives = sorted(each_round.sends.items()), sorted(each_round.receives.items())
        messages = (
            *(LocatedMessage("receive", peer, boxes, parts(boxes), each_round.sends_in) for peer, boxes in sends),
            *(LocatedMessage("send", peer, boxes, parts(boxes), each_round.receives_in) for peer, boxes in receives),
        )
        rounds.append(LocatedRound(each_round.index, each_round.forwards, item * each_round.moved_elements, messages))
    copied = plan.local_copies.get(rank, ())
    return LocatedPlan(
        tuple(rounds),
        Locations(list(map(ours.location, copied)), item),
        Locations(list(map(wanted.location, copied)), item),
    )


class _Side:
    """The tensors that a rank holds of source or target, numbered from `first_index` on."""

    def __init__(self, held: Held, first_index: int):
        self.held = by_name(held)
        self._index_of = {id(tensor): first_index + at for at, (_, tensor) in enumerate(held)}

    def location(self, box: Box) -> Location:
        holder, tensor = holder_of(self.held, box)
        strides = tensor.stride()
        begin = sum((a - b) * s for a, b, s in zip(box.offset, holder.offset, strides, strict=True))
        return Location(self._index_of[id(tensor)], begin, box.shape, strides)
