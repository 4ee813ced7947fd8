"""Parcels: boxes with the same holders and the same receivers travel together, in loads of at most a bucket.

The work of planning therefore grows with the bytes that a device lacks, not with the number of parameters.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from realhf.geometry.boxes import Box
from realhf.realloc.plan.cells import Devices

# The parcels that the busiest device receives: few enough to plan fast, small enough to divide evenly over senders.
PARCELS_OF_A_DEVICE = 256


@dataclass(frozen=True, slots=True)
class Load:
    """Boxes that go from one device to another in one round."""

    boxes: tuple[Box, ...]
    elements: int


@dataclass(frozen=True, slots=True)
class Parcel:
    """Loads that are broadcast from one of `holders` to every device of `lacking`."""

    loads: Sequence[Load]
    holders: Devices
    lacking: Devices

    @property
    def elements(self) -> int:
        return sum(load.elements for load in self.loads)


def parcels_of(
    ways: Mapping[tuple[Devices, Devices], Sequence[Box]], device_elements: int, most_elements: int
) -> list[Parcel]:
    """The boxes of each way, from holders to the devices that lack them, as parcels.

    Parcels of different ways alternate, so that all holders have something to send from the start.

    Args:
        device_elements: elements that the busiest device receives.
        most_elements: the most elements of a load.
    """
    parcel_elements = device_elements // PARCELS_OF_A_DEVICE
    loads_each = max(1, parcel_elements // most_elements)
    of_ways = []
    for (holders, lacking), boxes in ways.items():
        loads = list(loads_of(boxes, min(parcel_elements, most_elements), most_elements))
        first_loads = range(0, len(loads), loads_each)
        of_ways.append([Parcel(loads[first : first + loads_each], holders, lacking) for first in first_loads])
    return [parcel for in_turn in zip_longest(*of_ways) for parcel in in_turn if parcel]


def loads_of(boxes: Sequence[Box], enough_elements: int, most_elements: int) -> Iterator[Load]:
    """`boxes` in their order, as loads of `enough_elements` or more. A box is cut where a load would have more than
    `most_elements`."""
    left = deque(boxes)
    load: list[Box] = []
    room = most_elements
    while left:
        box = left.popleft()
        if box.size <= room:
            load.append(box)
            room -= box.size
            is_done = room <= most_elements - enough_elements
        else:
            head, tail = _split(box, room)
            is_done = bool(load) and head.size > room
            left.extendleft((box,) if is_done else (tail, head))
        if load and (is_done or not left):
            yield Load(tuple(load), most_elements - room)
            load, room = [], most_elements


def _split(box: Box, elements: int) -> tuple[Box, Box]:
    """`box` cut along its first dimension above 1: the rows of at most `elements` elements, at least one; and the
    rest."""
    dim = next(dim for dim, extent in enumerate(box.shape) if extent > 1)
    start, end = box.offset[dim], box.offset[dim] + box.shape[dim]
    cut = start + max(1, elements * box.shape[dim] // box.size)
    return box.between(start, cut, dim), box.between(cut, end, dim)
