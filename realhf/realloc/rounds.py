"""Rounds of a reallocation: the total order of its transfers; in a round no device moves more than a bucket."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from realhf.realloc.layout import Box


class Transfer(NamedTuple):
    """`boxes` travel from device `source` to `target`. Forwarded: the source received them in an earlier round."""

    source: int
    target: int
    boxes: tuple[Box, ...]
    is_forwarded: bool = False

    @property
    def elements(self) -> int:
        return sum(box.size for box in self.boxes)


class Rounds:
    """Puts each transfer into the first round, not yet well filled, in which both of its devices have room for it."""

    def __init__(self, bucket_bytes: int) -> None:
        self.transfers: list[list[Transfer]] = []
        self._bucket_bytes = bucket_bytes
        self._sending: defaultdict[int, _Lane] = defaultdict(_Lane)
        self._receiving: defaultdict[int, _Lane] = defaultdict(_Lane)

    def add(self, transfer: Transfer, size_bytes: int, first_round: int = 0) -> int:
        """Adds `transfer` of at most a bucket, not before `first_round`; returns its round."""
        sending, receiving = self._sending[transfer.source], self._receiving[transfer.target]
        most_bytes = self._bucket_bytes - size_bytes
        closed = sending.well_filled | receiving.well_filled | ((1 << first_round) - 1)
        while True:
            index = (~closed & (closed + 1)).bit_length() - 1  # the lowest bit that is not set
            if sending.used_bytes[index] <= most_bytes and receiving.used_bytes[index] <= most_bytes:
                break
            closed |= 1 << index
        for lane in (sending, receiving):
            lane.used_bytes[index] += size_bytes
            # Not looking for room where more than half is used keeps planning fast.
            if lane.used_bytes[index] > self._bucket_bytes // 2:
                lane.well_filled |= 1 << index
        while len(self.transfers) <= index:
            self.transfers.append([])
        self.transfers[index].append(transfer)
        return index


@dataclass(slots=True)
class _Lane:
    """Bytes that one device sends, or receives, in each round; `well_filled` is a set of rounds, bit by bit."""

    used_bytes: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    well_filled: int = 0
