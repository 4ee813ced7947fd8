"""Finds the fastest plan: never a slower one than any plan by rule (`realhf.planning.presets`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from realhf.architecture.model import DType
from realhf.base.errors import UserError
from realhf.base.numbers import STEPS_IN_FLIGHT, check_range
from realhf.dataflow.graph import DataflowGraph, ModelFunctionCallDef
from realhf.dataflow.offload import check_offload
from realhf.dataflow.plan import CallPlan, ExecutionPlan, check_plan
from realhf.geometry.layout import ParallelStrategy
from realhf.planning.cluster import Cluster, has_all_meshes
from realhf.planning.model.cost import CallCost
from realhf.planning.model.grouping import with_groups
from realhf.planning.model.memory import dynamic_bytes, parameter_bytes, static_bytes
from realhf.planning.model.timings import Costs
from realhf.planning.options import Option, call_options
from realhf.planning.order import possible_orders, steps_to_simulate
from realhf.planning.predict import Prediction
from realhf.planning.presets import PresetResult, evaluate_presets
from realhf.planning.problem.builder import build_problem
from realhf.planning.problem.inputs import homes
from realhf.planning.problem.native import native_problem, reallocation_table, search_problem
from realhf.planning.problem.tables import Problem
from realhf.planning.task import PlanningTask
from realhf.planning.watching import Watch, unwatched
from realhf.planning.workload import Workload

# What a budget may be. A search looks at its starts, whatever its budget: one evaluation gives the best of them.
EVALUATIONS = (1, 10**12)
SECONDS = (0.01, 10**7)
SEEDS = (0, 2**63 - 1)
EVALUATIONS_PER_OPTION = 20
DEFAULT_EVALUATIONS = (20_000, 2_000_000)  # at least, at most
GIB = 2**30
ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The plan of the least predicted step among what a search found and the plans by rule that fit, `rules`.

    `cost_s` is its simulated seconds per step (makespan of the unrolled steps / steps), and
    `peak_bytes` the need of its fullest device. `plan.predicted_step_s` is the time in the order
    that the plan carries, which differs where the simulation is not periodic. No feasible plan has
    a `cost_s` below `lower_bound_s`; `proven` says that this plan's is the least. `trace` has (seconds of
    the search, cost in seconds of the best plan then) whenever a better one was found. Without
    `has_all_meshes` (`realhf.planning.cluster`) all this is about the plans of a part of the meshes.
    """

    plan: ExecutionPlan
    cost_s: float
    evaluations: int
    evaluations_per_s: float
    feasible: bool
    peak_bytes: float
    lower_bound_s: float
    proven: bool
    trace: tuple[tuple[float, float], ...]
    num_options: dict[str, int]
    rules: tuple[PresetResult, ...] = ()
    has_all_meshes: bool = True


def default_evaluations(options: Mapping[str, Sequence[Option]]) -> int:
    """A budget that grows with the problem: within 1 to 2 % of the best plan in seconds, for what was measured."""
    least, most = DEFAULT_EVALUATIONS
    return min(max(EVALUATIONS_PER_OPTION * sum(len(rows) for rows in options.values()), least), most)


def search_plan(
    graph: DataflowGraph,
    *,
    batch_size: int,
    workload: Workload,
    cluster: Cluster,
    costs: Costs,
    seed: int,
    evaluations: int | None,
    max_steps_in_flight: int,
    dtype: DType,
    seconds: float | None = None,
    offload: tuple[str, ...] = (),
    watch: Watch = unwatched,
) -> SearchResult:
    """Searches mesh, strategy and micro-batches of every call (ReaL, section 5.2), from the plans by rule on.

    `evaluations` is the search's budget (None: `default_evaluations`); the models of `offload` wait in host memory
    while nothing needs them, in every plan that is looked at. Whatever the budget, no plan by rule that fits has a
    shorter predicted step.

    Raises:
        UserError: `offload` names other than models of the graph, a call has no legal option, a number is out of its
            range, or no plan fits into the devices' memory.
    """
    check_budget(evaluations, seconds)
    check_range("seed", seed, *SEEDS)
    check_range("max_steps_in_flight", max_steps_in_flight, *STEPS_IN_FLIGHT)
    check_offload(offload, graph)
    task = PlanningTask(
        graph=graph, batch_size=batch_size, workload=workload, cluster=cluster, costs=costs,
        max_steps_in_flight=max_steps_in_flight, dtype=dtype, offload=offload,
    )  # fmt: skip
    rules = evaluate_presets(task, watch)
    known = [rule.prediction for rule in rules if rule.prediction is not None and not rule.problem]
    watch("options", "")
    options = {call.name: call_options(call, batch_size, cluster) for call in graph.calls.values()}
    num_options = {name: len(rows) for name, rows in options.items()}
    if not has_all_meshes(cluster):
        options = {
            name: without_hopeless(
                graph.calls[name], rows, batch_size=batch_size, workload=workload, cluster=cluster, costs=costs,
                dtype=dtype,
            )
            for name, rows in options.items()
        }  # fmt: skip
    starts = [_choice(prediction.plan, options) for prediction in known]
    watch("tables", f"{sum(len(rows) for rows in options.values()):,} options")
    problem = build_problem(
        graph, options, batch_size=batch_size, workload=workload, cluster=cluster, costs=costs,
        max_steps_in_flight=max_steps_in_flight, dtype=dtype, reallocations=reallocation_table, offload=offload,
        groups=True,
    )  # fmt: skip
    native = native_problem(problem)
    budget = evaluations or default_evaluations(options)
    found = search_problem(native, seed=seed, evaluations=budget, seconds=seconds, starts=starts, watch=watch)
    candidates = [(prediction, choice) for prediction, choice in zip(known, starts, strict=True)]
    if found.feasible:
        notes: dict[str, str | int | float | bool] = {
            "hardware": cluster.hardware.name,
            "costs": "measured" if costs.profiled else "analytic",
            "seed": seed,
            "evaluations": found.evaluations,
        }
        simulated = native.trace(found.choice, steps_to_simulate(max_steps_in_flight))
        calls = _call_plans(problem, options, found.choice)
        candidates.insert(0, (_ordered(task, calls, simulated, notes), found.choice))
    if not candidates:
        smallest = native.evaluate(native.smallest_plan(seed))["peak_bytes"]
        raise UserError(_nothing_fits(smallest, cluster))
    # A search compares plans as they are simulated, each call as soon as it can; a plan is run in its own order.
    prediction, choice = min(candidates, key=lambda candidate: (not candidate[0].fits, candidate[0].step_s))
    cost_s = native.evaluate(choice)["step_time"]
    proven = found.proven and cost_s <= found.step_s
    peak_bytes = max(prediction.device_bytes)
    notes = {**prediction.plan.notes, "peak_memory_gib": round(peak_bytes / GIB, 3)}
    plan = msgspec.structs.replace(prediction.plan, notes=notes)
    check_plan(plan, graph, batch_size)
    if (plan.predicted_step_s or 0.0) >= found.lower_bound_s * (1 - ROUNDING):
        # The proof is about simulated plans; the plan's own order could do better, and the note would be wrong of it.
        bound = {"lower_bound_s": round(found.lower_bound_s, 6), "proven_optimal": proven}
        plan = msgspec.structs.replace(plan, notes={**plan.notes, **bound})
    return SearchResult(
        plan=plan,
        cost_s=cost_s,
        evaluations=found.evaluations,
        evaluations_per_s=found.evaluations / max(found.seconds, 1e-9),
        feasible=True,
        peak_bytes=peak_bytes,
        lower_bound_s=found.lower_bound_s,
        proven=proven,
        trace=found.trace,
        num_options=num_options,
        rules=tuple(rules),
        has_all_meshes=has_all_meshes(cluster),
    )


def check_budget(evaluations: int | None, seconds: float | None) -> None:
    """Raises UserError for a budget of a search (`--evaluations`, `--seconds`) out of its range."""
    if evaluations is not None:
        check_range("--evaluations", evaluations, *EVALUATIONS, "plans")
    if seconds is not None:
        check_range("--seconds", seconds, *SECONDS, "seconds")


def _choice(plan: ExecutionPlan, options: dict[str, list[Option]]) -> list[int]:
    """The options of a plan's calls by number; one that is not there yet is added.

    On large clusters rules know meshes that a search leaves out.
    """
    choice = []
    for name, rows in options.items():
        option = Option(plan.calls[name].layout, plan.calls[name].micro_batches)
        if option not in rows:
            rows.append(option)
        choice.append(rows.index(option))
    return choice


def _ordered(
    task: PlanningTask,
    calls: dict[str, CallPlan],
    simulated: Sequence[tuple[int, int, float, float]],
    notes: dict[str, str | int | float | bool],
) -> Prediction:
    """The plan of these calls in the fastest of its possible orders, grouped as their homes if that fits."""
    graph, names = task.graph, task.graph.nodes
    starts = [(names[node], step, start) for node, step, start, _ in simulated if node < len(names)]

    def fastest(of: dict[str, CallPlan]) -> Prediction:
        unordered = ExecutionPlan(
            num_devices=task.cluster.num_devices,
            devices_per_node=task.cluster.devices_per_node,
            calls=of,
            max_steps_in_flight=task.max_steps_in_flight,
            offload=task.offload,
            models=graph.models,
            notes=notes,
        )
        orders = possible_orders(starts, unordered, graph, task.batch_size)
        predictions = [task.predict(msgspec.structs.replace(unordered, order=order)) for order in orders]
        return min(predictions, key=lambda prediction: prediction.step_s)

    prediction = fastest(with_groups(calls, homes(graph), graph, task.cluster))
    if not prediction.fits:  # grouped calls may need communicators where others were shared
        prediction = min(prediction, fastest(calls), key=lambda prediction: not prediction.fits)
    return prediction


def without_hopeless(
    call: ModelFunctionCallDef,
    options: Sequence[Option],
    *,
    batch_size: int,
    workload: Workload,
    cluster: Cluster,
    costs: Costs,
    dtype: DType,
) -> list[Option]:
    """The options that may fit into memory: no feasible plan has another. All if there is none.

    Wherever the model lives, its parameters are on the call's devices beside what the call allocates.
    """
    needs: dict[tuple[ParallelStrategy, int], float] = {}
    features = costs.features_of(call.model_name)
    cost = CallCost(call=call, batch_size=batch_size, workload=workload, cluster=cluster, costs=costs, dtype=dtype)
    kept = []
    for option in options:
        shape = (option.layout.strategy, option.micro_batches)
        if shape not in needs:
            needs[shape] = parameter_bytes(call.config, option.layout.strategy, dtype)
            if call.trains:  # at home, as every training of a model is, with the optimizer's states
                needs[shape] = static_bytes(call.config, option.layout.strategy, dtype, trained=True, features=features)
            needs[shape] += dynamic_bytes(call, option, batch_size, workload, dtype, features)
            if cost.sharding(*shape):
                needs[shape] = 0.0  # operators are sharded so that it fits
        if needs[shape] <= cluster.device_memory_bytes:
            kept.append(option)
    return kept or list(options)


def _call_plans(
    problem: Problem, options: Mapping[str, Sequence[Option]], choice: Sequence[int]
) -> dict[str, CallPlan]:
    return {
        call.name: options[call.name][index].call_plan(predicted_s=call.options[index].time_s)
        for call, index in zip(problem.calls, choice, strict=True)
    }


def _nothing_fits(smallest_bytes: float, cluster: Cluster) -> str:
    hardware = cluster.hardware
    return (
        f"no plan fits into memory: the smallest one found needs {smallest_bytes / GIB:.2f} GiB on a device but "
        f"{cluster.num_nodes} x {cluster.devices_per_node} devices ({hardware.name}) have "
        f"{cluster.device_memory_bytes / GIB:.2f} GiB each, of {hardware.description}; use more devices, a smaller "
        "batch or shorter sequences"
    )
