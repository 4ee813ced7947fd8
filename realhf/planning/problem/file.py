"""Planning problems as files: all that a search needs, read and checked.

`planning-problem/1` is the language of comparison between searchers, in whole microseconds;
`planning-problem/2` (`realhf.planning.problem.solution_file`) that of the planner.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from realhf.base.errors import UserError
from realhf.base.files import BadContentError, decode_json
from realhf.planning.problem.nodes import (
    MAX_CALLS,
    MAX_TRANSFERS,
    Count,
    Devices,
    NotNegative,
    NumDevices,
    Parents,
    Steps,
    cycle_complaints,
    node_complaints,
    numbers,
)
from realhf.planning.problem.solution_file import PlannedFile, planned_complaints, planned_tables

SEPARATOR = ">"


class FileOption(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run a call: `devices` are (first, number), the bytes those on each of them."""

    devices: Devices
    strategy: str
    time_us: NotNegative
    static_bytes: NotNegative
    peak_bytes: NotNegative

    @property
    def time_s(self) -> float:
        return self.time_us / 1e6


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


def load_problem(path: Path | str) -> ProblemFile | PlannedFile:
    """Reads and checks a problem.

    Raises:
        UserError: the file cannot be read, or breaks the format; names the file and the field.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); name a planning-problem/1 file") from error
    try:
        problem: ProblemFile | PlannedFile
        if decode_json(data, _Header).format == "planning-problem/2":
            problem = decode_json(data, PlannedFile)
        else:
            problem = decode_json(data, ProblemFile)
    except BadContentError as error:  # wrong types and numbers, too
        raise UserError(f"{path}: {error}; the file must have the format planning-problem/1 or /2") from error
    for complaint in planned_complaints(problem) if isinstance(problem, PlannedFile) else _complaints(problem):
        raise UserError(f"{path}: {complaint}")
    return problem


class _Header(msgspec.Struct):
    format: str


def problem_bytes(problem: ProblemFile | PlannedFile) -> bytes:
    """The content of the problem's file."""
    return msgspec.json.encode(problem) + b"\n"


def save_problem(problem: ProblemFile | PlannedFile, path: Path | str) -> None:
    Path(path).write_bytes(problem_bytes(problem))


def native_tables(problem: ProblemFile | PlannedFile) -> dict[str, Any]:
    """The tables that the C++ engine reads (csrc/search/bindings.cpp), in times of `unit_us` each."""
    return planned_tables(problem) if isinstance(problem, PlannedFile) else _simple_tables(problem)


def unit_us(problem: ProblemFile | PlannedFile) -> float:
    """Microseconds in the engine's unit of time for this problem."""
    return 1e6 if isinstance(problem, PlannedFile) else 1.0


def _simple_tables(problem: ProblemFile) -> dict[str, Any]:
    nodes = numbers([*(call.name for call in problem.calls), *(transfer.name for transfer in problem.transfers)])
    calls = {call.name: i for i, call in enumerate(problem.calls)}
    return {
        "num_devices": problem.num_devices,
        "device_memory_bytes": problem.device_memory_bytes,
        "steps": problem.steps,
        "max_steps_in_flight": problem.steps,
        "calls": [
            {
                "home": i,
                "parents": [(nodes[name], back) for name, back in call.parents],
                "options": [_native_option(option) for option in call.options],
            }
            for i, call in enumerate(problem.calls)
        ],
        "transfers": [
            {
                "source": calls[transfer.source],
                "target": calls[transfer.target],
                "on": [calls[transfer.on]],
                "free_if_unmoved": True,
                "parents": [(nodes[name], back) for name, back in transfer.parents],
                **_native_times(problem, transfer),
            }
            for transfer in problem.transfers
        ],
    }


def _native_option(option: FileOption) -> dict[str, Any]:
    return {
        "devices": option.devices,
        "strategy": option.strategy,
        "time_us": option.time_us,
        "static_bytes": option.static_bytes,
        "dynamic_bytes": option.peak_bytes - option.static_bytes,
        "copy_bytes": 0,
    }


def _native_times(problem: ProblemFile, transfer: FileTransfer) -> dict[str, Any]:
    sources, targets = _strategies(problem, transfer.source), _strategies(problem, transfer.target)
    rows, columns = numbers(sources), numbers(targets)
    table = problem.tables[transfer.table]
    return {
        "rows": [rows[strategy] for strategy in sources],
        "columns": [columns[strategy] for strategy in targets],
        "num_columns": len(columns),
        # An entry may be missing where the two options are always one and the same.
        "times_us": [table.get(f"{row}{SEPARATOR}{column}", 0) for row in rows for column in columns],
    }


def _strategies(problem: ProblemFile, call: str) -> list[str]:
    return [option.strategy for c in problem.calls if c.name == call for option in c.options]


def _complaints(problem: ProblemFile) -> Iterator[str]:
    nodes: list[FileCall | FileTransfer] = [*problem.calls, *problem.transfers]
    yield from node_complaints(nodes, problem.steps)
    for call in problem.calls:
        yield from _option_complaints(problem, call)
    calls = {call.name for call in problem.calls}
    for transfer in problem.transfers:
        for field, name in (("from", transfer.source), ("to", transfer.target), ("on", transfer.on)):
            if name not in calls:
                yield f"transfer {transfer.name!r}: {field!r} is {name!r}, which is no call of the file"
        if transfer.table not in problem.tables:
            yield f"transfer {transfer.name!r}: table is {transfer.table!r}, not one of {sorted(problem.tables)}"
        yield from _table_complaints(problem, transfer)
    yield from cycle_complaints(nodes)


def _option_complaints(problem: ProblemFile, call: FileCall) -> Iterator[str]:
    for i, option in enumerate(call.options):
        first, count = option.devices
        where = f"{call.name!r}: options[{i}]"
        if first + count > problem.num_devices:
            yield f"{where}: devices {list(option.devices)} reach beyond num_devices={problem.num_devices}"
        if option.static_bytes > option.peak_bytes:
            yield f"{where}: static_bytes={option.static_bytes} is above peak_bytes={option.peak_bytes}"


def _table_complaints(problem: ProblemFile, transfer: FileTransfer) -> Iterator[str]:
    """Complains of the first pair that can occur and is not in the table."""
    table = problem.tables[transfer.table]
    placed = [
        {(o.strategy, o.devices) for c in problem.calls if c.name == name for o in c.options}
        for name in (transfer.source, transfer.target)
    ]
    for source in sorted({strategy for strategy, _ in placed[0]}):
        for target in sorted({strategy for strategy, _ in placed[1]}):
            if f"{source}{SEPARATOR}{target}" in table:
                continue
            both = {d for s, d in placed[0] if s == source} | {d for s, d in placed[1] if s == target}
            if source != target or len(both) > 1:
                pair = f"{source}{SEPARATOR}{target}"
                yield f"table {transfer.table!r} lacks the pair {pair!r}, which transfer {transfer.name!r} can need"
                return
