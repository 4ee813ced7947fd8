"""Planning problems as files, read and checked: planning-problem/1, and planning-problem/2.

Version 1 is the language of comparison between searchers: whole microseconds and bytes. Version 2 has the words of the
planner, and is what `realhf plan` really solves. It says more: transfers that occupy the devices of two calls, and
depend on where these lie; memory for a copy of parameters, needed only away from the model's home; a bound on the steps
in flight. Times are in seconds, as the planner has them, so that nothing is rounded on the way.
"""

from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import chain, product
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec.structs import asdict

from realhf.base.errors import UserError
from realhf.base.files import BadContentError, decode_json, read_bytes
from realhf.planning.problem.tables import (
    MAX_CALLS,
    MAX_INSTANCES,
    MAX_TRANSFERS,
    Amount,
    CallTable,
    Count,
    Devices,
    NotNegative,
    NumDevices,
    OptionRow,
    Parents,
    Problem,
    Steps,
    Tables,
    Transfer,
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


class PlannedTransfer(Transfer, frozen=True, kw_only=True):
    times_s: Annotated[list[list[Amount]], msgspec.Meta(min_length=1)]

    @classmethod
    def of(cls, table: TransferTable) -> "PlannedTransfer":
        fields = asdict(table)
        del fields["free_if_unmoved"]
        width, seconds = fields.pop("num_columns"), fields.pop("seconds")
        times_s = [list(seconds[start : start + width]) for start in range(0, len(seconds), width)]
        return cls(**fields, times_s=times_s)

    def table(self) -> TransferTable:
        fields = asdict(self)
        del fields["times_s"]
        seconds = [seconds for row in self.times_s for seconds in row]
        return TransferTable(**fields, num_columns=len(self.times_s[0]), seconds=seconds)


class PlannedFile(Tables[PlannedTransfer], frozen=True, kw_only=True, tag_field="format", tag="planning-problem/2"):
    """A planning problem in seconds and bytes."""

    @classmethod
    def of(cls, problem: Problem) -> "PlannedFile":
        """The same problem as a file: every plan has the same time and memory, to the last bit."""
        fields = asdict(problem)
        del fields["unit_us"], fields["kept"]
        return cls(**fields | {"transfers": [PlannedTransfer.of(transfer) for transfer in problem.transfers]})

    def problem(self) -> Problem:
        """The tables of a problem without complaints."""
        return Problem(**asdict(self) | {"transfers": [transfer.table() for transfer in self.transfers]})

    def complaints(self) -> Iterator[str]:
        """What is wrong with a file of this version, for people, where nothing is that all versions refuse."""
        calls = {call.name: call for call in self.calls}
        for call in self.calls:
            if call.home not in calls:
                yield f"{call.name!r}: home is {call.home!r}, which is no call of the file"
        for move in self.transfers:
            where, width = f"transfer {move.name!r}", len(move.times_s[0])
            if not width or any(len(row) != width for row in move.times_s):
                yield f"{where}: the rows of times_s must be equally long, and not empty"
            for field, places, name, size in (
                ("rows", move.rows, move.source, len(move.times_s)),
                ("columns", move.columns, move.target, width),
            ):
                options = len(calls[name].options)
                if len(places) != options:
                    needed = f"one for each of {name!r}'s {options} options"
                    yield f"{where}: {field} has {len(places)} entries; it needs {needed}"
                if any(place >= size for place in places):
                    yield f"{where}: {field} names {max(places)}, but times_s has {size} {field}"


class _Header(msgspec.Struct):
    format: str


def load_problem(path: Path | str) -> Problem:
    """Reads and checks a problem.

    Raises:
        UserError: the file cannot be read, or breaks the format; names the file and the field.
    """
    try:
        data = read_bytes(path)
        is_planned = decode_json(data, _Header).format == "planning-problem/2"
        file = decode_json(data, PlannedFile) if is_planned else decode_json(data, ProblemFile)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); name a planning-problem/1 file") from error
    except BadContentError as error:  # wrong types and numbers, too
        raise UserError(f"{path}: {error}; the file must have the format planning-problem/1 or /2") from error
    for complaint in chain(_complaints(file), file.complaints()):
        raise UserError(f"{path}: {complaint}")
    return file.problem()


def problem_bytes(file: PlannedFile | ProblemFile) -> bytes:
    """The content of a problem's file."""
    return msgspec.json.encode(file) + b"\n"


def _complaints(file: PlannedFile | ProblemFile) -> Iterator[str]:
    """The errors of a file of any version, for people."""
    nodes: list[Any] = [*file.calls, *file.transfers]
    if len(nodes) * file.steps > MAX_INSTANCES:
        sizes = f"steps={file.steps} of {len(nodes)} calls and transfers"
        yield f"{sizes} are more than {MAX_INSTANCES:,} in all; lower steps"
    names = [node.name for node in nodes]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        yield f"two nodes have the name {twice!r}; names of calls and transfers must differ"
    for node in nodes:
        for parent, _ in node.parents:
            if parent not in names:
                yield f"{node.name!r}: parents names {parent!r}, which is no call and no transfer of the file"
    calls: dict[str, Any] = {call.name: call for call in file.calls}
    for name, call in calls.items():
        for i, option in enumerate(call.options):
            if sum(option.devices) > file.num_devices:
                devices = f"devices {list(option.devices)} reach beyond num_devices={file.num_devices}"
                yield f"{name!r}: options[{i}]: {devices}"
    for transfer in file.transfers:
        on = [transfer.on] if isinstance(transfer.on, str) else transfer.on
        for field, name in (("from", transfer.source), ("to", transfer.target), *(("on", name) for name in on)):
            if name not in calls:
                yield f"transfer {transfer.name!r}: {field!r} is {name!r}, which is no call of the file"
    try:
        TopologicalSorter({node.name: [name for name, back in node.parents if back == 0] for node in nodes}).prepare()
    except CycleError:
        yield "the nodes of a step wait for one another in a circle; parents must not form a cycle with 0 steps back"
