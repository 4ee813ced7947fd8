"""A planning problem as plain tables: what is searched and simulated, whatever file it came from."""

from collections.abc import Sequence

import msgspec

from realhf.planning.problem.nodes import Amount, Count, Devices, Label

ParentRow = tuple[int, int]  # (node, steps back); nodes are numbered calls first, then transfers


class OptionRow(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run a call: seconds, and bytes on each of its devices, which are (first, number).

    `static_bytes` for good, `dynamic_bytes` while it runs, `copy_bytes` on top of these unless the model's home is
    chosen with the same devices and strategy: where it is not, `static_bytes` too are needed only while it runs.
    `communicators`: ascending labels of those that each of its devices is in (`realhf.planning.model.communicators`);
    where options have a label in common, it is one communicator on every device that they share. Label 1 is that of all
    copies of parameters, and need not be said. Ranges are checked where a file is read.
    """

    devices: Devices
    strategy: str
    micro_batches: Count
    time_s: Amount
    static_bytes: Amount
    dynamic_bytes: Amount
    copy_bytes: Amount
    communicators: tuple[Label, ...] = ()


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
    seconds[rows[i] * num_columns + columns[j]]. There can be millions: a list, or a buffer of doubles.

    `on`: the one or two calls whose devices it occupies. `free_if_unmoved`: it takes no time between two options of one
    layout, whatever `seconds` says.
    """

    name: str
    source: int
    target: int
    parents: list[ParentRow]
    rows: list[int]
    columns: list[int]
    num_columns: int
    seconds: Sequence[float]
    on: tuple[int, ...]
    free_if_unmoved: bool = False


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the search needs and nothing about how the numbers came about.

    `communicator_bytes` are those of each communicator on every device that is in it; `sending_bytes` what a device
    needs to send a copy that it does not get, beside whatever runs there.

    `unit_us`: microseconds in one unit of all times. It is a second, but for problems from planning-problem/1 files:
    their times stay in whole microseconds, whose sums are exact.
    """

    num_devices: int
    device_memory_bytes: float
    steps: int
    max_steps_in_flight: int
    calls: list[CallTable]
    transfers: list[TransferTable]
    communicator_bytes: float = 0.0
    sending_bytes: float = 0.0
    unit_us: float = 1e6
