"""Planning problems as files of the version 1: the language of comparison between searchers, in whole microseconds.

It says less than the planner's tables (`realhf.planning.problem.tables`): this module alone knows it, and converts.
"""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Annotated, Literal

import msgspec

from realhf.base.errors import UserError
from realhf.dataflow.graph import DataflowGraph
from realhf.planning.model.communicators import MOVES
from realhf.planning.model.hardware import GIB
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

Label = Callable[[OptionRow], str]  # an option's `strategy` in a file of version 1
SEPARATOR = ">"


def label_with_devices(row: OptionRow) -> str:
    """`dp2 tp4 pp1 on 0+8`: what a reallocation depends on, the strategy and the place."""
    first, count = row.devices
    return f"{row.strategy} on {first}+{count}"


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

    @classmethod
    def of(cls, problem: Problem, graph: DataflowGraph, label: Label = label_with_devices) -> "ProblemFile":
        """The problem in the simpler words of version 1, whole microseconds and bytes.

        What these cannot say is changed: a copy of parameters counts wherever a call runs, with what it takes to send
        it, and communicators count with each of their calls; a copy is made once training has ended, in two transfers,
        one on the devices of each side; data moves at once; no model follows another; what runs beside the devices
        takes no time. Options that do not fit by
        themselves are left out, and those alike are one.

        Raises:
            UserError: no option of a call fits, or a model is trained by two calls, whose layouts must then agree.
        """
        calls = {call.name: call for call in problem.calls}
        parents: dict[str, Parents] = {
            name: [(parent, 0) for parent in dict.fromkeys(_producers(graph, name))] for name in calls
        }
        transfers, tables = [], {}
        for transfer in problem.transfers:
            name, home = transfer.target, transfer.source
            if calls[name].home != home or name == home or transfer.name.startswith("data: "):
                continue
            back = next((e.steps_back for e in graph.parents(name) if e.parent == home and e.kind == "version"), 1)
            key = f"{calls[name].model}: {home} to {name}"
            tables[key] = _moves(transfer, calls[home], calls[name], label)
            for side in (home, name):
                on_side = f"{key}, on the devices of {side}"
                transfers.append(
                    FileTransfer(name=on_side, source=home, target=name, on=side, table=key, parents=[(home, 0)])
                )
                parents[name].append((on_side, back))
        _bound_steps_in_flight(parents, problem.max_steps_in_flight, problem.steps)
        return cls(
            format="planning-problem/1",
            num_devices=problem.num_devices,
            devices_per_node=problem.devices_per_node,
            device_memory_bytes=int(problem.device_memory_bytes),
            steps=problem.steps,
            calls=[
                FileCall(
                    name=name,
                    model=call.model,
                    trains=call.trains,
                    parents=parents[name],
                    options=_simple_options(problem, call, label),
                )
                for name, call in calls.items()
            ],
            transfers=transfers,
            tables=tables,
        )

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


def _producers(graph: DataflowGraph, name: str) -> Iterator[str]:
    """The calls with a layout that make what a call reads, or what calls beside the devices read for it."""
    for edge in graph.parents(name):
        if edge.kind == "data":
            yield from _producers(graph, edge.parent) if edge.parent in graph.beside else (edge.parent,)


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


def _moves(transfer: TransferTable, home: CallTable, call: CallTable, label: Label) -> dict[str, int]:
    """Microseconds from each option of the home to each one of the call, by their labels."""
    sources = {label(row): number for row, number in zip(home.options, transfer.rows, strict=True)}
    targets = {label(row): number for row, number in zip(call.options, transfer.columns, strict=True)}
    width = transfer.num_columns
    return {
        f"{source}{SEPARATOR}{target}": round(transfer.seconds[row * width + column] * 1e6)
        for source, row in sources.items()
        for target, column in targets.items()
    }


def _bound_steps_in_flight(parents: dict[str, Parents], in_flight: int, steps: int) -> None:
    """The first calls of a step wait for the last ones of the step `in_flight` before."""
    if in_flight >= steps:
        return
    waited_for = {parent for row in parents.values() for parent, back in row if back == 0}
    last = [name for name in parents if name not in waited_for]
    for row in parents.values():
        if all(back > 0 for _, back in row):
            row.extend((name, in_flight) for name in last if (name, in_flight) not in row)


def _simple_options(problem: Problem, call: CallTable, label: Label) -> list[FileOption]:
    if call.trains and call.home != call.name:
        raise UserError(
            f"{call.name}: planning-problem/1 cannot say that two calls train {call.model} in one layout; write "
            "planning-problem/2"
        )
    rows: dict[FileOption, None] = {}
    for row in call.options:
        labels = {MOVES, *row.communicators} if row.communicators else ()
        static = row.static_bytes + problem.communicator_bytes * len(labels)
        peak = static + row.dynamic_bytes + row.copy_bytes + problem.sending_bytes
        if peak <= problem.device_memory_bytes:
            option = FileOption(
                devices=row.devices,
                strategy=label(row),
                time_us=round(row.time_s * 1e6),
                static_bytes=round(static),
                peak_bytes=round(peak),
            )
            rows[option] = None
    if not rows:
        raise UserError(
            f"{call.name}: no option fits into {problem.device_memory_bytes / GIB:.2f} GiB a device; give more memory "
            "or more devices"
        )
    return list(rows)


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
