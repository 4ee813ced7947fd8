"""From a dataflow graph, options and costs to the tables of a planning problem."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from realhf.dataflow.copies import running_beside, takers_of, with_copies
from realhf.dataflow.graph import ModelFunctionCallDef
from realhf.geometry.layout import Layout
from realhf.planning.options import Option
from realhf.planning.problem.native import reallocation_table
from realhf.planning.problem.option_rows import Numbering, OptionRows
from realhf.planning.problem.tables import CallTable, KeptCopy, Parents, Problem
from realhf.planning.problem.transfers import ParameterTransfers, ReallocationTable, beside_table, data_transfer
from realhf.planning.task import PlanningTask
from realhf.realloc.plan.planner import DEFAULT_BUCKET_BYTES

STEPS = 4  # unrolled steps: the objective is their makespan / STEPS, so that overlap across steps counts
MANY_STEPS = 16  # where more than two steps overlap: filling and draining such a pipeline must not outweigh its overlap


def steps_of(max_steps_in_flight: int) -> int:
    """How many steps are unrolled where so many may be in flight."""
    return STEPS if max_steps_in_flight <= 2 else MANY_STEPS


def build_problem(
    task: PlanningTask,
    options: Mapping[str, Sequence[Option]],
    *,
    reallocations: ReallocationTable = reallocation_table,
    groups: bool = False,
    copies: Mapping[str, str] | None = None,
    broadcasts: Collection[str] = (),
    changes: Collection[str] = (),
) -> Problem:
    """The tables for a choice among `options` of every call.

    Nodes: the calls; those that run beside the devices, as transfers that occupy none; a move of
    parameters for every model that follows another; a data transfer for every data edge of a call
    with a layout; a reallocation for every call that is not its model's home. The latter two start
    when the call's parents have ended, and the call when its transfers have: the master issues them
    together, since the copy that a reallocation makes is freed after the call and must not occupy
    memory before.

    A model of the task's `offload` waits in host memory: it is loaded for each of its calls, on the devices of its
    home, and sent back behind it. Both occupy these devices alone; its memory counts in its own calls.

    With `groups`, as in a search, calls on the devices of their home count as grouped like it where they can be
    (`realhf.planning.model.reallocation`), and copies that contain the home's part as filled in place. A copy that
    contains the home's part counts without it; where the home has several layouts to choose from, bytes of an option
    cannot depend on which, and all of it counts.

    `copies` has the source of each call that takes its copy from another call's (`realhf.dataflow.copies`); the calls
    have one option each then. So they have with `broadcasts`, whose moves are collectives, and with `changes`, whose
    copies keep their memory, as their homes keep what they have sent (`realhf.planning.carriers`).
    """
    if copies:
        task = replace(task, graph=with_copies(task.graph, copies))
    numbers, graph = Numbering(task, options, groups, copies or {}, broadcasts, changes), task.graph
    rows, parameters = OptionRows(numbers), ParameterTransfers(numbers, reallocations)
    host_copies, loads = parameters.host_copies()
    transfers = [beside_table(numbers, call) for call in graph.beside.values()]
    transfers += [*(parameters.follow(node, loads[node.name]) for node in graph.follows.values()), *host_copies]
    calls = []
    for call in graph.model_calls.values():
        home, edges = task.homes[call.name], graph.parents(call.name)
        own = [data_transfer(numbers, call, edge.parent, edge.keys) for edge in edges if edge.kind == "data"]
        if home != call.name:
            own.append(parameters.reallocation(call, home, loads[call.name]))
        transfers += own
        versions = [(edge.parent, edge.steps_back) for edge in edges if edge.kind != "data"]
        waits = [*versions, *loads[call.name], *((transfer.name, 0) for transfer in own)]
        calls.append(_call_table(rows, call, home, waits))
    return Problem(
        num_devices=task.cluster.num_devices,
        devices_per_node=task.cluster.devices_per_node,
        device_memory_bytes=task.cluster.device_memory_bytes,
        steps=steps_of(task.max_steps_in_flight),
        max_steps_in_flight=task.max_steps_in_flight,
        calls=calls,
        transfers=transfers,
        communicator_bytes=task.costs.hardware.communicator_bytes,
        sending_bytes=_sending_bytes(task, has_broadcasts=bool(broadcasts)),
        kept=list(_all_kept(numbers)),
    )


def _call_table(rows: OptionRows, call: ModelFunctionCallDef, home: str, parents: Parents) -> CallTable:
    return CallTable(
        name=call.name,
        model=call.model_name,
        trains=call.trains,
        home=home,
        parents=parents,
        options=rows.rows(call),
        spared=list(rows.spared(call)),
        in_place_bytes=rows.in_place_bytes(call),
    )


def _all_kept(numbers: Numbering) -> Iterator[KeptCopy]:
    """Copies that are kept for others, and what moves of changes keep at both ends."""
    yield from (_kept(numbers, source) for source in dict.fromkeys(numbers.copies.values()))
    yield from (_kept_beside_all(numbers, name, but=same) for name, same in _sharing(numbers, numbers.changes).items())
    homes = dict.fromkeys(numbers.task.homes[name] for name in numbers.changes)
    yield from (_kept_beside_all(numbers, home) for home in homes)


def _kept(numbers: Numbering, source: str) -> KeptCopy:
    task, copies, (option,) = numbers.task, numbers.copies, numbers.options[source]
    beside = running_beside(task.graph, copies, source)
    return KeptCopy(
        source=source,
        takers=takers_of(copies, source),
        beside=[name for name in task.graph.model_calls if name in beside],
        size_bytes=float(task.call_models[source].placed(option.layout.strategy).parameter_bytes()),
    )


def _kept_beside_all(numbers: Numbering, name: str, but: Collection[str] = ()) -> KeptCopy:
    """The copy of a call, or as much as its part of the home, on its devices during all calls that are not in `but`."""
    (option,), call = numbers.options[name], numbers.task.call_models[name].under(numbers.options[name][0].compute)
    return KeptCopy(
        source=name,
        takers=[],
        beside=[other for other in numbers.task.graph.model_calls if other not in but],
        size_bytes=float(call.placed(option.layout.strategy).parameter_bytes()),
    )


def _sharing(numbers: Numbering, changes: Collection[str]) -> dict[str, set[str]]:
    """One call for each of the copies that `changes` use, with all calls that use the same: of its model and layout."""
    graph, found = numbers.task.graph, dict[tuple[str, Layout], set[str]]()
    for name, call in graph.model_calls.items():
        found.setdefault((call.model_name, numbers.options[name][0].layout), set()).add(name)
    return {min(same): same for same in found.values() if same & set(changes)}


def _sending_bytes(task: PlanningTask, *, has_broadcasts: bool) -> float:
    """The buckets of a device that sends a copy: as many as fill one (`copy_bytes`), where it packs. Messages over the
    memory of a host are not packed (`realhf.realloc.execute.carriers`)."""
    is_packed = has_broadcasts or task.cluster.num_nodes > 1 or not task.costs.hardware.shares_host_memory
    has_copies = any(home != call for call, home in task.homes.items())
    return 2.0 * DEFAULT_BUCKET_BYTES if is_packed and has_copies else 0.0
