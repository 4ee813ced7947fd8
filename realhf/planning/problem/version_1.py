"""Planning problems in files of version 1, the language of comparison between searchers: whole microseconds and bytes.

Version 1 says less than the planner's tables (`realhf.planning.problem.tables`): this module alone knows it, and
converts.
"""

from collections.abc import Iterator
from itertools import product
from typing import Annotated, Literal

import msgspec

from realhf.planning.problem.tables import (
    MAX_CALLS,
    MAX_TRANSFERS,
    CallTable,
    Count,
    Devices,
    NotNegative,
    NumDevices,
    OptionRow,
    Parents,
    Problem,
    Steps,
    TransferTable,
)

SEPARATOR = ">"


class FileOption(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run a call: `devices` are (first, number), the bytes those on each of them."""

    devices: Devices
    strategy: str
    time_us: NotNegative
    static_bytes: NotNegative
    peak_bytes: NotNegative


class FileCall(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    model: str
    trains: bool
    parents: Parents
    options: Annotated[list[FileOption], msgspec.Meta(min_length=1)]


class FileTransfer(msgspec.Struct, frozen=True, kw_only=True):
    """Occupies the devices of call `on` for as long as `table` says for the strategies of `source` and `target`;
    takes no time if these have the same strategy and the same devices."""

    name: str
    source: str = msgspec.field(name="from")
    target: str = msgspec.field(name="to")
    on: str
    table: str
    parents: Parents


class ProblemFile(msgspec.Struct, frozen=True, kw_only=True):
    """A planning problem in whole microseconds and bytes."""

    format: Literal["planning-problem/1"]
    num_devices: NumDevices
    devices_per_node: Count
    device_memory_bytes: Count
    steps: Steps
    calls: Annotated[list[FileCall], msgspec.Meta(min_length=1, max_length=MAX_CALLS)]
    transfers: Annotated[list[FileTransfer], msgspec.Meta(max_length=MAX_TRANSFERS)]
    tables: dict[str, dict[str, NotNegative]]

    def problem(self) -> Problem:
        """The tables of a problem without complaints, in whole microseconds."""
        return Problem(
            num_devices=self.num_devices,
            devices_per_node=self.devices_per_node,
            device_memory_bytes=self.device_memory_bytes,
            steps=self.steps,
            max_steps_in_flight=self.steps,
            calls=[
                CallTable(
                    name=call.name,
                    model=call.model,
                    trains=call.trains,
                    home=call.name,
                    parents=call.parents,
                    options=[_row(option) for option in call.options],
                )
                for call in self.calls
            ],
            transfers=[_transfer_table(self, transfer) for transfer in self.transfers],
            unit_us=1.0,
        )

    def complaints(self) -> Iterator[str]:
        """What is wrong with a file of this version, for people, where nothing is that all versions refuse."""
        for call in self.calls:
            for i, option in enumerate(call.options):
                if option.static_bytes > option.peak_bytes:
                    sizes = f"static_bytes={option.static_bytes} is above peak_bytes={option.peak_bytes}"
                    yield f"{call.name!r}: options[{i}]: {sizes}"
        for transfer in self.transfers:
            if transfer.table not in self.tables:
                yield f"transfer {transfer.name!r}: table is {transfer.table!r}, not one of {sorted(self.tables)}"
            yield from _table_complaints(self, transfer)


def _row(option: FileOption) -> OptionRow:
    return OptionRow(
        devices=option.devices,
        strategy=option.strategy,
        micro_batches=1,  # the format knows none
        time_s=option.time_us,
        static_bytes=option.static_bytes,
        dynamic_bytes=option.peak_bytes - option.static_bytes,
        copy_bytes=0,
    )


def _transfer_table(file: ProblemFile, transfer: FileTransfer) -> TransferTable:
    strategies = {call.name: [option.strategy for option in call.options] for call in file.calls}
    sources, targets = strategies[transfer.source], strategies[transfer.target]
    rows, columns = ({name: i for i, name in enumerate(dict.fromkeys(names))} for names in (sources, targets))
    table = file.tables[transfer.table]
    return TransferTable(
        name=transfer.name,
        source=transfer.source,
        target=transfer.target,
        on=[transfer.on],
        free_if_unmoved=True,
        parents=transfer.parents,
        rows=[rows[strategy] for strategy in sources],
        columns=[columns[strategy] for strategy in targets],
        num_columns=len(columns),
        # An entry may be missing where the two options are always one and the same.
        seconds=[table.get(f"{row}{SEPARATOR}{column}", 0) for row in rows for column in columns],
    )


def _table_complaints(file: ProblemFile, transfer: FileTransfer) -> Iterator[str]:
    """Complains of the first pair that can occur and is not in the table."""
    table = file.tables[transfer.table]
    placed = {call.name: {(o.strategy, o.devices) for o in call.options} for call in file.calls}
    sources, targets = placed[transfer.source], placed[transfer.target]
    for source, target in product(sorted({name for name, _ in sources}), sorted({name for name, _ in targets})):
        pair = f"{source}{SEPARATOR}{target}"
        if pair in table:
            continue
        both = {d for s, d in sources if s == source} | {d for s, d in targets if s == target}
        if source != target or len(both) > 1:
            yield f"table {transfer.table!r} lacks the pair {pair!r}, which transfer {transfer.name!r} can need"
            return
