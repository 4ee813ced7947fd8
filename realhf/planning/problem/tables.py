"""A planning problem as plain tables: what the searcher gets, and what can be written to a file."""

from collections.abc import Sequence
from typing import Literal

import msgspec

ParentRow = tuple[int, int]  # (node, steps back); nodes are numbered calls first, then transfers


class OptionRow(msgspec.Struct, frozen=True, kw_only=True):
    """An option of a call: seconds, and bytes on each of its devices (csrc/search/problem.h).

    `communicators`: ascending labels of those that each of its devices is in (`realhf.planning.model.communicators`).
    """

    devices: tuple[int, int]
    strategy: str
    micro_batches: int
    time_s: float
    static_bytes: float
    dynamic_bytes: float
    copy_bytes: float
    communicators: tuple[int, ...] = ()


class CallTable(msgspec.Struct, frozen=True, kw_only=True):
    """`spared`: (home's strategy, strategy, bytes) for copies on the devices of their home: what is needed less while
    the call runs than while the copy is filled, since it takes the place of the home's parameters."""

    name: str
    home: int
    parents: list[ParentRow]
    options: list[OptionRow]
    spared: list[tuple[str, str, float]] = []


class TransferTable(msgspec.Struct, frozen=True, kw_only=True):
    """A move between two calls: option i of the source and j of the target take
    seconds[rows[i] * num_columns + columns[j]]. There can be millions: a list, or a buffer of doubles."""

    name: str
    source: int
    target: int
    parents: list[ParentRow]
    rows: list[int]
    columns: list[int]
    num_columns: int
    seconds: Sequence[float]
    occupies: Literal["both", "source", "target"] = "both"


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the search needs and nothing about how the numbers came about.

    `communicator_bytes` are those of each communicator on every device that is in it; `sending_bytes` what a device
    needs to send a copy that it does not get, beside whatever runs there.
    """

    num_devices: int
    device_memory_bytes: float
    steps: int
    max_steps_in_flight: int
    calls: list[CallTable]
    transfers: list[TransferTable]
    communicator_bytes: float = 0.0
    sending_bytes: float = 0.0
