"""Where the boxes of a plan lie in a rank's tensors: found once, since from one reallocation to the next only the
addresses of the tensors change."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal, cast, overload

import numpy as np
from torch import Tensor

from realhf.cpu.host_group import Parts, rows_of
from realhf.geometry.boxes import Box
from realhf.realloc.execute.held import by_name, holder_of, holds
from realhf.realloc.execute.message_passing import Message
from realhf.realloc.plan.planner import ReallocationPlan

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


class Memory:
    """The tensors of a rank, source boxes first, and where they lie."""

    def __init__(self, tensors: Sequence[Tensor]):
        self.tensors = tensors
        self._addresses = [tensor.data_ptr() for tensor in tensors]
        self._items = [tensor.element_size() for tensor in tensors]
        self.addresses = np.array(self._addresses, np.int64)

    def is_same(self, one: Place, other: Place) -> bool:
        """Whether two places of one shape are of the same memory."""
        return one.strides == other.strides and self._first_byte(one) == self._first_byte(other)

    def _first_byte(self, place: Place) -> int:
        return self._addresses[place.index] + place.offset * self._items[place.index]


class PlacedParts:
    """Places, one behind the other."""

    def __init__(self, places: Sequence[Place], item_bytes: int):
        self.places, self.item_bytes = tuple(places), item_bytes
        rows = [
            (place.index, *row)
            for place in places
            for row in rows_of(place.offset * item_bytes, place.shape, place.strides, item_bytes)
        ]
        table = np.array(rows, np.int64).reshape(-1, 5)
        self._holders, self._rows = table[:, 0], table[:, 1:]

    def views(self, memory: Memory) -> "Views":
        return Views(self.places, memory.tensors)

    def parts(self, memory: Memory) -> Parts:
        rows = self._rows.copy()
        rows[:, 0] += memory.addresses[self._holders]
        return Parts(rows, memory.tensors)


class Views(Sequence[Tensor]):
    """The views of places, made when they are asked for: over the memory of a host nobody does."""

    def __init__(self, places: Sequence[Place], tensors: Sequence[Tensor]):
        self._places, self._tensors = places, tensors

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | Sequence[Tensor]:
        return self._all[index]

    @cached_property
    def _all(self) -> list[Tensor]:
        return [place.view(self._tensors) for place in self._places]


@dataclass(frozen=True)
class PlacedMessage:
    """`boxes` that go to `peer` or come from it; `peers_part` is the peer's."""

    peers_part: Literal["send", "receive"]
    peer: int
    boxes: tuple[Box, ...]
    parts: PlacedParts

    def message(self, memory: Memory) -> Message:
        return Message(self.peers_part, self.peer, self.boxes, self.parts.views(memory), self.parts.parts(memory))


@dataclass(frozen=True)
class PlacedRound:
    """What a rank does in round `index`, as the plan's `DeviceRound` says."""

    index: int
    forwards: bool
    messages: tuple[PlacedMessage, ...]


@dataclass(frozen=True)
class Places:
    """What a rank does in its memory: its rounds, and the parts that it copies from source to target."""

    rounds: tuple[PlacedRound, ...]
    copied: PlacedParts
    copies: PlacedParts

    def to_copy(self, memory: Memory) -> tuple[PlacedParts, PlacedParts]:
        """(from, to), but for what is of one memory in both."""
        pairs = list(zip(self.copied.places, self.copies.places, strict=True))
        apart = [pair for pair in pairs if not memory.is_same(*pair)]
        if len(apart) == len(pairs):
            return self.copied, self.copies
        item = self.copied.item_bytes
        return PlacedParts([here for here, _ in apart], item), PlacedParts([there for _, there in apart], item)


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
    ours, wanted, item = _Side(source, 0), _Side(target, len(source)), plan.element_bytes

    @cache  # what is forwarded lies where it was received
    def parts(boxes: tuple[Box, ...]) -> PlacedParts:
        """What the rank holds from the start, or else, since nobody receives what it holds, what it receives."""
        return PlacedParts([(ours if ours.holds(box) else wanted).place(box) for box in boxes], item)

    rounds = []
    for each_round in plan.rounds_of(rank):
        sends, receives = sorted(each_round.sends.items()), sorted(each_round.receives.items())
        messages = (
            *(PlacedMessage("receive", peer, boxes, parts(boxes)) for peer, boxes in sends),
            *(PlacedMessage("send", peer, boxes, parts(boxes)) for peer, boxes in receives),
        )
        rounds.append(PlacedRound(each_round.index, each_round.forwards, messages))
    copied = plan.local_copies.get(rank, ())
    return Places(
        tuple(rounds),
        PlacedParts(list(map(ours.place, copied)), item),
        PlacedParts(list(map(wanted.place, copied)), item),
    )


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
