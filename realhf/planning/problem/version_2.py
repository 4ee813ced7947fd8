"""Planning problems as files in the words of the planner (`planning-problem/2`): what `realhf plan` really solves.

More than planning-problem/1 can say: transfers that occupy the devices of two calls, and depend on where these lie;
memory for a copy of parameters, needed only away from the model's home; a bound on the steps in flight.
Times are in seconds, as the planner has them, so that nothing is rounded on the way.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec

from realhf.dataflow.graph import DataflowGraph
from realhf.planning.problem.nodes import (
    MAX_CALLS,
    MAX_TRANSFERS,
    MOST,
    Amount,
    Count,
    NotNegative,
    NumDevices,
    Parents,
    Steps,
    cycle_complaints,
    node_complaints,
    numbers,
)
from realhf.planning.problem.tables import CallTable, OptionRow, Problem, TransferTable


class PlannedCall(msgspec.Struct, frozen=True, kw_only=True):
    """`home` is the call in whose layout the model's parameters live. `spared`: (home's strategy, strategy, bytes): on
    the home's devices, what of `copy_bytes` is free again while the call runs."""

    name: str
    model: str
    trains: bool
    home: str
    parents: Parents
    options: Annotated[list[OptionRow], msgspec.Meta(min_length=1)]
    spared: list[tuple[str, str, Amount]] = []


class PlannedTransfer(msgspec.Struct, frozen=True, kw_only=True):
    """Occupies the devices of all calls of `on` for `times_s[rows[i]][columns[j]]` seconds, between option i of
    the call `from` and option j of the call `to`."""

    name: str
    source: str = msgspec.field(name="from")
    target: str = msgspec.field(name="to")
    on: Annotated[list[str], msgspec.Meta(min_length=1, max_length=2)]
    parents: Parents
    rows: list[NotNegative]
    columns: list[NotNegative]
    times_s: Annotated[list[list[Amount]], msgspec.Meta(min_length=1)]


class PlannedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A planning problem in seconds and bytes.

    The calls and transfers of step t that have no parent in it wait for everything of step t - max_steps_in_flight.
    A device needs `communicator_bytes` for each communicator that it is in, and `sending_bytes` if it has a model's
    home and not all of its calls, beside whatever runs there.
    """

    format: Literal["planning-problem/2"] = "planning-problem/2"
    num_devices: NumDevices
    devices_per_node: Count
    device_memory_bytes: Annotated[float, msgspec.Meta(gt=0, le=MOST)]
    steps: Steps
    max_steps_in_flight: Steps
    calls: Annotated[list[PlannedCall], msgspec.Meta(min_length=1, max_length=MAX_CALLS)]
    transfers: Annotated[list[PlannedTransfer], msgspec.Meta(max_length=MAX_TRANSFERS)]
    communicator_bytes: Amount = 0.0
    sending_bytes: Amount = 0.0


def problem_of(file: PlannedFile) -> Problem:
    """The tables of a problem without complaints."""
    nodes = numbers([*(call.name for call in file.calls), *(transfer.name for transfer in file.transfers)])
    return Problem(
        num_devices=file.num_devices,
        device_memory_bytes=file.device_memory_bytes,
        steps=file.steps,
        max_steps_in_flight=file.max_steps_in_flight,
        calls=[
            CallTable(
                name=call.name,
                home=nodes[call.home],
                parents=[(nodes[name], back) for name, back in call.parents],
                options=call.options,
                spared=call.spared,
            )
            for call in file.calls
        ],
        transfers=[
            TransferTable(
                name=transfer.name,
                source=nodes[transfer.source],
                target=nodes[transfer.target],
                on=tuple(nodes[name] for name in transfer.on),
                parents=[(nodes[name], back) for name, back in transfer.parents],
                rows=transfer.rows,
                columns=transfer.columns,
                num_columns=len(transfer.times_s[0]),
                seconds=[seconds for row in transfer.times_s for seconds in row],
            )
            for transfer in file.transfers
        ],
        communicator_bytes=file.communicator_bytes,
        sending_bytes=file.sending_bytes,
    )


def file_of(problem: Problem, graph: DataflowGraph, devices_per_node: int) -> PlannedFile:
    """The same problem as a file: every plan has the same time and memory, to the last bit."""
    names = [*(call.name for call in problem.calls), *(transfer.name for transfer in problem.transfers)]
    return PlannedFile(
        num_devices=problem.num_devices,
        devices_per_node=devices_per_node,
        device_memory_bytes=problem.device_memory_bytes,
        steps=problem.steps,
        max_steps_in_flight=problem.max_steps_in_flight,
        calls=[
            PlannedCall(
                name=call.name,
                model=graph.calls[call.name].model_name,
                trains=graph.calls[call.name].trains,
                home=names[call.home],
                parents=[(names[parent], back) for parent, back in call.parents],
                options=call.options,
                spared=call.spared,
            )
            for call in problem.calls
        ],
        transfers=[
            PlannedTransfer(
                name=transfer.name,
                source=names[transfer.source],
                target=names[transfer.target],
                on=[names[call] for call in transfer.on],
                parents=[(names[parent], back) for parent, back in transfer.parents],
                rows=transfer.rows,
                columns=transfer.columns,
                times_s=_matrix(transfer),
            )
            for transfer in problem.transfers
        ],
        communicator_bytes=problem.communicator_bytes,
        sending_bytes=problem.sending_bytes,
    )


def _matrix(transfer: TransferTable) -> list[list[float]]:
    width = transfer.num_columns
    return [list(transfer.seconds[start : start + width]) for start in range(0, len(transfer.seconds), width)]


def complaints(problem: PlannedFile) -> Iterator[str]:
    """What is wrong with a problem, for people; nothing if it can be solved."""
    nodes: list[PlannedCall | PlannedTransfer] = [*problem.calls, *problem.transfers]
    yield from node_complaints(nodes, problem.steps)
    calls = {call.name: call for call in problem.calls}
    for call in problem.calls:
        if call.home not in calls:
            yield f"{call.name!r}: home is {call.home!r}, which is no call of the file"
        for i, option in enumerate(call.options):
            if sum(option.devices) > problem.num_devices:
                where = f"{call.name!r}: options[{i}]"
                yield f"{where}: devices {list(option.devices)} reach beyond num_devices={problem.num_devices}"
    for transfer in problem.transfers:
        for field, name in (("from", transfer.source), ("to", transfer.target), *(("on", on) for on in transfer.on)):
            if name not in calls:
                yield f"transfer {transfer.name!r}: {field!r} is {name!r}, which is no call of the file"
        yield from _table_complaints(transfer, calls)
    yield from cycle_complaints(nodes)


def _table_complaints(transfer: PlannedTransfer, calls: dict[str, PlannedCall]) -> Iterator[str]:
    where = f"transfer {transfer.name!r}"
    width = len(transfer.times_s[0])
    if not width or any(len(row) != width for row in transfer.times_s):
        yield f"{where}: the rows of times_s must be equally long, and not empty"
    for field, places, call, size in (
        ("rows", transfer.rows, transfer.source, len(transfer.times_s)),
        ("columns", transfer.columns, transfer.target, width),
    ):
        options = len(calls[call].options)
        if len(places) != options:
            yield f"{where}: {field} has {len(places)} entries; it needs one for each of {call!r}'s {options} options"
        if any(place >= size for place in places):
            yield f"{where}: {field} names {max(places)}, but times_s has {size} {field}"
