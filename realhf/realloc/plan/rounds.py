"""Rounds of a reallocation: the total order of its transfers; in a round no device moves more than a bucket."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from realhf.realloc.plan.parcels import Load


class Transfer(NamedTuple):
    """`load` travels from device `source` to `target`. Forwarded: the source received it in an earlier round.

    broadcast: the devices of the broadcast that it is part of, the root first; empty: it is a message of its own.
    """

    source: int
    target: int
    load: Load
    is_forwarded: bool = False
    broadcast: tuple[int, ...] = ()


class Rounds:
    """Puts each load into the first round, not yet well filled, in which both of its devices have room for it."""

    def __init__(self, bucket_elements: int) -> None:
        self.transfers: list[list[Transfer]] = []
        self._bucket_elements = bucket_elements
        # A round with less than a sixteenth left counts as full: that keeps planning fast.
        self._well_filled = bucket_elements - bucket_elements // 16
        self._sending: defaultdict[int, _Usage] = defaultdict(_Usage)
        self._receiving: defaultdict[int, _Usage] = defaultdict(_Usage)

    def add(self, source: int, target: int, loads: Sequence[Load], arrived: Sequence[int] | None) -> list[int]:
        """Adds a transfer of each load, of at most a bucket; returns their rounds.

        Args:
            arrived: the rounds in which the source receives the loads; None if it holds them from the start.
        """
        sending, receiving = self._sending[source], self._receiving[target]
        rounds = []
        for place, load in enumerate(loads):
            too_early = (2 << arrived[place]) - 1 if arrived else 0
            index = self._first_with_room(load.elements, sending, receiving, too_early)
            for usage in (sending, receiving):
                used = usage.used.get(index, 0) + load.elements
                if used < self._well_filled:
                    usage.used[index] = used
                else:
                    usage.closed |= 1 << index
            while len(self.transfers) <= index:
                self.transfers.append([])
            self.transfers[index].append(Transfer(source, target, load, arrived is not None))
            rounds.append(index)
        return rounds

    def _first_with_room(self, elements: int, sending: "_Usage", receiving: "_Usage", too_early: int) -> int:
        most = self._bucket_elements - elements
        closed = sending.closed | receiving.closed | too_early
        while True:
            index = (~closed & (closed + 1)).bit_length() - 1  # the lowest bit that is not set
            if sending.used.get(index, 0) <= most and receiving.used.get(index, 0) <= most:
                return index
            closed |= 1 << index


@dataclass(slots=True)
class _Usage:
    """How full the rounds of one device are, in one direction: `closed` has a bit for each full round, `used` the
    elements of the others."""

    used: dict[int, int] = field(default_factory=dict)
    closed: int = 0
