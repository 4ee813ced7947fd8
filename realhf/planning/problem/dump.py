"""From the planner's tables to planning problem files: exactly (version 2), or in the simpler words of version 1."""

from collections.abc import Callable

from realhf.base.errors import UserError
from realhf.dataflow.graph import DataflowGraph
from realhf.planning.model.communicators import MOVES
from realhf.planning.problem.file import SEPARATOR, FileCall, FileOption, FileTransfer, ProblemFile
from realhf.planning.problem.nodes import Parents
from realhf.planning.problem.solution_file import PlannedCall, PlannedFile, PlannedOption, PlannedTransfer
from realhf.planning.problem.tables import CallTable, OptionRow, Problem, TransferTable

GIB = 2**30

Label = Callable[[OptionRow], str]  # an option's `strategy` in a file of version 1
Moves = Callable[[Problem, TransferTable], dict[str, int]]  # a table of version 1: microseconds of "LABEL>LABEL"


def planned_file(problem: Problem, graph: DataflowGraph, devices_per_node: int) -> PlannedFile:
    """The same problem as a file: every plan has the same time and memory, to the last bit."""
    names = _node_names(problem)
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
                options=[_planned_option(row) for row in call.options],
                spared=call.spared,
            )
            for call in problem.calls
        ],
        transfers=[
            PlannedTransfer(
                name=transfer.name,
                source=names[transfer.source],
                target=names[transfer.target],
                on=[names[place] for place in _places(transfer)],
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


def _node_names(problem: Problem) -> list[str]:
    return [*(call.name for call in problem.calls), *(transfer.name for transfer in problem.transfers)]


def _planned_option(row: OptionRow) -> PlannedOption:
    return PlannedOption(
        devices=row.devices,
        strategy=row.strategy,
        micro_batches=row.micro_batches,
        time_s=row.time_s,
        static_bytes=row.static_bytes,
        dynamic_bytes=row.dynamic_bytes,
        copy_bytes=row.copy_bytes,
        communicators=list(row.communicators),
    )


def _places(transfer: TransferTable) -> list[int]:
    match transfer.occupies:
        case "both":
            return [transfer.source, transfer.target]
        case "source":
            return [transfer.source]
        case "target":
            return [transfer.target]


def _matrix(transfer: TransferTable) -> list[list[float]]:
    width = transfer.num_columns
    return [list(transfer.seconds[start : start + width]) for start in range(0, len(transfer.seconds), width)]


def label_with_devices(row: OptionRow) -> str:
    """`dp2 tp4 pp1 on 0+8`: what a reallocation depends on, the strategy and the place."""
    first, count = row.devices
    return f"{row.strategy} on {first}+{count}"


def planned_moves(problem: Problem, transfer: TransferTable) -> dict[str, int]:
    """The planner's times between options by `label_with_devices`."""
    sources = dict(zip(map(label_with_devices, problem.calls[transfer.source].options), transfer.rows, strict=True))
    targets = dict(zip(map(label_with_devices, problem.calls[transfer.target].options), transfer.columns, strict=True))
    width = transfer.num_columns
    return {
        f"{source}{SEPARATOR}{target}": round(transfer.seconds[row * width + column] * 1e6)
        for source, row in sources.items()
        for target, column in targets.items()
    }


def simple_file(
    problem: Problem,
    graph: DataflowGraph,
    devices_per_node: int,
    *,
    steps: int | None = None,
    label: Label = label_with_devices,
    moves: Moves = planned_moves,
) -> ProblemFile:
    """The problem in the simpler words of version 1, whole microseconds and bytes.

    What these cannot say is changed: a copy of parameters counts wherever a call runs, with what it takes to send it,
    and communicators count with each of their calls; a copy is made once training has ended, in two transfers, one on
    the devices of each side; data moves at once; no model follows another. Options that do not fit by themselves are
    left out, and those alike are one.

    Raises:
        UserError: no option of a call fits, or a model is trained by two calls, whose layouts must then agree.
    """
    homes = {call.name: problem.calls[call.home].name for call in problem.calls}
    parents: dict[str, Parents] = {
        call.name: [(edge.parent, edge.steps_back) for edge in graph.parents(call.name) if edge.kind == "data"]
        for call in problem.calls
    }
    transfers, tables = [], {}
    for transfer in problem.transfers:
        name, home = problem.calls[transfer.target].name, problem.calls[transfer.source].name
        if homes[name] != home or name == home or transfer.name.startswith("data: "):
            continue
        back = next((e.steps_back for e in graph.parents(name) if e.parent == home and e.kind == "version"), 1)
        key = f"{graph.calls[name].model_name}: {home} to {name}"
        tables[key] = moves(problem, transfer)
        for side in (home, name):
            on_side = f"{key}, on the devices of {side}"
            transfers.append(
                FileTransfer(name=on_side, source=home, target=name, on=side, table=key, parents=[(home, 0)])
            )
            parents[name].append((on_side, back))
    _bound_steps_in_flight(parents, problem.max_steps_in_flight, steps or problem.steps)
    return ProblemFile(
        format="planning-problem/1",
        num_devices=problem.num_devices,
        devices_per_node=devices_per_node,
        device_memory_bytes=int(problem.device_memory_bytes),
        steps=steps or problem.steps,
        calls=[
            FileCall(
                name=call.name,
                model=graph.calls[call.name].model_name,
                trains=graph.calls[call.name].trains,
                parents=parents[call.name],
                options=_simple_options(problem, call, graph, label),
            )
            for call in problem.calls
        ],
        transfers=transfers,
        tables=tables,
    )


def _bound_steps_in_flight(parents: dict[str, Parents], in_flight: int, steps: int) -> None:
    """The first calls of a step wait for the last ones of the step `in_flight` before."""
    if in_flight >= steps:
        return
    waited_for = {parent for row in parents.values() for parent, back in row if back == 0}
    last = [name for name in parents if name not in waited_for]
    for row in parents.values():
        if all(back > 0 for _, back in row):
            row.extend((name, in_flight) for name in last if (name, in_flight) not in row)


def _simple_options(problem: Problem, call: CallTable, graph: DataflowGraph, label: Label) -> list[FileOption]:
    is_home = problem.calls[call.home].name == call.name
    if graph.calls[call.name].trains and not is_home:
        raise UserError(
            f"{call.name}: planning-problem/1 cannot say that two calls train {graph.calls[call.name].model_name} in "
            "one layout; write planning-problem/2"
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
