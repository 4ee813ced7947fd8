"""Finds the fastest plan; the only importer of the C++ search."""

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import msgspec

from realhf.api.errors import UserError
from realhf.api.graph import DataflowGraph, ModelFunctionCallDef
from realhf.api.layout import Layout, ParallelStrategy
from realhf.api.model import DecoderConfig, DType
from realhf.api.offload import check_offload
from realhf.api.plan import CallPlan, ExecutionPlan, check_plan
from realhf.search import _search
from realhf.search.cluster import Cluster, has_all_meshes
from realhf.search.cost import CallCost
from realhf.search.cost import reallocation_table as reallocation_table_in_python
from realhf.search.grouping import with_groups
from realhf.search.hardware import Hardware
from realhf.search.memory import dynamic_bytes, model_sizes, parameter_bytes, static_bytes
from realhf.search.options import Option, call_options
from realhf.search.order import possible_orders, steps_to_simulate
from realhf.search.predict import Prediction, predict
from realhf.search.problem import build_problem
from realhf.search.problem_inputs import homes
from realhf.search.tables import Problem
from realhf.search.timings import Costs
from realhf.search.workload import Workload

__all__ = ["Prediction", "SearchResult", "native_problem", "predict", "search_plan", "search_problem"]

MIN_EVALUATIONS = 100
MIN_SECONDS = 0.01
EVALUATIONS_PER_OPTION = 20
DEFAULT_EVALUATIONS = (20_000, 2_000_000)  # at least, at most
GIB = 2**30
ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The cheapest plan that was found.

    `cost_s` is its simulated seconds per step (makespan of the unrolled steps / steps), and
    `peak_bytes` the need of its fullest device. `plan.predicted_step_s` is the time in the order
    that the plan carries, which differs where the simulation is not periodic. No feasible plan has
    a `cost_s` below `lower_bound_s`; `proven` says that this plan's is the least. `trace` has (seconds of
    the search, cost in seconds of the best plan then) whenever a better one was found. Without
    `has_all_meshes` (`realhf.search.cluster`) all this is about the plans of a part of the meshes.
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
    has_all_meshes: bool = True


@dataclass(frozen=True, kw_only=True)
class Found:
    """The solution of a problem: the chosen option of every call.

    `lower_bound_s` bounds the `step_s` of every feasible choice from below (infinite if there is
    none), and `proven` says that this choice is optimal.
    """

    choice: list[int]
    step_s: float
    peak_bytes: float
    feasible: bool
    cost: float
    lower_bound_s: float
    proven: bool
    trace: tuple[tuple[float, float], ...]
    evaluations: int
    seconds: float


def native_problem(problem: Problem) -> _search.Problem:
    """The problem in the searcher's memory.

    Raises:
        ValueError: the tables do not fit together.
    """
    tables = msgspec.structs.asdict(problem)
    tables["calls"] = [msgspec.structs.asdict(call) for call in problem.calls]
    tables["transfers"] = [msgspec.structs.asdict(transfer) for transfer in problem.transfers]
    return _search.Problem(tables)


def default_evaluations(options: Mapping[str, Sequence[Option]]) -> int:
    """A budget that grows with the problem: within 1 to 2 % of the best plan in seconds, for what was measured."""
    least, most = DEFAULT_EVALUATIONS
    return min(max(EVALUATIONS_PER_OPTION * sum(len(rows) for rows in options.values()), least), most)


def search_problem(native: _search.Problem, *, seed: int, evaluations: int, seconds: float | None = None) -> Found:
    """Searches a problem on all cores; the same seed and evaluations give the same choice on any number of them.

    With `seconds`, for so long at most, whatever the number of evaluations.
    """
    start = time.perf_counter()
    solution = native.solve(
        seed=seed,
        evaluations=0 if seconds else evaluations,
        seconds=seconds or 0.0,
        threads=len(os.sched_getaffinity(0)),
        single_moves=False,
        proves=True,
    )
    evaluation = solution["evaluation"]
    return Found(
        choice=solution["plan"],
        step_s=evaluation["step_time"],
        peak_bytes=evaluation["peak_bytes"],
        feasible=evaluation["feasible"],
        cost=evaluation["cost"],
        lower_bound_s=solution["lower_bound"],
        proven=solution["proven"],
        trace=tuple(solution["trace"]),
        evaluations=solution["search_full"] + solution["search_rejected"],
        seconds=time.perf_counter() - start,
    )


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
) -> SearchResult:
    """Searches mesh, strategy and micro-batches of every call (ReaL, section 5.2).

    `evaluations` is the search's budget (None: `default_evaluations`); the models of `offload` wait in host memory
    while nothing needs them, in every plan that is looked at.

    Raises:
        UserError: `offload` names other than models of the graph, a call has no legal option, or no plan fits into the
            devices' memory.
    """
    if seconds is not None and not MIN_SECONDS <= seconds < math.inf:
        raise UserError(f"--seconds {seconds:g} must be at least {MIN_SECONDS:g}: it is how long to search")
    if (evaluations is not None and evaluations < MIN_EVALUATIONS) or max_steps_in_flight < 1 or seed < 0:
        raise UserError(
            f"search: evaluations={evaluations} must be at least {MIN_EVALUATIONS}, "
            f"max_steps_in_flight={max_steps_in_flight} at least 1 and seed={seed} not negative"
        )
    check_offload(offload, graph)
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
    problem = build_problem(
        graph, options, batch_size=batch_size, workload=workload, cluster=cluster, costs=costs,
        max_steps_in_flight=max_steps_in_flight, dtype=dtype, reallocations=reallocation_table, offload=offload,
        groups=True,
    )  # fmt: skip
    native = native_problem(problem)
    budget = evaluations or default_evaluations(options)
    found = search_problem(native, seed=seed, evaluations=budget, seconds=seconds)
    if not found.feasible:
        smallest = native.evaluate(native.smallest_plan(seed))["peak_bytes"]
        raise UserError(_nothing_fits(smallest, cluster))
    names = graph.nodes
    trace = native.trace(found.choice, steps_to_simulate(max_steps_in_flight))
    starts = [(names[node], step, start) for node, step, start, _ in trace if node < len(names)]

    def ordered(calls: dict[str, CallPlan]) -> Prediction:
        """The plan of these calls in the fastest of its possible orders."""
        unordered = ExecutionPlan(
            num_devices=cluster.num_devices,
            devices_per_node=cluster.devices_per_node,
            calls=calls,
            max_steps_in_flight=max_steps_in_flight,
            offload=offload,
            models=graph.models,
            notes={
                "hardware": cluster.hardware,
                "costs": "measured" if costs.profiled else "analytic",
                "seed": seed,
                "evaluations": found.evaluations,
            },
        )
        predictions = [
            predict(
                msgspec.structs.replace(unordered, order=order), graph, batch_size=batch_size, workload=workload,
                cluster=cluster, costs=costs, dtype=dtype,
            )
            for order in possible_orders(starts, unordered, graph, batch_size)
        ]  # fmt: skip
        return min(predictions, key=lambda prediction: prediction.step_s)

    calls = _call_plans(problem, options, found.choice)
    prediction = ordered(with_groups(calls, homes(graph), graph, cluster))
    if not prediction.fits:  # grouped calls may need communicators where others were shared
        prediction = min(prediction, ordered(calls), key=lambda prediction: not prediction.fits)
    peak_bytes = max(prediction.device_bytes)
    notes = {**prediction.plan.notes, "peak_memory_gib": round(peak_bytes / GIB, 3)}
    plan = msgspec.structs.replace(prediction.plan, notes=notes)
    check_plan(plan, graph, batch_size)
    if (plan.predicted_step_s or 0.0) >= found.lower_bound_s * (1 - ROUNDING):
        # The proof is about simulated plans; the plan's own order could do better, and the note would be wrong of it.
        bound = {"lower_bound_s": round(found.lower_bound_s, 6), "proven_optimal": found.proven}
        plan = msgspec.structs.replace(plan, notes={**plan.notes, **bound})
    return SearchResult(
        plan=plan,
        cost_s=found.step_s,
        evaluations=found.evaluations,
        evaluations_per_s=found.evaluations / max(found.seconds, 1e-9),
        feasible=found.feasible,
        peak_bytes=peak_bytes,
        lower_bound_s=found.lower_bound_s,
        proven=found.proven,
        trace=found.trace,
        num_options=num_options,
        has_all_meshes=has_all_meshes(cluster),
    )


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


def reallocation_table(
    model: DecoderConfig,
    sources: Sequence[Layout],
    targets: Sequence[Layout],
    *,
    item: int,
    cluster: Cluster,
    hardware: Hardware,
    forwarding: bool = True,
) -> Sequence[float]:
    """As `realhf.search.cost.reallocation_table`, computed in C++; a buffer of doubles in its memory.

    Layouts with model chunks or micro data-parallel groups, which only given plans have, are left to Python: C++ does
    not know them.
    """
    if any(layout.strategy.chunks > 1 or layout.strategy.micro_dp != (1, 1) for layout in (*sources, *targets)):
        return reallocation_table_in_python(
            model, sources, targets, item=item, cluster=cluster, hardware=hardware, forwarding=forwarding
        )
    table = _search.reallocation_table(
        asdict(model_sizes(model)),
        [_layout_row(s) for s in sources],
        [_layout_row(t) for t in targets],
        within_node=(hardware.intra_node_latency_s, item / hardware.intra_node_bandwidth),
        across_nodes=(hardware.inter_node_latency_s, item / hardware.inter_node_bandwidth),
        devices_per_node=cluster.devices_per_node,
        forwarding=forwarding,
    )
    return memoryview(table).cast("B").cast("d")  # its bytes are doubles


def _layout_row(layout: Layout) -> tuple[int, int, int, int, int]:
    strategy = layout.strategy
    return (layout.mesh.first, layout.mesh.size, strategy.dp, strategy.tp, strategy.pp)


def _nothing_fits(smallest_bytes: float, cluster: Cluster) -> str:
    return (
        f"no plan fits into memory: the smallest one found needs {smallest_bytes / GIB:.2f} GiB on a device but "
        f"{cluster.num_nodes} x {cluster.devices_per_node} devices ({cluster.hardware}) have "
        f"{cluster.device_memory_bytes / GIB:.2f} GiB each; use more devices, a smaller batch or shorter sequences"
    )
