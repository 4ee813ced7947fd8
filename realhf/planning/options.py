"""The options of a call: mesh x (dp, tp, pp) x chunks x number of micro-batches x how it computes."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from itertools import product

import msgspec
from msgspec.structs import asdict, replace

from realhf.architecture.model import DecoderConfig
from realhf.base.errors import UserError
from realhf.dataflow.graph import ModelFunctionCallDef
from realhf.dataflow.plan import AS_SET_UP, CallCompute, CallPlan
from realhf.dataflow.pools import Pool
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy, check_strategy, divisors
from realhf.geometry.reproducible import gradient_parts, unordered, unordered_training
from realhf.planning.model.cluster import Cluster, device_meshes
from realhf.planning.task import PlanningTask
from realhf.planning.ways import Way, has_modes, mixed_ways, partly_recomputed, smaller_caches

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
        mesh = self.layout.mesh
        return CallPlan(
            devices=(mesh.first, mesh.size),
            **asdict(self.layout.strategy),
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
    parts = gradient_parts(mini_batch)
    for strategy in legal_strategies(call.config, num_devices):
        layout = Layout(DeviceMesh(0, num_devices), strategy)
        if call.reproducible and call.uses_model and unordered(call.config, strategy):
            continue
        try:
            call.check_protocol(layout)
        except UserError:
            continue
        if call.uses_model:
            counts = micro_batch_counts(strategy, mini_batch)
        else:
            counts = [] if mini_batch % call.parts(layout) else [1]
        if call.reproducible and call.trains:
            counts = [count for count in counts if not unordered_training(strategy.dp, count, parts)]
        if counts:
            found.append((strategy, counts))
    return found


def _by_size(
    meshes: Sequence[DeviceMesh], call: ModelFunctionCallDef, mini_batch: int
) -> dict[int, list[tuple[ParallelStrategy, list[int]]]]:
    """By the size of a mesh the `call_strategies`: where it lies changes nothing."""
    return {size: call_strategies(call, size, mini_batch) for size in dict.fromkeys(mesh.size for mesh in meshes)}


def options_on(meshes: Sequence[DeviceMesh], call: ModelFunctionCallDef, mini_batch: int) -> list[Option]:
    """All legal options of a call on these meshes, for mini-batches of `mini_batch` samples: those without chunks, and
    computed as the model is set up."""
    by_size, options = _by_size(meshes, call, mini_batch), list[Option]()
    for mesh in meshes:
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
    call, meshes = task.graph.model_calls[name], _meshes(task, name)
    by_size: dict[int, list[list[Way]]] = {}
    for size, found in _by_size(meshes, call, call.mini_batch_size(task.batch_size)).items():
        each = [_ways(task, call, *strategies) for strategies in found]
        by_size[size] = [keeps(call, ways) for ways in each] if keeps else each
    options = []
    for mesh in meshes:
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
    ways = [*ways, *partly_recomputed(task, call, ways), *smaller_caches(task, call, ways)]
    return [*ways, *mixed_ways(task, call, ways)]


def _in_chunks(task: PlanningTask, call: ModelFunctionCallDef, plain: ParallelStrategy) -> list[ParallelStrategy]:
    """The strategy without chunks, and those with chunks that are searched."""
    return [plain, *interleaved(call, plain)] if task.searched == "all" else [plain]


def num_layouts(task: PlanningTask, name: str) -> int:
    """How many layouts of a call a search chooses among, of any number of micro-batches."""
    call, meshes = task.graph.model_calls[name], _meshes(task, name)
    by_size = _by_size(meshes, call, call.mini_batch_size(task.batch_size))
    return sum(len(_in_chunks(task, call, strategy)) for mesh in meshes for strategy, _ in by_size[mesh.size])


def num_ways(task: PlanningTask) -> int:
    """How many ways to run its calls a search looks at, wherever their meshes lie; twice those of trainings for whose
    operators it chooses modes, which takes as long."""
    number = 0
    for name, call in task.graph.model_calls.items():
        by_size = _by_size(_meshes(task, name), call, call.mini_batch_size(task.batch_size))
        number += (1 + has_modes(task, call)) * sum(
            len(_in_chunks(task, call, strategy)) * len(counts) * len(ways_to_compute(task, call, strategy))
            for found in by_size.values()
            for strategy, counts in found
        )
    return number


def _meshes(task: PlanningTask, name: str) -> list[DeviceMesh]:
    """The meshes that a call may have in a search."""
    pool = task.graph.pools.get(task.graph.model_calls[name].model_name)
    near = [mesh for mesh in task.near if pool is None or mesh in pool]
    return near or pool_meshes(task.cluster, pool)


def interleaved(call: ModelFunctionCallDef, strategy: ParallelStrategy) -> list[ParallelStrategy]:
    """A pipeline of a call that passes through its model once or trains it, in chunks; none of other calls."""
    if call.generates or not call.uses_model or strategy.pp == 1 or call.reproducible:
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
    # Where the experiment says how long graphs of decode steps live, a plan may not.
    is_open = getattr(call.interface_impl, "decode_graphs", "call") is None
    if call.generates and is_open and features.replays(call.config, "call"):
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


def chosen(options: Mapping[str, Sequence[Option]], choice: Sequence[int]) -> dict[str, CallPlan]:
    """The calls of a plan, from the number of an option for each."""
    return {name: rows[index].call_plan() for (name, rows), index in zip(options.items(), choice, strict=True)}
