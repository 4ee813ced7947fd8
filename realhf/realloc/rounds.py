"""Rounds of a reallocation: the total order of its transfers; in a round no device moves more than a bucket."""

from dataclasses import dataclass, field

from realhf.realloc.layout import Box


@dataclass(frozen=True, slots=True)
class Transfer:
    """`box` travels from device `source` to device `target`. Forwarded: the source received it in an earlier round."""

    source: int
    target: int
    box: Box
    is_forwarded: bool = False


class Rounds:
    """Puts each transfer into the first round, not yet well filled, in which both of its devices have room for it."""

    def __init__(self, bucket_bytes: int) -> None:
        self.transfers: list[list[Transfer]] = []
        self._bucket_bytes = bucket_bytes
        self._sending: dict[int, _Lane] = {}
        self._receiving: dict[int, _Lane] = {}

    def add(self, transfer: Transfer, size_bytes: int, first_round: int = 0) -> int:
        """Adds `transfer` of at most a bucket, not before `first_round`; returns its round."""
        sending = self._sending.setdefault(transfer.source, _Lane())
        receiving = self._receiving.setdefault(transfer.target, _Lane())
        index = max(first_round, sending.first_open, receiving.first_open)
        sent, received, most = sending.used_bytes.get, receiving.used_bytes.get, self._bucket_bytes - size_bytes
        while sent(index, 0) > most or received(index, 0) > most:
            index += 1
        for lane in (sending, receiving):
            lane.add(index, size_bytes, self._bucket_bytes // 2)
        while len(self.transfers) <= index:
            self.transfers.append([])
        self.transfers[index].append(transfer)
        return index


@dataclass(slots=True)
class _Lane:
    """Bytes that one device sends, or receives, in each round; all rounds below `first_open` are well filled."""

    first_open: int = 0
    used_bytes: dict[int, int] = field(default_factory=dict)

    def add(self, index: int, size_bytes: int, well_filled_bytes: int) -> None:
        """Not looking for room where more than `well_filled_bytes` are used keeps planning fast."""
        self.used_bytes[index] = self.used_bytes.get(index, 0) + size_bytes
        while self.used_bytes.get(self.first_open, 0) > well_filled_bytes:
            self.first_open += 1
