"""A planning problem as tables: what is searched and simulated, and what a planning-problem/2 file has."""

from collections.abc import Sequence
from typing import Annotated, Generic, TypeVar

import msgspec

from realhf.planning._search import Table

# The limits of every version of the file, which are those of csrc/search/problem.h.
MAX_CALLS, MAX_TRANSFERS = 64, 4096
MAX_INSTANCES = 8192  # calls and transfers x steps
MOST = 10**18  # largest time, and largest number of bytes
MAX_DEVICES = 2**20

Count = Annotated[int, msgspec.Meta(ge=1, le=MOST)]
NotNegative = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
NumDevices = Annotated[int, msgspec.Meta(ge=1, le=MAX_DEVICES)]
Steps = Annotated[int, msgspec.Meta(ge=1, le=MAX_INSTANCES)]
StepsBack = Annotated[int, msgspec.Meta(ge=0, le=MAX_INSTANCES)]
Parents = Annotated[list[tuple[str, StepsBack]], msgspec.Meta(max_length=1024)]  # (call or transfer, steps back)
Devices = tuple[Annotated[int, msgspec.Meta(ge=0, le=MAX_DEVICES)], NumDevices]  # (first, number)
Amount = Annotated[float, msgspec.Meta(ge=0, le=MOST)]
Label = Annotated[int, msgspec.Meta(ge=0, le=2**20)]


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
    """`home`: the call in whose layout the model's parameters live. `spared`: (home's strategy, strategy, bytes) for
    copies on the devices of their home: what is needed less while the call runs than while the copy is filled, since it
    takes the place of the home's parameters. `in_place_bytes`: where such copies are filled in place, these bytes of it
    are needed while they are filled, and no more; None: all of it, since the home's parameters are there until then."""

    name: str
    model: str
    trains: bool
    home: str
    parents: Parents
    options: Annotated[list[OptionRow], msgspec.Meta(min_length=1)]
    spared: list[tuple[str, str, Amount]] = []
    in_place_bytes: Amount | None = None


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """A move from call `source` to call `target`, which occupies the devices of all calls of `on`; or, with none, what
    runs beside the devices. Its time is in row
    `rows[i]` and column `columns[j]` of its table for option i of the source and j of the target."""

    name: str
    source: str = msgspec.field(name="from")
    target: str = msgspec.field(name="to")
    on: Annotated[list[str], msgspec.Meta(max_length=2)]
    parents: Parents
    rows: list[NotNegative]
    columns: list[NotNegative]


class TransferTable(Transfer, frozen=True, kw_only=True):
    """`seconds` are row-major: a list, a buffer of doubles, or what C++ has of many millions.

    `free_if_unmoved`: it takes no time between two options of one layout, whatever `seconds` says.
    """

    num_columns: int
    seconds: Sequence[float] | Table
    free_if_unmoved: bool = False


T = TypeVar("T", bound=Transfer)


class Tables(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """Everything the search needs and nothing about how the numbers came about.

    The calls and transfers of step t that have no parent in it wait for everything of step t - max_steps_in_flight.
    A device needs `communicator_bytes` for each communicator that it is in, and `sending_bytes` if it has a model's
    home and not all of its calls, beside whatever runs there.
    """

    num_devices: NumDevices
    devices_per_node: Count
    device_memory_bytes: Annotated[float, msgspec.Meta(gt=0, le=MOST)]
    steps: Steps
    max_steps_in_flight: Steps
    calls: Annotated[list[CallTable], msgspec.Meta(min_length=1, max_length=MAX_CALLS)]
    transfers: Annotated[list[T], msgspec.Meta(max_length=MAX_TRANSFERS)]
    communicator_bytes: Amount = 0.0
    sending_bytes: Amount = 0.0


class KeptCopy(msgspec.Struct, frozen=True, kw_only=True):
    """The copy of call `source` is kept until the calls `takers` have theirs from it: `size_bytes` on each of the
    source's devices, also while one of the calls `beside` runs there (`realhf.dataflow.copies.running_beside`)."""

    source: str
    takers: list[str]
    beside: list[str]
    size_bytes: float


class Problem(Tables[TransferTable], frozen=True, kw_only=True):
    """`unit_us`: microseconds in one unit of all times. It is a second, but for problems from planning-problem/1 files:
    their times stay in whole microseconds, whose sums are exact. `kept`: of a given plan, whose calls have one option
    each; a search and a file have none."""

    unit_us: float = 1e6
    kept: list[KeptCopy] = []

    @property
    def nodes(self) -> list[CallTable | TransferTable]:
        """Events and the search name nodes by their place in this list."""
        return [*self.calls, *self.transfers]

    def numbers(self) -> dict[str, int]:
        """By the name of a node its place in `nodes`."""
        return {node.name: number for number, node in enumerate(self.nodes)}
