"""Plans by rule, to compare a searched plan with."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from realhf.base.errors import UserError
from realhf.dataflow.plan import ExecutionPlan
from realhf.dataflow.plan_checks import check_confined
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.planning.mapping import Mapper
from realhf.planning.model.call import CallModel
from realhf.planning.model.cluster import halves
from realhf.planning.model.communicators import of_all_devices
from realhf.planning.model.hardware import GIB
from realhf.planning.options import Option, call_strategies, chosen, options_on, pool_meshes
from realhf.planning.predict import Prediction, predict_in_best_order
from realhf.planning.problem.builder import build_problem
from realhf.planning.problem.native import SearchRequest, native_problem, search_problem
from realhf.planning.request import SearchBudget, Watch, unwatched
from realhf.planning.task import PlanningTask

SEED, BUDGET = 0, SearchBudget(evaluations=20_000)  # for the search of the best strategies within a preset's meshes


PRICED_MAPPINGS = 3  # HybridFlow's placements that are cheapest by its own estimate


@dataclass(frozen=True, kw_only=True)
class PresetResult:
    """The plan of a preset with its prediction; `problem` says why it cannot run, and is empty if it can."""

    name: str
    prediction: Prediction | None
    problem: str = ""

    @property
    def fitting(self) -> Prediction | None:
        """That of a plan that can run."""
        return None if self.problem else self.prediction


def evaluate_presets(task: PlanningTask, watch: Watch = unwatched) -> list[PresetResult]:
    """All presets."""
    results, mapper = [], Mapper(task)
    for name in PRESETS:
        watch("plans by rule", name)
        results.append(evaluate_preset(name, task, mapper))
    watch("plans by rule", f"{sum(not result.problem for result in results)} of {len(results)} fit")
    return results


def evaluate_preset(name: str, task: PlanningTask, mapper: Mapper | None = None) -> PresetResult:
    """A preset, predicted as the searched plan is, in its own best order. `mapper`: of the task, with what it knows."""
    try:
        plan = PRESETS[name](mapper or Mapper(task))
        check_confined(plan, task.graph)  # a rule knows no pools
        prediction = predict_in_best_order(task, plan)
    except UserError as error:
        return PresetResult(name=name, prediction=None, problem=str(error))
    device, need = max(enumerate(prediction.device_bytes), key=lambda entry: entry[1])
    limit = task.cluster.device_memory_bytes
    problem = f"needs {need / GIB:.1f} GiB on device {device}, which has {limit / GIB:.1f} GiB"
    return PresetResult(name=name, prediction=prediction, problem="" if prediction.fits else problem)


def rule_plan(name: str, task: PlanningTask) -> Prediction:
    """The plan of a rule. Raises UserError if it has none for this task, or its plan cannot run."""
    result = evaluate_preset(name, task)
    if result.fitting is None:
        raise UserError(f"--rule {name}: {result.problem}; take another rule, or leave --rule out to search for a plan")
    return result.fitting


def colocate(task: PlanningTask) -> ExecutionPlan:
    """Every model on all devices, or on as many of its pool as one mesh has, each call with the best strategy for
    itself."""
    return _best_on(task, _all_devices(task), "colocate")


def _all_devices(task: PlanningTask) -> dict[str, DeviceMesh]:
    """For every model, or as many of its pool as one mesh has."""
    pools = task.graph.pools
    return {model: pool_meshes(task.cluster, pools.get(model))[-1] for model in task.graph.models}


def split(task: PlanningTask) -> ExecutionPlan:
    """Models that generate, and untrained models of the same architecture, on one half (with PPO actor and reference),
    the others on the other (critic and reward). Raises UserError if the devices cannot be halved, or no model is left
    for the second half."""
    graph = task.graph
    leading = [call.model_name for call in graph.model_calls.values() if call.generates]
    leading = leading or list(graph.models)[:1]
    trained = {call.model_name for call in graph.model_calls.values() if call.trains}
    shapes = {graph.models[name] for name in leading}
    first = {*leading, *(name for name, shape in graph.models.items() if name not in trained and shape in shapes)}
    if len(first) == len(graph.models):
        raise UserError("split: all models belong to the side of generation; nothing is left for the other half")
    sides = halves(task.cluster)
    if not sides:
        raise UserError(
            f"split: {task.cluster.num_devices} devices cannot be halved into device meshes; take an even number of "
            "nodes"
        )
    return _best_on(task, {name: sides[0 if name in first else 1] for name in graph.models}, "split")


def standalone(mapper: Mapper) -> ExecutionPlan:
    """Each model on devices of its own, in the numbers that HybridFlow's algorithm gives to singletons. Raises
    UserError if there are fewer devices than models, or no allocation fits into memory."""
    singletons = tuple((name,) for name in mapper.task.graph.models)
    return _best_on(mapper.task, mapper.ranked([singletons])[0].meshes(mapper.task), "standalone")


def hybridflow(mapper: Mapper) -> ExecutionPlan:
    """HybridFlow's mapping as its Algorithm 1 chooses it, by its own cost (`realhf.planning.mapping`). Raises UserError
    where that has none."""
    return mapper.task.plan(mapper.mappings[0].calls, preset="hybridflow")


def mapping(mapper: Mapper) -> ExecutionPlan:
    """The best of HybridFlow's mappings as they would run.

    Algorithm 1's cost of a mapping is a sum over stages, with a strategy chosen for each call by itself. So the
    placements that are cheapest by that cost, and all models together, are priced here by the planner, each with the
    strategies that are best together; the fastest is taken, or the algorithm's own choice.
    """
    task, plans = mapper.task, []
    try:
        mappings = mapper.mappings
        plans = [task.plan(mappings[0].calls, preset="mapping")]
        plans += [_best_on(task, mapping.meshes(task), "mapping") for mapping in mappings[:PRICED_MAPPINGS]]
    except UserError:
        if task.graph.pools:
            raise
    for plan in plans:
        check_confined(plan, task.graph)  # the algorithm knows no pools
    plans.append(_best_on(task, _all_devices(task), "mapping"))
    predicted = [predict_in_best_order(task, plan) for plan in plans]
    return min(predicted, key=lambda each: (not each.fits, each.step_s)).plan


def _best_on(task: PlanningTask, meshes: Mapping[str, DeviceMesh], preset: str) -> ExecutionPlan:
    """The fastest strategies and micro-batches if every model has its mesh (the least memory if none fit)."""
    options: dict[str, list[Option]] = {}
    for call in task.graph.model_calls.values():
        mesh, mini_batch = meshes[call.model_name], call.mini_batch_size(task.batch_size)
        options[call.name] = options_on([mesh], call, mini_batch)
        if not options[call.name]:
            raise UserError(
                f"{preset}: no (dp, tp, pp) on {mesh.size} devices is legal for {call.name} with mini-batches of "
                f"{mini_batch} samples; choose a batch size that the number of devices divides"
            )
    native = native_problem(build_problem(task, options))
    found = search_problem(native, SearchRequest(budget=BUDGET, seed=SEED, proves=False))
    choice = found.choice if found.feasible else native.smallest_plan(SEED)
    return task.plan(chosen(options, choice), preset=preset)


def heuristic(task: PlanningTask) -> ExecutionPlan:
    """All calls in one strategy on all devices (after Megatron-LM's advice): tensor parallelism as far as it is legal
    within a node, data parallelism with the rest, and pipeline stages only where dp would not divide a mini-batch, or
    the models would not fit.

    The plan may not fit. Raises UserError if no strategy is legal for all calls.
    """
    counts = _alike(task, "heuristic")
    strategy = min(counts, key=lambda s: (max(_lacking_bytes(task, s, counts[s]).values()), -s.tp, -s.dp))
    return _all_in(task, strategy, counts[strategy], "heuristic")


def real_heuristic(task: PlanningTask) -> ExecutionPlan:
    """All calls in one strategy on all devices, as ReaL (arXiv 2406.14088v1, section 8) compares with: tensor
    parallelism within a node and pipeline stages across nodes, whatever memory there is. As much of both as is legal
    for all calls; data parallelism with the rest.

    The plan may not fit. Raises UserError if no strategy is legal for all calls.
    """
    nodes, counts = task.cluster.num_nodes, _alike(task, "real-heuristic")

    def preference(s: ParallelStrategy) -> tuple[int, bool, int]:
        in_nodes = nodes % s.pp == 0
        return s.tp, in_nodes, s.pp if in_nodes else -s.pp

    strategy = max(counts, key=preference)
    return _all_in(task, strategy, counts[strategy], "real-heuristic")


def _alike(task: PlanningTask, preset: str) -> dict[ParallelStrategy, dict[str, Sequence[int]]]:
    """The strategies on all devices that are legal for all calls, with tp within a node, and the numbers of
    micro-batches of each call. Raises UserError if there are none."""
    models, num_devices = task.call_models, task.cluster.num_devices
    legal = {name: dict(call_strategies(model.call, num_devices, model.samples)) for name, model in models.items()}
    common = set.intersection(*map(set, legal.values()))
    within_node = [strategy for strategy in common if task.cluster.devices_per_node % strategy.tp == 0]
    if not within_node:
        raise UserError(
            f"{preset} plan: no (dp, tp, pp) on {num_devices} devices is legal for all calls with "
            f"batch_size={task.batch_size}; choose another number of devices or a batch size that it divides"
        )
    return {strategy: {name: legal[name][strategy] for name in models} for strategy in within_node}


def _all_in(
    task: PlanningTask, strategy: ParallelStrategy, counts: Mapping[str, Sequence[int]], preset: str
) -> ExecutionPlan:
    """All calls in a strategy on all devices. Each takes the fastest number of micro-batches that fits into memory
    beside all models, or else the one that needs least."""
    models, taken = task.call_models, dict(counts)
    # Calls that leave something come first: the others choose beside it.
    for model in sorted(models.values(), key=lambda model: not model.call.generates):
        name = model.call.name

        def key(count: int, model: CallModel = model, name: str = name) -> tuple[float, float, float]:
            lacking = _lacking_bytes(task, strategy, {**taken, name: [count]})
            return max(lacking.values()), lacking[name], model.seconds(strategy, count)

        taken[name] = [min(taken[name], key=key)]
    layout = Layout(DeviceMesh(0, task.cluster.num_devices), strategy)
    return task.plan({name: Option(layout, count).call_plan() for name, [count] in taken.items()}, preset=preset)


def _lacking_bytes(
    task: PlanningTask, strategy: ParallelStrategy, counts: Mapping[str, Sequence[int]]
) -> dict[str, float]:
    """What a device lacks for each call where all run in one strategy on all devices: each in its smallest form, beside
    all models at home, the communicators, and what the other calls leave at least. `counts`: the numbers of
    micro-batches that each may have."""
    models, num_devices = task.call_models, task.cluster.num_devices
    layout = Layout(DeviceMesh(0, num_devices), strategy)
    own = {key for model in models.values() for key in model.communicators(layout)}
    communicators = len(own) + len(of_all_devices(num_devices, moves=bool(task.graph.follows)))
    static = sum(models[home].static_bytes(strategy) for home in dict.fromkeys(task.homes.values()))
    works = {name: [model.work(strategy, count) for count in counts[name]] for name, model in models.items()}
    kept = {name: min(work.kept_cache_bytes() for work in each) for name, each in works.items()}
    dynamic = {name: min(work.dynamic_bytes() for work in each) for name, each in works.items()}
    beside = static + task.costs.hardware.communicator_bytes * communicators + sum(kept.values())
    limit = task.cluster.device_memory_bytes
    return {name: max(beside - kept[name] + dynamic[name] - limit, 0.0) for name in models}


PRESETS: dict[str, Callable[[Mapper], ExecutionPlan]] = {
    "heuristic": lambda mapper: heuristic(mapper.task),
    "real-heuristic": lambda mapper: real_heuristic(mapper.task),
    "colocate": lambda mapper: colocate(mapper.task),
    "split": lambda mapper: split(mapper.task),
    "standalone": standalone,
    "hybridflow": hybridflow,
    "mapping": mapping,
}
