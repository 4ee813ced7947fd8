"""The options of a call: mesh x (dp, tp, pp) x chunks x number of micro-batches x how it computes."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product

import msgspec
from msgspec.structs import replace

from realhf.architecture.model import DecoderConfig
from realhf.base.errors import UserError
from realhf.dataflow.graph import ModelFunctionCallDef
from realhf.dataflow.plan import AS_SET_UP, CallCompute, CallPlan
from realhf.dataflow.pools import Pool
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy, check_strategy, divisors
from realhf.planning.mixes import Way, has_modes, mixed_ways
from realhf.planning.model.cluster import Cluster, device_meshes
from realhf.planning.recomputed import partly_recomputed
from realhf.planning.task import PlanningTask

CHUNKS = (2, 4)  # chunks of pipelines that a search looks at

# Which of the ways to run a call, all in one (dp, tp, pp), are worth a search.
Keeps = Callable[[ModelFunctionCallDef, list[Way]], list[Way]]


class Option(msgspec.Struct, frozen=True, order=True, cache_hash=True):
    """One way to run a call."""

    layout: Layout
    micro_batches: int
    compute: CallCompute = AS_SET_UP

    @property
    def shape(self) -> tuple[ParallelStrategy, int]:
        """With `compute` what seconds and bytes depend on, wherever the mesh lies (`realhf.planning.model.call`)."""
        return self.layout.strategy, self.micro_batches

    def call_plan(self, predicted_s: float | None = None) -> CallPlan:
        strategy, mesh = self.layout.strategy, self.layout.mesh
        return CallPlan(
            devices=(mesh.first, mesh.size),
            dp=strategy.dp,
            tp=strategy.tp,
            pp=strategy.pp,
            chunks=strategy.chunks,
            micro_dp=strategy.micro_dp,
            micro_batches=self.micro_batches,
            compute=self.compute,
            predicted_s=predicted_s,
        )


def option_of(call: CallPlan) -> Option:
    """The option that a plan took for a call."""
    return Option(call.layout, call.micro_batches, call.compute)


def legal_strategies(model: DecoderConfig, num_devices: int) -> list[ParallelStrategy]:
    """All (dp, tp, pp) whose product is `num_devices` and by which the model can be divided; none with chunks."""
    strategies = []
    for tp in divisors(num_devices):
        for pp in divisors(num_devices // tp):
            strategy = ParallelStrategy(num_devices // (tp * pp), tp, pp)
            with contextlib.suppress(UserError):
                check_strategy("", model, strategy)
                strategies.append(strategy)
    return strategies


def micro_batch_counts(strategy: ParallelStrategy, mini_batch: int) -> list[int]:
    """Powers of two, and pp times powers of two, such that dp x count divides the mini-batch."""
    if mini_batch % strategy.dp:
        return []
    powers = [2**power for power in range(mini_batch.bit_length())]
    counts = {*powers, *(strategy.pp * power for power in powers)}
    return [count for count in divisors(mini_batch // strategy.dp) if count in counts]


def call_strategies(
    call: ModelFunctionCallDef, num_devices: int, mini_batch: int
) -> list[tuple[ParallelStrategy, list[int]]]:
    """The strategies that a call and its protocol allow on devices from 0 on, and for each the numbers of its
    micro-batches: one for a call that does not use its model."""
    found = []
    for strategy in legal_strategies(call.config, num_devices):
        layout = Layout(DeviceMesh(0, num_devices), strategy)
        try:
            call.check_protocol(layout)
        except UserError:
            continue
        if call.uses_model:
            counts = micro_batch_counts(strategy, mini_batch)
        else:
            counts = [] if mini_batch % call.parts(layout) else [1]
        if counts:
            found.append((strategy, counts))
    return found


def options_on(meshes: Iterable[DeviceMesh], call: ModelFunctionCallDef, mini_batch: int) -> list[Option]:
    """All legal options of a call on these meshes, for mini-batches of `mini_batch` samples: those without chunks, and
    computed as the model is set up."""
    by_size: dict[int, list[tuple[ParallelStrategy, list[int]]]] = {}
    options = []
    for mesh in meshes:
        if mesh.size not in by_size:
            by_size[mesh.size] = call_strategies(call, mesh.size, mini_batch)
        for strategy, counts in by_size[mesh.size]:
            layout = Layout(mesh, strategy)
            options += [Option(layout, count) for count in counts]
    return options


def pool_meshes(cluster: Cluster, pool: Pool | None) -> list[DeviceMesh]:
    """The meshes of a cluster, the smallest first; of a pool those within it, and its runs of neighbours within a node.
    None: all of the cluster."""
    meshes = device_meshes(cluster)
    if pool is None:
        return meshes
    inside = [mesh for mesh in meshes if mesh in pool]
    runs = [run for run in pool.runs if not cluster.crosses_nodes((run.first, run.devices[-1])) and run not in inside]
    return sorted([*inside, *runs], key=lambda mesh: (mesh.size, mesh.first))


def options_to_search(task: PlanningTask, name: str, keeps: Keeps | None = None) -> list[Option]:
    """All that a search may choose for a call, also chunks and how it computes, on every mesh of the cluster, or of the
    pool of its model; of the ways to run it in one strategy those that `keeps` keeps.

    Raises:
        UserError: its mini-batches do not divide the batch, or none is legal within the pool.
    """
    call = task.graph.model_calls[name]
    by_size: dict[int, list[list[Way]]] = {}
    options = []
    for _, mesh, found in _of_meshes(task, name):
        if mesh.size not in by_size:
            each = [_ways(task, call, *strategies) for strategies in found]
            by_size[mesh.size] = [keeps(call, ways) for ways in each] if keeps else each
        for ways in by_size[mesh.size]:
            layouts = {strategy: Layout(mesh, strategy) for strategy, _, _ in ways}
            options += [Option(layouts[strategy], count, compute) for strategy, count, compute in ways]
    pool = task.graph.pools.get(call.model_name)
    if pool and not any(by_size.values()):
        raise UserError(
            f"{call.name}: no (dp, tp, pp) within {pool}, to which model {call.model_name!r} is confined, is legal "
            f"with mini-batches of {call.mini_batch_size(task.batch_size)} samples; give the pool other devices, or "
            "change the batch size"
        )
    return options


def _ways(task: PlanningTask, call: ModelFunctionCallDef, plain: ParallelStrategy, counts: list[int]) -> list[Way]:
    """Those whose operators have modes of their own come last."""
    ways = list(product(_in_chunks(task, call, plain), counts, ways_to_compute(task, call, plain)))
    ways = [*ways, *partly_recomputed(task, call, ways)]
    return [*ways, *mixed_ways(task, call, ways)]


def _in_chunks(task: PlanningTask, call: ModelFunctionCallDef, plain: ParallelStrategy) -> list[ParallelStrategy]:
    """The strategy without chunks, and those with chunks that are searched."""
    return [plain, *interleaved(call, plain)] if task.searched == "all" else [plain]


def num_layouts(task: PlanningTask, name: str) -> int:
    """How many layouts of a call a search chooses among, of any number of micro-batches."""
    return sum(
        len(_in_chunks(task, call, strategy)) for call, _, found in _of_meshes(task, name) for strategy, _ in found
    )


def num_ways(task: PlanningTask) -> int:
    """How many ways to run its calls a search looks at, wherever their meshes lie; twice those of trainings for whose
    operators it chooses modes, which takes as long."""
    number = 0
    for name in task.graph.model_calls:
        of_sizes = {mesh.size: (call, found) for call, mesh, found in _of_meshes(task, name)}
        number += (1 + has_modes(task, task.graph.model_calls[name])) * sum(
            len(_in_chunks(task, call, strategy)) * len(counts) * len(ways_to_compute(task, call, strategy))
            for call, found in of_sizes.values()
            for strategy, counts in found
        )
    return number


def _of_meshes(
    task: PlanningTask, name: str
) -> Iterator[tuple[ModelFunctionCallDef, DeviceMesh, list[tuple[ParallelStrategy, list[int]]]]]:
    """A call on every mesh that it may have in a search: its strategies without chunks, with numbers of
    micro-batches."""
    call = task.graph.model_calls[name]
    pool, mini_batch = task.graph.pools.get(call.model_name), call.mini_batch_size(task.batch_size)
    by_size: dict[int, list[tuple[ParallelStrategy, list[int]]]] = {}
    near = [mesh for mesh in task.near if pool is None or mesh in pool]
    for mesh in near or pool_meshes(task.cluster, pool):
        if mesh.size not in by_size:
            by_size[mesh.size] = call_strategies(call, mesh.size, mini_batch)
        yield call, mesh, by_size[mesh.size]


def interleaved(call: ModelFunctionCallDef, strategy: ParallelStrategy) -> list[ParallelStrategy]:
    """A pipeline of a call that passes through its model once or trains it, in chunks; none of other calls."""
    if call.generates or not call.uses_model or strategy.pp == 1:
        return []
    found = [replace(strategy, chunks=chunks) for chunks in CHUNKS]
    return [each for each in found if each.pp * each.chunks <= call.config.num_layers]


def ways_to_compute(task: PlanningTask, call: ModelFunctionCallDef, strategy: ParallelStrategy) -> list[CallCompute]:
    """All that a plan may say of a call's computation, and that makes a difference in this strategy. Of what the setup
    has anyway nothing is said; so the first says nothing.

    Several trainings of one model compute as their model is set up: a plan would have to say the same of all.
    """
    if task.searched == "plain":
        return [AS_SET_UP]
    model, values = task.call_models[call.name], dict[str, tuple[str | bool, ...]]()
    features = model.features
    is_only_training = sum(other.trains for other in task.graph.calls_of(call.model_name)) == 1
    if call.trains and is_only_training:
        values["recomputation"] = ("off", "selective", "full")
        if strategy.tp > 1:
            values["sequence_parallel"] = (False, True)
        if not features.in_host_memory and task.searched == "all":
            values["offload_states"] = (False, True)
    is_home = task.homes[call.name] == call.name
    if strategy.dp > 1 and is_home and not call.generates and (is_only_training or not call.trains):
        values["data_parallel"] = ("zero1", "fsdp")
    if call.generates and features.replays(call.config, "call") and _leaves_graphs_open(call):
        values["decode_graphs"] = ("kept", "call")
    set_up = {
        "recomputation": features.recomputation,
        "sequence_parallel": features.sequence_parallel,
        "data_parallel": "fsdp" if features.fully_sharded else "zero1",
        "offload_states": features.offloads_states,
        "decode_graphs": model.lengths.decode_graphs,
    }
    open_fields = [field for field in (*task.open_choices.get(call.model_name, ()), "decode_graphs") if field in values]
    said = [[None, *(value for value in values[field] if value != set_up[field])] for field in open_fields]
    return [msgspec.convert(dict(zip(open_fields, each, strict=True)), CallCompute) for each in product(*said)]


def _leaves_graphs_open(call: ModelFunctionCallDef) -> bool:
    """Whether the experiment lets the plan choose how long graphs of decode steps live."""
    return hasattr(call.interface_impl, "decode_graphs") and call.interface_impl.decode_graphs is None


def chosen(options: Mapping[str, Sequence[Option]], choice: Sequence[int]) -> dict[str, CallPlan]:
    """The calls of a plan, from the number of an option for each."""
    return {name: rows[index].call_plan() for (name, rows), index in zip(options.items(), choice, strict=True)}
