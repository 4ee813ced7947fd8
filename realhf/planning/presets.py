"""Plans by rule, to compare a searched plan with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from realhf.base.errors import UserError
from realhf.dataflow.graph import GENERATE
from realhf.dataflow.plan import ExecutionPlan
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.planning.mapping import Mapper
from realhf.planning.model.call import CallModel
from realhf.planning.model.communicators import of_all_devices
from realhf.planning.model.hardware import GIB
from realhf.planning.options import Option, call_strategies, chosen, options_on
from realhf.planning.predict import Prediction, predict, predict_in_best_order
from realhf.planning.problem.builder import build_problem
from realhf.planning.problem.native import native_problem, search_problem
from realhf.planning.task import PlanningTask
from realhf.planning.watching import Watch, unwatched

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
    device, need = max(enumerate(prediction.device_bytes), key=lambda entry: entry[1])
    limit = task.cluster.device_memory_bytes
    problem = f"needs {need / GIB:.1f} GiB on device {device}, which has {limit / GIB:.1f} GiB"
    return PresetResult(name=name, prediction=prediction, problem="" if prediction.fits else problem)


def colocate(task: PlanningTask) -> ExecutionPlan:
    """Every model on all devices, each call with the best strategy for itself."""
    everything = DeviceMesh(0, task.cluster.num_devices)
    return _best_on(task, dict.fromkeys(task.graph.models, everything), "colocate")


def split(task: PlanningTask) -> ExecutionPlan:
    """Models that generate, and untrained models of the same architecture, on one half (with PPO actor and reference),
    the others on the other (critic and reward). Raises UserError if the devices cannot be halved, or no model is left
    for the second half."""
    graph, num_devices = task.graph, task.cluster.num_devices
    leading = [call.model_name for call in graph.calls.values() if call.interface_type is GENERATE]
    leading = leading or list(graph.models)[:1]
    trained = {call.model_name for call in graph.calls.values() if call.trains}
    shapes = {graph.models[name] for name in leading}
    first = {*leading, *(name for name, shape in graph.models.items() if name not in trained and shape in shapes)}
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
    """Each model on devices of its own, in the numbers that HybridFlow's algorithm gives to singletons. Raises
    UserError if there are fewer devices than models, or no allocation fits into memory."""
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
        mesh, mini_batch = meshes[call.model_name], call.mini_batch_size(task.batch_size)
        options[call.name] = options_on([mesh], call, mini_batch)
        if not options[call.name]:
            raise UserError(
                f"{preset}: no (dp, tp, pp) on {mesh.size} devices is legal for {call.name} with mini-batches of "
                f"{mini_batch} samples; choose a batch size that the number of devices divides"
            )
    native = native_problem(build_problem(task, options))
    found = search_problem(native, seed=SEED, evaluations=EVALUATIONS, proves=False)
    choice = found.choice if found.feasible else native.smallest_plan(SEED)
    return task.plan(chosen(options, choice), preset=preset)


def heuristic(task: PlanningTask) -> ExecutionPlan:
    """All calls in one strategy on all devices (after Megatron-LM's advice): tensor parallelism as far as it is legal
    within a node, data parallelism with the rest, and pipeline stages only where dp would not divide a mini-batch, or
    the models would not fit.

    Each call takes the fastest number of micro-batches that fits into memory beside all models, or else the one that
    needs least. The plan has predictions; it may not fit. Raises UserError if no strategy is legal for all calls.
    """
    needs, limit = _NeedsOfAll(task), task.cluster.device_memory_bytes
    strategy = min(needs.strategies(), key=lambda s: (max(needs.least(s) - limit, 0.0), -s.tp, -s.dp))
    # Calls that leave something come first: the others choose beside it.
    for model in sorted(task.call_models.values(), key=lambda model: model.call.interface_type is not GENERATE):

        def key(count: int, model: CallModel = model) -> tuple[float, float]:
            over = max(needs.with_the_others(model, strategy, count) - limit, 0.0)
            return over, model.seconds(strategy, count)

        needs.chosen[model.call.name] = min(needs.counts(model, strategy), key=key)
    layout = Layout(DeviceMesh(0, task.cluster.num_devices), strategy)
    calls = {name: Option(layout, count).call_plan() for name, count in needs.chosen.items()}
    return predict(task, task.plan(calls, preset="heuristic")).plan


class _NeedsOfAll:
    """Bytes on a device while all calls run in one strategy on all devices; `chosen`: micro-batches by call."""

    def __init__(self, task: PlanningTask):
        self._task, self._models = task, list(task.call_models.values())
        self._legal = {
            model.call.name: dict(call_strategies(model.call, task.cluster.num_devices, model.samples))
            for model in self._models
        }
        self.chosen: dict[str, int] = {}

    def strategies(self) -> list[ParallelStrategy]:
        """Those that are legal for all calls, with tensor-parallel groups within a node."""
        task, common = self._task, set.intersection(*map(set, self._legal.values()))
        within_node = sorted(s for s in common if task.cluster.devices_per_node % s.tp == 0)
        if not within_node:
            raise UserError(
                f"heuristic plan: no (dp, tp, pp) on {task.cluster.num_devices} devices is legal for all calls with "
                f"batch_size={task.batch_size}; choose another number of devices or a batch size that it divides"
            )
        return within_node

    def counts(self, model: CallModel, strategy: ParallelStrategy) -> list[int]:
        return self._legal[model.call.name][strategy]

    def least(self, strategy: ParallelStrategy) -> float:
        """Of the call that needs most, each in its smallest form."""
        return max(self._smallest(model, strategy) for model in self._models)

    def with_the_others(self, model: CallModel, strategy: ParallelStrategy, count: int) -> float:
        """Of the call, or of another one beside what this one leaves."""
        left = [model.kept_cache_bytes(strategy, each) for each in self.counts(model, strategy)]
        more = model.kept_cache_bytes(strategy, count) - min(left)
        rest = [] if more == 0 else [other for other in self._models if other is not model]
        of_others = (self._smallest(other, strategy) + more for other in rest)
        return max(self._need(model, strategy, count), *of_others, 0.0)

    def _smallest(self, model: CallModel, strategy: ParallelStrategy) -> float:
        return min(self._need(model, strategy, count) for count in self.counts(model, strategy))

    def _need(self, model: CallModel, strategy: ParallelStrategy, count: int) -> float:
        """With what other calls leave: as chosen, or at least."""
        kept = self._stays(strategy)
        for other in self._models:
            if other is not model:
                count_chosen = self.chosen.get(other.call.name)
                counts = [count_chosen] if count_chosen else self.counts(other, strategy)
                kept += min(other.kept_cache_bytes(strategy, each) for each in counts)
        return kept + model.dynamic_bytes(strategy, count)

    def _stays(self, strategy: ParallelStrategy) -> float:
        """All models at home, and the communicators."""
        task, num_devices = self._task, self._task.cluster.num_devices
        homes = [task.call_models[name] for name in dict.fromkeys(task.homes.values())]
        layout = Layout(DeviceMesh(0, num_devices), strategy)
        own = {key for model in self._models for key in model.communicators(layout)}
        common = of_all_devices(num_devices, moves=bool(task.graph.follows))
        static = sum(home.static_bytes(strategy) for home in homes)
        return static + task.costs.hardware.communicator_bytes * (len(common) + len(own))


PRESETS: dict[str, Callable[[PlanningTask], ExecutionPlan]] = {
    "heuristic": heuristic,
    "colocate": colocate,
    "split": split,
    "standalone": standalone,
    "hybridflow": hybridflow,
}
