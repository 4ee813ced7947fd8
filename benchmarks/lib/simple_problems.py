"""The planner's problems in the simpler words of planning-problem/1, which other searchers read too."""

from collections.abc import Callable, Iterator

from realhf.base.errors import UserError
from realhf.dataflow.graph import DataflowGraph
from realhf.planning.model.communicators import MOVES
from realhf.planning.model.hardware import GIB
from realhf.planning.problem.file import SEPARATOR, FileCall, FileOption, FileTransfer, ProblemFile
from realhf.planning.problem.tables import CallTable, OptionRow, Parents, Problem, TransferTable

Label = Callable[[OptionRow], str]  # an option's `strategy` in the file


def label_with_devices(row: OptionRow) -> str:
    """`dp2 tp4 pp1 on 0+8`: what a reallocation depends on, the strategy and the place."""
    first, count = row.devices
    return f"{row.strategy} on {first}+{count}"


def simple_problem(problem: Problem, graph: DataflowGraph, label: Label = label_with_devices) -> ProblemFile:
    """The problem in whole microseconds and bytes.

    What version 1 cannot say is changed: a copy of parameters counts wherever a call runs, with what it takes to send
    it, and communicators count with each of their calls; a copy is made once training has ended, in two transfers, one
    on the devices of each side; data moves at once; no model follows another; what runs beside the devices takes no
    time. Options that do not fit by themselves are left out, and those alike are one.

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
    return ProblemFile(
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


def _producers(graph: DataflowGraph, name: str) -> Iterator[str]:
    """The calls with a layout that make what a call reads, or what calls beside the devices read for it."""
    for edge in graph.parents(name):
        if edge.kind == "data":
            yield from _producers(graph, edge.parent) if edge.parent in graph.beside else (edge.parent,)


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
