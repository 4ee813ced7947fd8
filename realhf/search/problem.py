"""From a dataflow graph, options and costs to the tables of a planning problem."""

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Protocol, TypeVar

from msgspec.structs import replace

from realhf.api.follow import FollowNode
from realhf.api.graph import DataflowGraph, ModelFunctionCallDef
from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.api.model import DecoderConfig, DType
from realhf.api.offload import Load, loads_of
from realhf.api.plan import ExecutionPlan
from realhf.realloc.planner import DEFAULT_BUCKET_BYTES
from realhf.search.cluster import Cluster
from realhf.search.cost import CallCost, reallocation_table, transfer_s
from realhf.search.grouping import grouped, grouped_reallocations, spared_bytes
from realhf.search.hardware import DTYPE_BYTES, Hardware
from realhf.search.memory import copy_bytes, dynamic_bytes, offloaded_bytes, static_bytes
from realhf.search.offloading import offload_tables
from realhf.search.options import Option
from realhf.search.tables import CallTable, OptionRow, ParentRow, Problem, TransferTable
from realhf.search.timings import Costs
from realhf.search.workload import Workload

STEPS = 4  # unrolled steps: the objective is their makespan / STEPS, so that overlap across steps counts
MANY_STEPS = 16  # where more than two steps overlap: filling and draining such a pipeline must not outweigh its overlap


class ReallocationTable(Protocol):
    """Seconds of the reallocations of sources x targets, row-major (`realhf.search.cost.reallocation_s`)."""

    def __call__(
        self,
        model: DecoderConfig,
        sources: Sequence[Layout],
        targets: Sequence[Layout],
        *,
        item: int,
        cluster: Cluster,
        hardware: Hardware,
    ) -> Sequence[float]: ...


def steps_unrolled(max_steps_in_flight: int) -> int:
    """How many steps are simulated, by how many of them may overlap."""
    return STEPS if max_steps_in_flight <= 2 else MANY_STEPS


def homes(graph: DataflowGraph) -> dict[str, str]:
    """For every call, the call in whose layout its model's parameters live (`ExecutionPlan.home`)."""
    empty = ExecutionPlan(num_devices=1, calls={})
    return {name: empty.home(graph, call.model_name) for name, call in graph.calls.items()}


def build_problem(
    graph: DataflowGraph,
    options: Mapping[str, Sequence[Option]],
    *,
    batch_size: int,
    workload: Workload,
    cluster: Cluster,
    costs: Costs,
    max_steps_in_flight: int,
    dtype: DType,
    reallocations: ReallocationTable = reallocation_table,
    offload: Sequence[str] = (),
    groups: bool = False,
) -> Problem:
    """The tables for a choice among `options` of every call.

    Nodes: the calls; a move of parameters for every model that follows another; a data transfer for
    every data edge; a reallocation for every call that is not its model's home. The latter two start
    when the call's parents have ended, and the call when its transfers have: the master issues them
    together, since the copy that a reallocation makes is freed after the call and must not occupy
    memory before.

    A model of `offload` waits in host memory: it is loaded for each of its calls, on the devices of its home,
    and sent back behind it. Both occupy these devices alone; its memory counts in its own calls.

    With `groups`, calls on the devices of their home count as grouped like it where they can be
    (`realhf.search.grouping`). A copy that contains the home's part counts without it; where the home has several
    layouts to choose from, bytes of an option cannot depend on which, and all of it counts.
    """
    builder = _Builder(graph, options, batch_size, workload, cluster, costs, dtype, reallocations, offload, groups)
    return Problem(
        num_devices=cluster.num_devices,
        device_memory_bytes=cluster.device_memory_bytes,
        steps=steps_unrolled(max_steps_in_flight),
        max_steps_in_flight=max_steps_in_flight,
        calls=[builder.call_table(call) for call in graph.calls.values()],
        transfers=builder.transfers,
    )


K = TypeVar("K")


class _Builder:
    def __init__(
        self,
        graph: DataflowGraph,
        options: Mapping[str, Sequence[Option]],
        batch_size: int,
        workload: Workload,
        cluster: Cluster,
        costs: Costs,
        dtype: DType,
        reallocations: ReallocationTable,
        offload: Sequence[str],
        groups: bool,
    ):
        self.graph, self.options, self.batch_size, self.workload = graph, options, batch_size, workload
        self.cluster, self.costs, self.dtype, self.reallocations = cluster, costs, dtype, reallocations
        self.groups = groups
        self.homes = homes(graph)
        self.number = {name: i for i, name in enumerate(graph.nodes)}  # the first transfers are the graph's own nodes
        self.layouts = {name: _layouts(options[name]) for name in graph.calls}
        self.offload = frozenset(offload)
        loads = loads_of(graph, offload).values()
        offloading, self.waits = offload_tables(graph, loads, self.number, self._host_copy)  # of a node, for transfers
        self.transfers = [*(self._follow(node) for node in graph.follows.values()), *offloading]
        for call in graph.calls.values():
            self._add_transfers(call)

    def call_table(self, call: ModelFunctionCallDef) -> CallTable:
        """Waits for its version edges and its transfers; a data edge is a transfer's business."""
        parents = [(self.number[e.parent], e.steps_back) for e in self.graph.parents(call.name) if e.kind != "data"]
        home = self.number[self.homes[call.name]]
        return CallTable(
            name=call.name,
            home=home,
            parents=[*parents, *self.waits[call.name]],
            options=self._option_rows(call),
            spared=list(self._spared(call)),
        )

    def _option_rows(self, call: ModelFunctionCallDef) -> list[OptionRow]:
        """Where the mesh lies changes nothing: what is known of a strategy holds for all meshes of its size."""
        is_home = self.homes[call.name] == call.name
        cost = CallCost(
            call=call, batch_size=self.batch_size, workload=self.workload, cluster=self.cluster, costs=self.costs,
            dtype=self.dtype, shares_devices=len(self.graph.calls) > 1,
        )  # fmt: skip
        known: dict[ParallelStrategy, _StrategyRow] = {}
        layouts, numbers = self.layouts[call.name]
        by_layout = []
        for layout in layouts:
            if layout.strategy not in known:
                known[layout.strategy] = self._strategy_row(call, layout.strategy, is_home)
            by_layout.append(((layout.mesh.first, layout.mesh.size), known[layout.strategy]))
        waits = call.model_name in self.offload
        home_bytes = 0.0 if is_home or not waits else self._loaded_bytes(call)
        rows = []
        for option, number in zip(self.options[call.name], numbers, strict=True):
            devices, row = by_layout[number]
            if option.micro_batches not in row.by_micro_batches:
                row.by_micro_batches[option.micro_batches] = self._needs(call, option, row, cost)
            needs = row.by_micro_batches[option.micro_batches]
            rows.append(
                OptionRow(
                    devices=devices,
                    strategy=needs.label,
                    micro_batches=option.micro_batches,
                    time_s=needs.time_s,
                    static_bytes=0.0 if waits else needs.static_bytes,
                    dynamic_bytes=needs.dynamic_bytes + (needs.static_bytes + home_bytes if waits else 0.0),
                    copy_bytes=row.copy_bytes,
                )
            )
        return rows

    def _needs(self, call: ModelFunctionCallDef, option: Option, row: "_StrategyRow", cost: CallCost) -> "_Needs":
        strategy, micro_batches = option.layout.strategy, option.micro_batches
        seconds = cost.seconds(strategy, micro_batches)
        features = self.costs.features_of(call.model_name)
        dynamic = dynamic_bytes(call, option, self.batch_size, self.workload, self.dtype, features)
        sharding = cost.sharding(strategy, micro_batches) if self.homes[call.name] == call.name else None
        if sharding is None:
            # A home that keeps shards has them gathered for a generation: as much memory as a copy takes.
            label = self._home_label(call, strategy) if self.homes[call.name] == call.name else row.label
            return _Needs(label, seconds, row.static_bytes, dynamic)
        # No call finds whole parameters in such a home: a label of its own makes each take a copy, and the time to
        # gather what it is made of is added here, once a copy.
        copies = len(self.graph.calls_of(call.model_name)) - 1
        seconds += copies * sharding.regather_s
        label = f"{row.label} sharded"
        return _Needs(label, seconds, float(sharding.static_bytes), dynamic + sharding.gather_bytes)

    def _home_label(self, call: ModelFunctionCallDef, strategy: ParallelStrategy) -> str:
        is_sharded = self.costs.features_of(call.model_name).fully_sharded and strategy.dp > 1
        return f"{strategy} sharded" if is_sharded else str(strategy)

    def _spared(self, call: ModelFunctionCallDef) -> Iterator[tuple[str, str, float]]:
        """See `CallTable.spared`: the home's parameters, and the two buckets that fill the copy.

        None where the home is loaded for each call, or keeps shards of its own choice, which has another label.
        """
        home, features = self.graph.calls[self.homes[call.name]], self.costs.features_of(call.model_name)
        if home is call or call.trains or call.model_name in self.offload:
            return
        homes, copies = ({layout.strategy: None for layout in self.layouts[name][0]} for name in (home.name, call.name))
        for kept, copied in product(homes, copies):
            if kept.size != copied.size or kept == copied:
                continue
            source, target = (
                Layout(DeviceMesh(0, kept.size), degrees) for degrees in (kept, copied)
            )  # wherever they lie
            groups = grouped(source, target, call.config.num_layers, self.cluster) if self.groups else None
            spared = spared_bytes(call.config, source, groups or target, self.dtype, features)
            if spared:
                yield self._home_label(home, kept), str(copied), float(spared + 2 * DEFAULT_BUCKET_BYTES)

    def _strategy_row(self, call: ModelFunctionCallDef, strategy: ParallelStrategy, is_home: bool) -> "_StrategyRow":
        if is_home:
            static = self._at_home(static_bytes, call, strategy, trained=call.trains)
            return _StrategyRow(str(strategy), float(static), 0.0)
        if call.trains:
            # The optimizer's states stay at home, so that every training of a model has one layout.
            return _StrategyRow(str(strategy), 0.0, 2.0 * self.cluster.device_memory_bytes)
        return _StrategyRow(str(strategy), 0.0, float(copy_bytes(call.config, strategy, self.dtype)))

    def _home_call(self, model: str) -> ModelFunctionCallDef:
        return self.graph.calls[self.homes[self.graph.calls_of(model)[0].name]]

    def _loaded_bytes(self, call: ModelFunctionCallDef) -> float:
        """The most that is loaded at home for a call that is not the home, under the homes that fit into memory."""
        home = self._home_call(call.model_name)
        strategies = {layout.strategy for layout in self.layouts[home.name][0]}
        limit = self.cluster.device_memory_bytes
        fitting = [s for s in strategies if self._strategy_row(home, s, is_home=True).static_bytes <= limit]
        sizes = (self._at_home(static_bytes, home, strategy, trained=call.trains) for strategy in fitting or strategies)
        return float(max(sizes))

    def _at_home(
        self, bytes_of: Callable[..., int], call: ModelFunctionCallDef, strategy: ParallelStrategy, *, trained: bool
    ) -> int:
        """`static_bytes` or `offloaded_bytes` of the home of the call's model."""
        model = call.model_name
        features, versions = self.costs.features_of(model), self.graph.versions_kept(model)
        return bytes_of(call.config, strategy, self.dtype, trained=trained, features=features, versions=versions)

    def _add_transfers(self, call: ModelFunctionCallDef) -> None:
        edges, loads = self.graph.parents(call.name), list(self.waits[call.name])
        for edge in edges:
            if edge.kind == "data":
                self._add(self._data_transfer(call, edge.parent, len(edge.keys)), call.name)
        home = self.homes[call.name]
        if home != call.name:
            parents = [(self.number[edge.parent], edge.steps_back) for edge in edges]
            self._add(self._reallocation(call, home, [*parents, *loads]), call.name)

    def _add(self, transfer: TransferTable, call: str) -> None:
        """Appends a transfer that `call` waits for."""
        self.waits[call].append((len(self.graph.calls) + len(self.transfers), 0))
        self.transfers.append(transfer)

    def _host_copy(self, load: Load) -> TransferTable:
        """Between the devices of a model's home and their host's memory, all at once."""
        home = self._home_call(load.model)
        layouts, rows = self.layouts[home.name]
        bandwidth = self.costs.hardware.host_bandwidth
        sizes = [self._at_home(offloaded_bytes, home, layout.strategy, trained=load.states) for layout in layouts]
        return TransferTable(
            name="",
            source=self.number[home.name],
            target=self.number[home.name],
            parents=[],
            occupies="source",
            rows=rows,
            columns=[0] * len(rows),
            num_columns=1,
            seconds=[size_bytes / bandwidth for size_bytes in sizes],
        )

    def _follow(self, node: FollowNode) -> TransferTable:
        """From home to home, as a reallocation; what happens every N steps takes 1 / N of it in each.

        Nothing is forwarded on the way to an average, so that a source of fewer devices than the target has replicas
        takes longer than this.
        """
        source, target = (self.homes[self.graph.calls_of(model)[0].name] for model in (node.source, node.target))
        parents = [(self.number[edge.parent], edge.steps_back) for edge in self.graph.parents(node.name)]
        parents += self.waits[node.name]
        table = self._parameter_move(node.name, source, target, parents)
        if node.every_steps == 1:
            return table
        return replace(table, seconds=array("d", [seconds / node.every_steps for seconds in table.seconds]))

    def _reallocation(self, call: ModelFunctionCallDef, home: str, parents: list[ParentRow]) -> TransferTable:
        table = self._parameter_move(f"{call.model_name}: {home} -> {call.name}", home, call.name, parents)
        if not self.groups:
            return table
        seconds = grouped_reallocations(
            table.seconds, call.config, self.layouts[home][0], self.layouts[call.name][0],
            item=DTYPE_BYTES[self.dtype], cluster=self.cluster, hardware=self.costs.of(call.config).links,
        )  # fmt: skip
        return replace(table, seconds=seconds)

    def _parameter_move(self, name: str, source: str, target: str, parents: list[ParentRow]) -> TransferTable:
        """Parameters go from the layout of call `source` to that of call `target`.

        Devices that only send do so beside what they compute (`realhf.worker.move_lane`), unless the model waits in
        host memory: then they load it, send, and send it back.
        """
        (sources, rows), (targets, columns) = self.layouts[source], self.layouts[target]
        model = self.graph.calls[target].config
        is_loaded = self.graph.calls[source].model_name in self.offload
        return TransferTable(
            name=name,
            source=self.number[source],
            target=self.number[target],
            parents=parents,
            occupies="both" if is_loaded else "target",
            rows=rows,
            columns=columns,
            num_columns=len(targets),
            seconds=self.reallocations(
                model,
                sources,
                targets,
                item=DTYPE_BYTES[self.dtype],
                cluster=self.cluster,
                hardware=self.costs.of(model).links,
            ),
        )

    def _data_transfer(self, call: ModelFunctionCallDef, parent: str, keys: int) -> TransferTable:
        """Of the meshes only single devices and single nodes matter, of the strategy dp: the table is small.

        What a call that runs ahead of training (stale rollouts) has made leaves while it makes the next: had the
        transfer to wait for the source's devices, it would stand behind all steps that were ready before it.
        """
        runs_ahead = any(edge.kind == "version" and edge.steps_back > 1 for edge in self.graph.parents(parent))
        sources, rows = _distinct(self.layouts[parent], self._place)
        targets, columns = _distinct(self.layouts[call.name], lambda layout: (self._place(layout), layout.strategy.dp))
        return TransferTable(
            name=f"data: {parent} -> {call.name}",
            source=self.number[parent],
            target=self.number[call.name],
            parents=[(self.number[parent], 0)],
            occupies="target" if runs_ahead else "both",
            rows=rows,
            columns=columns,
            num_columns=len(targets),
            seconds=self._transfer_seconds(call, keys, sources, targets),
        )

    def _transfer_seconds(
        self,
        call: ModelFunctionCallDef,
        keys: int,
        sources: Sequence["_Place"],
        targets: Sequence[tuple["_Place", int]],
    ) -> "array[float]":
        """Row-major. A row is that of meshes on different nodes, but for the few targets on the source's own node."""

        def seconds(dp: int, crosses_nodes: bool) -> float:
            return transfer_s(
                keys, call, dp, crosses_nodes=crosses_nodes, batch_size=self.batch_size, workload=self.workload,
                hardware=self.costs.hardware,
            )  # fmt: skip

        degrees = {dp for _, dp in targets}
        across, within = ({dp: seconds(dp, crosses) for dp in degrees} for crosses in (True, False))
        between_nodes = array("d", [across[dp] for _, dp in targets])
        on_node: dict[int | None, list[int]] = {}  # numbers of targets
        for number, ((_, node), _) in enumerate(targets):
            on_node.setdefault(node, []).append(number)
        table = array("d")
        for device, node in sources:
            row = between_nodes[:]
            for number in on_node.get(node, []) if node is not None else []:
                (target_device, _), dp = targets[number]
                # One and the same device has the data already.
                row[number] = 0.0 if device is not None and device == target_device else within[dp]
            table += row
        return table

    def _place(self, layout: Layout) -> "_Place":
        mesh = layout.mesh
        first, last = self.cluster.node_of(mesh.first), self.cluster.node_of(mesh.first + mesh.size - 1)
        return mesh.first if mesh.size == 1 else None, first if first == last else None


_Place = tuple[int | None, int | None]  # the device if the mesh is one, the node that it lies in if it is within one
_Numbered = tuple[list[Layout], list[int]]  # distinct layouts, and for every option the number of its own


@dataclass(frozen=True)
class _Needs:
    """What is known of a strategy with a number of micro-batches."""

    label: str
    time_s: float
    static_bytes: float
    dynamic_bytes: float


@dataclass(frozen=True)
class _StrategyRow:
    label: str
    static_bytes: float
    copy_bytes: float
    by_micro_batches: dict[int, _Needs] = field(default_factory=dict)


def _layouts(options: Sequence[Option]) -> _Numbered:
    """Options of one layout usually follow one another, and share it: few have to be compared."""
    numbers: dict[Layout, int] = {}
    places: list[int] = []
    last: Layout | None = None
    for option in options:
        if option.layout is not last:
            last = option.layout
            number = numbers.setdefault(last, len(numbers))
        places.append(number)
    return list(numbers), places


def _distinct(numbered: _Numbered, key: Callable[[Layout], K]) -> tuple[list[K], list[int]]:
    """The distinct keys of the layouts, and for every option the number of its own."""
    layouts, places = numbered
    numbers: dict[K, int] = {}
    of_layout = [numbers.setdefault(key(layout), len(numbers)) for layout in layouts]
    return list(numbers), [of_layout[place] for place in places]
