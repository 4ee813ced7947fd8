"""Transfers of a planning problem: data from call to call; copies of parameters, models that follow, host memory."""

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

from msgspec.structs import replace

from realhf.dataflow.follow import FollowNode
from realhf.dataflow.graph import ModelFunctionCallDef
from realhf.dataflow.offload import Load, loads_of
from realhf.dataflow.plan import CallCompute, beside_s
from realhf.geometry.layout import Layout, ParallelStrategy
from realhf.geometry.shards import Placement
from realhf.planning._search import Table
from realhf.planning.model.call import CallModel
from realhf.planning.model.cluster import Cluster
from realhf.planning.model.reallocation import Reallocation, grouped_reallocations
from realhf.planning.problem.option_rows import Numbering, distinct
from realhf.planning.problem.tables import Parents, TransferTable

# Seconds of a reallocation from each of the sources to each of the targets, row-major.
# Moves between the same strategies, whose meshes lie alike to one another, take the same.
Seconds = list[float] | Table
ReallocationTable = Callable[[Reallocation, Sequence[Placement], Sequence[Layout]], Seconds]
_Place = tuple[int | None, int | None]  # the device if the mesh is one, the node that it lies in if it is within one


class ParameterTransfers:
    """Tables of the moves of parameters; `seconds_of` says what one takes."""

    def __init__(self, numbers: Numbering, seconds_of: ReallocationTable):
        self._numbers, self._task, self._seconds_of = numbers, numbers.task, seconds_of

    def host_copies(self) -> tuple[list[TransferTable], dict[str, Parents]]:
        """Loads and offloads (ReaL, section 4), and by the name of a node the loads that it waits for.

        A load stands before and an offload behind each node that needs a model that waits in host memory. A load waits
        for the offload behind the node before. An offload takes no time where the host has the values already, since
        nothing has changed them.
        """
        graph = self._task.graph
        loads = loads_of(graph, self._task.offload).values()
        tables: list[TransferTable] = []
        behind: dict[tuple[str, str], str] = {}
        for load in loads:
            name = behind[load.model, load.node] = f"offload {load.model} after {load.node}"
            tables.append(self._host_copy(load, name, [(load.node, 0)], is_free=not self._changes(load)))
        waits: dict[str, Parents] = {name: [] for name in graph.nodes}
        for load in loads:
            before = [
                (behind[load.model, edge.parent], edge.steps_back)
                for edge in graph.parents(load.node)
                if edge.kind == "version" and (load.model, edge.parent) in behind
            ]
            waits[load.node].append((load.name, 0))
            tables.append(self._host_copy(load, load.name, before or [(behind[load.model, load.node], 1)]))
        return tables, waits

    def follow(self, node: FollowNode, loads: Parents) -> TransferTable:
        """From home to home, as a reallocation; what happens every N steps takes 1 / N of it in each.

        Nothing is forwarded on the way to an average. It waits for `loads`, too.
        """
        source, target = (self._numbers.home_call(model).name for model in (node.source, node.target))
        parents = [*self._numbers.parents(node.name), *loads]
        table = self._move(node.name, source, target, parents, forwarding=False)
        if not isinstance(table.seconds, Table):
            return replace(table, seconds=[seconds / node.every_steps for seconds in table.seconds])
        table.seconds.divide(node.every_steps)
        return table

    def reallocation(self, call: ModelFunctionCallDef, home: str, loads: Parents) -> TransferTable:
        """From the model's home, or the copy that the call's comes from, when the call's parents have ended and `loads`
        have."""
        source = self._numbers.copies.get(call.name, home)
        name, parents = f"{call.model_name}: {source} -> {call.name}", [*self._numbers.parents(call.name), *loads]
        table = self._move(name, source, call.name, parents, takes_groups=self._numbers.groups)
        if not any(other.generates for other in self._task.graph.calls_of(call.model_name)):
            # A call in the layout of a sharded home gathers there what it uses (`option_rows`).
            seconds = cast(Seconds, table.seconds)  # as `_move` made it
            places = {layout: column for column, layout in enumerate(self._numbers.layouts[call.name][0])}
            for row, placement in enumerate(self._numbers.sources(source)[0]):
                if placement.divided > 1 and placement.layout in places:
                    seconds[row * table.num_columns + places[placement.layout]] = 0.0
        return table

    def _move(
        self,
        name: str,
        source: str,
        target: str,
        parents: Parents,
        *,
        forwarding: bool = True,
        takes_groups: bool = False,
    ) -> TransferTable:
        """Parameters go from the layout of call `source`, which is their home or has a copy, to that of call `target`.

        Devices that only send do so beside what they compute (`realhf.worker.move_thread`), unless the model waits in
        host memory: then they load it, send, and send it back.
        """
        task, calls = self._task, self._task.graph.model_calls
        (sources, rows), (targets, columns) = self._numbers.sources(source), self._numbers.layouts[target]
        move, seconds = self._numbers.move(target, forwarding=forwarding), cast(Seconds, [])
        if (source, target) in map(self._numbers.calls_of_move, self._numbers.broadcasts):
            seconds, takes_groups = [move.broadcasts_s(*self._numbers.ends(source, target))], False
        else:
            seconds = self._seconds_of(move, sources, targets)
        if target in self._numbers.changes and source == task.homes[target]:
            share = task.costs.changed_shares.get(calls[target].model_name, 1.0)
            least = move.comparing_s(*self._numbers.ends(source, target))
            seconds, takes_groups = [max(share * each, least) for each in cast(list[float], seconds)], False
        for place, grouped_s in grouped_reallocations(move, sources, targets) if takes_groups else ():
            seconds[place] = grouped_s
        return TransferTable(
            name=name,
            source=source,
            target=target,
            parents=parents,
            on=[source, target] if calls[source].model_name in task.offload else [target],
            rows=rows,
            columns=columns,
            num_columns=len(targets),
            seconds=seconds,
        )

    def _host_copy(self, load: Load, name: str, parents: Parents, *, is_free: bool = False) -> TransferTable:
        """Between the devices of a model's home and their host's memory, all at once; in no time if it `is_free`."""
        home = self._numbers.home_call(load.model)
        forms: dict[tuple[ParallelStrategy, CallCompute], int] = {}
        options = self._numbers.options[home.name]
        rows = [forms.setdefault((option.layout.strategy, option.compute), len(forms)) for option in options]
        bandwidth, model = self._task.costs.hardware.host_bandwidth, self._task.call_models[home.name]
        return TransferTable(
            name=name,
            source=home.name,
            target=home.name,
            parents=parents,
            on=[home.name],
            rows=rows,
            columns=[0] * len(rows),
            num_columns=1,
            seconds=[
                0.0 if is_free else home.offloaded_bytes(trained=load.states, versions=model.versions) / bandwidth
                for home in (model.under(compute).placed(strategy) for strategy, compute in forms)
            ],
        )

    def _changes(self, load: Load) -> bool:
        """Whether the model has other values behind the node than before, or others of its versions at hand."""
        graph = self._task.graph
        follow = graph.follows.get(load.node)
        if graph.versions_kept(load.model) > 1:
            return True
        return graph.model_calls[load.node].trains if follow is None else follow.target == load.model


def beside_table(numbers: Numbering, call: ModelFunctionCallDef) -> TransferTable:
    """A call beside the devices: it occupies none of them, and takes its time for the samples of one part
    (`realhf.dataflow.plan.beside_plan`)."""
    task, place = numbers.task, numbers.task.graph.place_of(call.name)
    sizes, rows = distinct(numbers.layouts[place], lambda layout: layout.mesh.size)
    factor = task.costs.call_factors.get(call.name, 1.0)
    return TransferTable(
        name=call.name,
        source=place,
        target=place,
        on=[],
        parents=numbers.parents(call.name),
        rows=rows,
        columns=[0] * len(rows),
        num_columns=1,
        seconds=[factor * beside_s(call.interface_impl, task.batch_size, size) for size in sizes],
    )


def data_transfer(numbers: Numbering, call: ModelFunctionCallDef, parent: str, keys: Sequence[str]) -> TransferTable:
    """Of the meshes only single devices and single nodes matter, of the strategy the parts: the table is small.

    What a call that runs ahead of training (stale rollouts) has made leaves while it makes the next: had the
    transfer to wait for the source's devices, it would stand behind all steps that were ready before it. The same is
    true of what a call beside the devices has made.
    """
    task, source = numbers.task, numbers.task.graph.place_of(parent)
    maker = task.graph.model_calls.get(parent)
    wide_bytes = maker.wide_bytes(keys) if maker else 0
    runs_ahead = any(edge.kind == "version" and edge.steps_back > 1 for edge in task.graph.parents(parent))
    sources, rows = distinct(numbers.layouts[source], partial(_place, task.cluster))
    targets, columns = distinct(numbers.layouts[call.name], lambda at: (_place(task.cluster, at), call.parts(at)))
    return TransferTable(
        name=f"data: {parent} -> {call.name}",
        source=source,
        target=call.name,
        parents=[(parent, 0)],
        on=[call.name] if runs_ahead or source != parent else [parent, call.name],
        rows=rows,
        columns=columns,
        num_columns=len(targets),
        seconds=_seconds(task.call_models[call.name], len(keys), wide_bytes, sources, targets),
    )


def _seconds(
    model: CallModel, keys: int, wide_bytes: int, sources: Sequence[_Place], targets: Sequence[tuple[_Place, int]]
) -> "array[float]":
    """Row-major. A row is that of meshes on different nodes, but for the few targets on the source's own node."""
    across, within = (
        {parts: model.transfer_s(keys, parts, wide_bytes, crosses_nodes=crosses) for parts in {p for _, p in targets}}
        for crosses in (True, False)
    )
    between_nodes = array("d", [across[parts] for _, parts in targets])
    on_node: dict[int | None, list[int]] = {}  # numbers of targets
    for number, ((_, node), _) in enumerate(targets):
        on_node.setdefault(node, []).append(number)
    table = array("d")
    for device, node in sources:
        row = between_nodes[:]
        for number in on_node.get(node, []) if node is not None else []:
            (target_device, _), parts = targets[number]
            # One and the same device has the data already.
            row[number] = 0.0 if device is not None and device == target_device else within[parts]
        table += row
    return table


def _place(cluster: Cluster, layout: Layout) -> _Place:
    mesh = layout.mesh
    first, last = cluster.node_of(mesh.first), cluster.node_of(mesh.devices[-1])
    return mesh.first if mesh.size == 1 else None, first if first == last else None
