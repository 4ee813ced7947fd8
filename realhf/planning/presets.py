"""Plans by rule, to compare a searched plan with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from realhf.base.errors import UserError
from realhf.dataflow.graph import GENERATE, DataflowGraph, ModelFunctionCallDef
from realhf.dataflow.plan import ExecutionPlan
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.planning.cluster import Cluster
from realhf.planning.mapping import Mapper
from realhf.planning.model.communicators import axes_used, group_key, of_all_devices
from realhf.planning.model.cost import CallCost
from realhf.planning.model.memory import dynamic_bytes, kept_cache_bytes, static_bytes
from realhf.planning.options import Option, call_strategies, mini_batch_size
from realhf.planning.predict import Prediction, predict, predict_in_best_order
from realhf.planning.problem.builder import build_problem
from realhf.planning.problem.native import native_problem, search_problem
from realhf.planning.task import PlanningTask
from realhf.planning.watching import Watch, unwatched

GIB = 2**30
SEED, EVALUATIONS = 0, 20_000  # of the search for the best strategies within a preset's meshes


@dataclass(frozen=True, kw_only=True)
class PresetResult:
    """The plan of a preset with its prediction; `problem` says why it cannot run, and is empty if it can."""

    name: str
    prediction: Prediction | None
    problem: str = ""


def evaluate_presets(task: PlanningTask, watch: Watch = unwatched) -> list[PresetResult]:
    """All presets."""
    results = []
    for name in PRESETS:
        watch("plans by rule", name)
        results.append(evaluate_preset(name, task))
    fitting = [result for result in results if result.prediction and not result.problem]
    watch("plans by rule", f"{len(fitting)} of {len(results)} fit")
    return results


def evaluate_preset(name: str, task: PlanningTask) -> PresetResult:
    """A preset, predicted as the searched plan is, in its own best order."""
    try:
        prediction = predict_in_best_order(task, PRESETS[name](task))
    except UserError as error:
        return PresetResult(name=name, prediction=None, problem=str(error))
    if prediction.fits:
        return PresetResult(name=name, prediction=prediction)
    device, need = max(enumerate(prediction.device_bytes), key=lambda entry: entry[1])
    limit = task.cluster.device_memory_bytes
    problem = f"needs {need / GIB:.1f} GiB on device {device}, which has {limit / GIB:.1f} GiB"
    return PresetResult(name=name, prediction=prediction, problem=problem)


def colocate(task: PlanningTask) -> ExecutionPlan:
    """Every model on all devices, each call with the best strategy for itself."""
    everything = DeviceMesh(0, task.cluster.num_devices)
    return _best_on(task, dict.fromkeys(task.graph.models, everything), "colocate")


def split(task: PlanningTask) -> ExecutionPlan:
    """What generates, with untrained models of the same architecture, on one half; the other models on the other.

    With PPO: actor and reference on the first half, critic and reward on the second.

    Raises:
        UserError: the devices cannot be halved, or no model is left for the second half.
    """
    graph, num_devices = task.graph, task.cluster.num_devices
    generating = [call.model_name for call in graph.calls.values() if call.interface_type is GENERATE]
    leading = generating or list(graph.models)[:1]
    trained = {call.model_name for call in graph.calls.values() if call.trains}
    shapes = {graph.models[name] for name in leading}
    first = {
        name for name, shape in graph.models.items() if name in leading or (name not in trained and shape in shapes)
    }
    if len(first) == len(graph.models):
        raise UserError("split: all models belong to the side of generation; nothing is left for the other half")
    half = num_devices // 2
    per_node = task.cluster.devices_per_node
    whole = half % per_node == 0 if task.cluster.num_nodes > 1 else half & (half - 1) == 0
    if num_devices % 2 or not whole:
        raise UserError(
            f"split: {num_devices} devices cannot be halved into device meshes; take an even number of nodes"
        )
    sides = {name: DeviceMesh(0 if name in first else half, half) for name in graph.models}
    return _best_on(task, sides, "split")


def standalone(task: PlanningTask) -> ExecutionPlan:
    """Each model on devices of its own, in the numbers that HybridFlow's algorithm gives to singletons.

    Raises:
        UserError: there are fewer devices than models, or no allocation fits into memory.
    """
    singletons = tuple((name,) for name in task.graph.models)
    mapping = Mapper(task).best([singletons])
    meshes = {task.graph.calls[name].model_name: call.mesh for name, call in mapping.calls.items()}
    return _best_on(task, meshes, "standalone")


def hybridflow(task: PlanningTask) -> ExecutionPlan:
    """HybridFlow's mapping; see `realhf.planning.mapping`."""
    return task.plan(Mapper(task).best().calls, preset="hybridflow")


def _best_on(task: PlanningTask, meshes: Mapping[str, DeviceMesh], preset: str) -> ExecutionPlan:
    """The fastest strategies and micro-batches if every model has its mesh (the least memory if none fit)."""
    options: dict[str, list[Option]] = {}
    for call in task.graph.calls.values():
        mesh, mini_batch = meshes[call.model_name], mini_batch_size(call, task.batch_size)
        options[call.name] = [
            Option(Layout(mesh, strategy), count)
            for strategy, counts in call_strategies(call, mesh.size, mini_batch)
            for count in counts
        ]
        if not options[call.name]:
            raise UserError(
                f"{preset}: no (dp, tp, pp) on {mesh.size} devices is legal for {call.name} with mini-batches of "
                f"{mini_batch} samples; choose a batch size that the number of devices divides"
            )
    native = native_problem(build_problem(task, options))
    found = search_problem(native, seed=SEED, evaluations=EVALUATIONS, proves=False)
    choice = found.choice if found.feasible else native.smallest_plan(SEED)
    calls = {name: options[name][index].call_plan() for name, index in zip(task.graph.calls, choice, strict=True)}
    return task.plan(calls, preset=preset)


def heuristic(task: PlanningTask) -> ExecutionPlan:
    """All calls the same on all devices: tensor parallelism as far as it is legal within a node, data parallelism
    with the rest, pipeline stages only where dp would not divide a mini-batch or the models not fit into
    memory (after Megatron-LM's advice).

    Each call takes its fastest number of micro-batches that fits into memory beside all models, or
    its smallest. The plan has predictions; whether it fits says `predict`.

    Raises:
        UserError: no strategy on all devices is legal for all calls.
    """
    graph, cluster, costs, dtype = task.graph, task.cluster, task.costs, task.dtype
    trained = {call.model_name for call in graph.calls.values() if call.trains}

    def static(strategy: ParallelStrategy) -> int:
        return sum(
            static_bytes(
                model,
                strategy,
                dtype,
                trained=name in trained,
                features=costs.features_of(name),
                versions=graph.versions_kept(name),
            )
            for name, model in graph.models.items()
        )

    def communicators(layout: Layout) -> float:
        keys = {
            group_key(layout, axis)
            for call in graph.calls.values()
            for axis in axes_used(
                call, layout.strategy, gathers_parameters=costs.features_of(call.model_name).fully_sharded
            )
        }
        common = of_all_devices(cluster.num_devices, moves=bool(graph.follows))
        return costs.hardware.communicator_bytes * (len(common) + len(keys))

    chosen: dict[str, Option] = {}

    def cache(call: ModelFunctionCallDef, option: Option) -> float:
        return kept_cache_bytes(call, option, task.batch_size, task.workload, dtype, costs.features_of(call.model_name))

    def need(call: ModelFunctionCallDef, option: Option) -> float:
        """With what other calls leave: under their options, or at least."""
        strategy = option.layout.strategy
        kept = static(strategy) + communicators(option.layout)
        for other in graph.calls.values():
            if other is not call:
                theirs = [chosen[other.name]] if other.name in chosen else options(other, strategy)
                kept += min(cache(other, o) for o in theirs)
        return kept + dynamic_bytes(
            call, option, task.batch_size, task.workload, dtype, costs.features_of(call.model_name)
        )

    def need_of_all(call: ModelFunctionCallDef, option: Option) -> float:
        """Of the call, or of another one beside what this one leaves."""
        more = cache(call, option) - min(cache(call, o) for o in options(call, option.layout.strategy))
        rest = [] if more == 0 else [other for other in graph.calls.values() if other is not call]
        smallest = (min(need(other, o) for o in options(other, option.layout.strategy)) for other in rest)
        return max(need(call, option), *(size_bytes + more for size_bytes in smallest), 0.0)

    micro_batches = {
        call.name: dict(call_strategies(call, cluster.num_devices, mini_batch_size(call, task.batch_size)))
        for call in graph.calls.values()
    }

    def options(call: ModelFunctionCallDef, strategy: ParallelStrategy) -> list[Option]:
        layout = Layout(DeviceMesh(0, cluster.num_devices), strategy)
        return [Option(layout, count) for count in micro_batches[call.name][strategy]]

    def excess(strategy: ParallelStrategy) -> float:
        """Bytes over the limit, with each call's smallest option."""
        least = (min(need(call, o) for o in options(call, strategy)) for call in graph.calls.values())
        return max(max(least) - cluster.device_memory_bytes, 0.0)

    strategies = _common_strategies(graph, task.batch_size, cluster)
    strategy = min(strategies, key=lambda s: (excess(s), -s.tp, -s.dp))
    # Those first that leave something: the others choose beside it.
    for call in sorted(graph.calls.values(), key=lambda call: call.interface_type is not GENERATE):
        cost = task.cost_of(call.name)

        def key(option: Option, call: ModelFunctionCallDef = call, cost: CallCost = cost) -> tuple[float, float]:
            over = max(need_of_all(call, option) - cluster.device_memory_bytes, 0.0)
            return over, cost.seconds(strategy, option.micro_batches)

        chosen[call.name] = min(options(call, strategy), key=key)
    return predict(task, task.plan({name: chosen[name].call_plan() for name in graph.calls}, preset="heuristic")).plan


def _common_strategies(graph: DataflowGraph, batch_size: int, cluster: Cluster) -> list[ParallelStrategy]:
    """The strategies on all devices that are legal for all calls, with tensor-parallel groups within a node."""
    common: set[ParallelStrategy] | None = None
    for call in graph.calls.values():
        legal = {s for s, _ in call_strategies(call, cluster.num_devices, mini_batch_size(call, batch_size))}
        common = legal if common is None else common & legal
    within_node = [s for s in common or () if cluster.devices_per_node % s.tp == 0]
    if not within_node:
        raise UserError(
            f"heuristic plan: no (dp, tp, pp) on {cluster.num_devices} devices is legal for all calls with "
            f"batch_size={batch_size}; choose another number of devices or a batch size that it divides"
        )
    return sorted(within_node)


PRESETS: dict[str, Callable[[PlanningTask], ExecutionPlan]] = {
    "heuristic": heuristic,
    "colocate": colocate,
    "split": split,
    "standalone": standalone,
    "hybridflow": hybridflow,
}
