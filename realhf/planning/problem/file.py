"""Planning problems as files, read and checked: planning-problem/1 (`version_1`), and planning-problem/2.

The latter has the words of the planner, and is what `realhf plan` really solves. It says more than the former:
transfers that occupy the devices of two calls, and depend on where these lie; memory for a copy of parameters, needed
only away from the model's home; a bound on the steps in flight. Times are in seconds, as the planner has them, so that
nothing is rounded on the way.
"""

from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec.structs import asdict

from realhf.base.errors import UserError
from realhf.base.files import BadContentError, decode_json
from realhf.base.reading import read_bytes
from realhf.planning.problem.tables import MAX_INSTANCES, Amount, Problem, Tables, Transfer, TransferTable
from realhf.planning.problem.version_1 import ProblemFile


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
