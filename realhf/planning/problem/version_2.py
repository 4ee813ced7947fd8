"""Planning problems as files in the words of the planner (`planning-problem/2`): what `realhf plan` really solves.

More than planning-problem/1 can say: transfers that occupy the devices of two calls, and depend on where these lie;
memory for a copy of parameters, needed only away from the model's home; a bound on the steps in flight.
Times are in seconds, as the planner has them, so that nothing is rounded on the way.
"""

from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec.structs import asdict

from realhf.planning.problem.checks import complaints_of
from realhf.planning.problem.tables import Amount, CallTable, Problem, Tables, Transfer, TransferTable


class PlannedTransfer(Transfer, frozen=True, kw_only=True):
    times_s: Annotated[list[list[Amount]], msgspec.Meta(min_length=1)]


class PlannedFile(Tables[PlannedTransfer], frozen=True, kw_only=True, tag_field="format", tag="planning-problem/2"):
    """A planning problem in seconds and bytes."""


def problem_of(file: PlannedFile) -> Problem:
    """The tables of a problem without complaints."""
    return Problem(**asdict(file) | {"transfers": [_table(transfer) for transfer in file.transfers]})


def _table(transfer: PlannedTransfer) -> TransferTable:
    fields = asdict(transfer)
    times_s = fields.pop("times_s")
    return TransferTable(**fields, num_columns=len(times_s[0]), seconds=[seconds for row in times_s for seconds in row])


def file_of(problem: Problem) -> PlannedFile:
    """The same problem as a file: every plan has the same time and memory, to the last bit."""
    fields = asdict(problem)
    del fields["unit_us"]
    return PlannedFile(**fields | {"transfers": [_rows(transfer) for transfer in problem.transfers]})


def _rows(table: TransferTable) -> PlannedTransfer:
    fields = asdict(table)
    del fields["free_if_unmoved"]
    width, seconds = fields.pop("num_columns"), fields.pop("seconds")
    times_s = [list(seconds[start : start + width]) for start in range(0, len(seconds), width)]
    return PlannedTransfer(**fields, times_s=times_s)


def complaints(file: PlannedFile) -> Iterator[str]:
    """What is wrong with a problem, for people; nothing if it can be solved."""
    calls = {call.name: call for call in file.calls}

    def of_call(call: CallTable) -> Iterator[str]:
        if call.home not in calls:
            yield f"{call.name!r}: home is {call.home!r}, which is no call of the file"

    def of_transfer(move: PlannedTransfer) -> Iterator[str]:
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

    yield from complaints_of(file, of_call, of_transfer)
