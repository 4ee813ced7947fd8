"""Finds the fastest plan: never a slower one than any plan by rule (`realhf.planning.presets`)."""

import gc
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec

from realhf.base.errors import UserError
from realhf.base.numbers import STEPS_IN_FLIGHT, check_range
from realhf.dataflow.graph import DataflowGraph
from realhf.dataflow.offload import check_offload
from realhf.dataflow.plan import CallPlan, ExecutionPlan
from realhf.geometry.layout import DeviceMesh
from realhf.planning.carriers import with_best_carriers, with_changes
from realhf.planning.certificate import Certificate
from realhf.planning.copies import with_best_copies
from realhf.planning.dominance import Dominance, worthwhile
from realhf.planning.model.cluster import Cluster, halves, has_all_meshes
from realhf.planning.model.hardware import GIB
from realhf.planning.model.reallocation import with_groups
from realhf.planning.options import Option, chosen, num_ways, option_of, options_to_search
from realhf.planning.predict import Prediction, fastest_order, predict_in_best_order, with_copies_in_place
from realhf.planning.presets import PresetResult, evaluate_presets
from realhf.planning.problem.builder import build_problem, steps_of
from realhf.planning.problem.native import Found, NativeProblem, SearchRequest, native_problem, search_problem
from realhf.planning.request import SECONDS, SEEDS, SearchBudget, Watch, unwatched
from realhf.planning.rooms import with_room_left
from realhf.planning.task import Breadth, PlanningTask

EVALUATIONS_PER_OPTION = 20
DEFAULT_EVALUATIONS = (20_000, 2_000_000)  # at least, at most
ROUNDING = 1e-9
PROOF = ("lower_bound_s", "proven_optimal")  # notes of a plan
OFFLOAD_SHARE = 0.2  # part of the budget for each further set of models in host memory
# Of a budget in seconds: what the search itself has at least; what is said of the plan afterwards, as a part of what
# the tables took; what options and tables take for each way to run a call; and the part that these may take at most of
# what is left.
LEAST_SECONDS, EXPLAINING, SECONDS_A_WAY, PREPARING = 0.05, 0.5, 1e-4, 0.4
# Where clusters are too large for a search of all breadth on every mesh, one on few of them follows: its part of the
# budget, and the most ways to run a call that it looks at.
WIDER_SHARE, MOST_WAYS_NEAR = 0.2, 30_000
BREADTHS: tuple[Breadth, ...] = ("all", "computation", "plain")


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The plan of the least predicted step among what a search found and the plans by rule that fit, `rules`.

    `certificate` is of its simulated seconds per step (makespan of the unrolled steps / steps); `prediction.step_s`
    is the time in the plan's own order, which differs where the simulation is not periodic. `trace`: (seconds of the
    search, seconds of a step) of every plan that was better than those before. Without time for a search there are no
    `num_options`, by call, and no evaluations. `fresher`: where the staleness of rollouts was left to the search, by
    less staleness than the plan's a step of the best plan found (None: none fits).
    """

    prediction: Prediction
    certificate: Certificate
    rules: tuple[PresetResult, ...]
    evaluations: int = 0
    evaluations_per_s: float = 0.0
    trace: tuple[tuple[float, float], ...] = ()
    num_options: Mapping[str, int] = field(default_factory=dict)
    fresher: Mapping[int, float | None] = field(default_factory=dict)

    @property
    def plan(self) -> ExecutionPlan:
        return self.prediction.plan


def default_evaluations(options: Mapping[str, Sequence[Option]]) -> int:
    """A budget that grows with the problem: within 1 to 2 % of the best plan in seconds, for what was measured."""
    least, most = DEFAULT_EVALUATIONS
    return min(max(EVALUATIONS_PER_OPTION * sum(len(rows) for rows in options.values()), least), most)


def search_plan(task: PlanningTask, budget: SearchBudget, watch: Watch = unwatched) -> SearchResult:
    """Searches mesh, strategy, micro-batches and computation of every call (ReaL, section 5.2), from the plans by rule
    on; then which models wait in host memory, and whether fewer steps in flight are faster.

    The default budget is `default_evaluations`. Whatever it is, no plan by rule that fits has a shorter predicted step.
    A budget in seconds is for all of this and for what is said of the plan afterwards: where there is little time, few
    ways to run a call are searched (`breadth_in_time`), and where the plans by rule have used it up and one of them
    fits, the best of them is the answer. Where nothing fits, all ways are searched, whatever that takes. At last,
    KV caches get the memory that is left (`realhf.planning.rooms`), and copies of the plan's parameters come from where
    they already are (`realhf.planning.copies`).

    Raises:
        UserError: `offload` names a model that only staler rollouts have, a call has no legal option, a number is out
            of its range, or no plan fits into memory.
    """
    check_range("seed", task.seed, *SEEDS)
    check_range("max_steps_in_flight", task.max_steps_in_flight, *STEPS_IN_FLIGHT)
    check_offload(task.offload, task.graph)
    clock, is_narrow = _Clock(budget), task.breadth is None and task.searched != BREADTHS[0]
    sets = _search_sets(task, clock, watch, part=1 - WIDER_SHARE if is_narrow else 1.0)
    best = _best_of(task, sets) if sets.results else None
    errors = sets.errors
    if is_narrow:
        near = _search_near(task, clock, sets, watch)
        best, errors = _with_wider(task, best, near), [*errors, *near.errors]
    if best is None:
        raise min(errors, key=lambda error: error.smallest_bytes)
    return best


@dataclass(frozen=True)
class _Sets:
    """The results of searches for `number` sets of models in host memory."""

    results: list[SearchResult]
    errors: list["NothingFitsError"]
    number: int


def _search_sets(
    task: PlanningTask,
    clock: "_Clock",
    watch: Watch,
    *,
    part: float = 1.0,
    begins: SearchResult | None = None,
) -> _Sets:
    """Searches with each set of models in host memory, in a part of what is left of the budget; the first of them from
    the plan of `begins` on, too, whose rules it takes over."""
    waiting, results, errors = offloads(task), list[SearchResult](), list[NothingFitsError]()
    num_sets = len(waiting) + (len(waiting) > 1)  # sets of models in host memory; one of them is found on the way
    preparation_s = 0.0  # the longest so far: rules, options and tables
    for number in range(num_sets):
        if number == len(waiting):
            if not results or (needed := _needed_offload(task, _fastest(results).prediction)) in waiting:
                break
            waiting.append(needed)
        if results and clock.left_s < preparation_s:
            break
        begun_s, share = clock.passed_s, OFFLOAD_SHARE if number else 1 - OFFLOAD_SHARE * (num_sets - 1)
        within = task.varied(offload=waiting[number])
        near = begins if begins and begins.plan.offload == within.offload else None
        rules = near.rules if near else evaluate_presets(within, watch)
        known = [fitting for rule in rules if (fitting := rule.fitting)]
        known += [near.prediction] if near else []
        breadths = _breadths(within, clock.left_s, some_rule_fits=bool(known))
        if not breadths:
            results.append(_best_rule(within, rules, known))
            break
        for breadth in breadths:
            searched = within.varied(breadth=breadth)
            prepared = _prepare(searched, known, clock, part * share, watch)
            found = search_problem(prepared.native, prepared.request, watch)
            if found.feasible:
                break
        preparation_s = max(preparation_s, clock.passed_s - begun_s - found.seconds)
        try:
            results.append(_result(searched, rules, known, prepared, found))
        except NothingFitsError as error:
            errors.append(error)
    return _Sets(results, errors, num_sets)


def _search_near(task: PlanningTask, clock: "_Clock", sets: _Sets, watch: Watch) -> _Sets:
    """A search of all breadth, in what is left of the budget, on the meshes of the best plan; where none was found, on
    the whole cluster and its halves. Nothing where there is no time for its options."""
    begins = _fastest(sets.results) if sets.results else None
    if begins:
        meshes = list(dict.fromkeys(call.mesh for call in begins.plan.calls.values()))
    else:
        meshes = [DeviceMesh(0, task.cluster.num_devices), *halves(task.cluster)]
    within = task.varied(breadth="all", near=tuple(meshes))
    while num_ways(within) > MOST_WAYS_NEAR and len(within.near) > 1:
        within = within.varied(near=within.near[:-1])
    budget, left_s = clock.budget, clock.left_s
    if breadth_in_time(within, left_s) != "all":
        return _Sets([], [], 0)
    evaluations = budget.evaluations and max(round(WIDER_SHARE * budget.evaluations), 1)
    seconds = None if budget.seconds is None else max(left_s, SECONDS[0])
    rest = _Clock(SearchBudget(evaluations=evaluations, seconds=seconds))
    return _search_sets(within, rest, watch, begins=begins)


def _with_wider(task: PlanningTask, best: SearchResult | None, near: _Sets) -> SearchResult | None:
    """The faster one of the best plan of a search and of one of all breadth `near` it, with what both know."""
    if not near.results:
        return best
    wider = _best_of(task, near)
    if best is None:
        return wider
    evaluations = best.evaluations + wider.evaluations
    if wider.prediction.step_s >= best.prediction.step_s * (1 - ROUNDING):
        return replace(best, evaluations=evaluations)
    plan, prediction = wider.plan, _noted(wider.prediction)
    certificate = replace(best.certificate, copying_s=prediction.step_s if plan.copies else None)
    if plan.offload != task.offload or any(map(_is_wide, plan.calls.values())):
        certificate = replace(certificate, wider_s=prediction.step_s)
    else:
        certificate = replace(certificate, cost_s=wider.certificate.cost_s)
        prediction = prediction if plan.copies else _noted(prediction, certificate)
    return replace(best, prediction=prediction, certificate=certificate, evaluations=evaluations)


def _is_wide(call: CallPlan) -> bool:
    """Whether a call has what only a search of all breadth looks at."""
    compute = call.compute
    is_wide = compute.offload_states is not None or compute.kv_cache_tokens is not None
    return call.chunks > 1 or is_wide or isinstance(compute.data_parallel, tuple)


def _best_of(task: PlanningTask, sets: _Sets) -> SearchResult:
    """The fastest result of searches with other models in host memory, with as many steps in flight, KV caches of the
    size, and copies from where, that is best."""
    best = _fastest(sets.results)
    in_flight = _with_best_steps(task, best.prediction)
    from_home = with_room_left(task, in_flight)
    prediction = with_changes(task, with_best_carriers(task, with_best_copies(task, from_home)))
    return replace(
        best,
        prediction=prediction if prediction is in_flight else _noted(prediction),
        certificate=replace(
            best.certificate,
            offload=best.plan.offload if sets.number > 1 else None,
            copying_s=prediction.step_s if prediction.plan.copies else None,
            wider_s=None if from_home is in_flight else prediction.step_s,
        ),
        evaluations=sum(result.evaluations for result in sets.results),
        rules=sets.results[0].rules,
    )


def _breadths(task: PlanningTask, left_s: float, *, some_rule_fits: bool) -> list[Breadth]:
    """What to search of the ways to run calls, one after the other until a plan fits: what there is time for, and where
    no plan by rule fits all, whatever that takes."""
    if task.near:
        return [task.searched]
    breadth = breadth_in_time(task, left_s)
    if some_rule_fits:
        return [breadth] if breadth else []
    return list(dict.fromkeys((breadth or BREADTHS[-1], task.searched)))


@dataclass(frozen=True)
class _Clock:
    """A budget that runs from now on."""

    budget: SearchBudget
    begun: float = field(default_factory=time.perf_counter)

    @property
    def passed_s(self) -> float:
        return time.perf_counter() - self.begun

    @property
    def left_s(self) -> float:
        """Of a budget in seconds."""
        return math.inf if self.budget.seconds is None else self.budget.seconds - self.passed_s


def breadth_in_time(task: PlanningTask, left_s: float) -> Breadth | None:
    """The most of the ways to run a call that options and tables can be made of in time; None: not even the fewest."""
    narrower = BREADTHS[BREADTHS.index(task.searched) :]
    if math.isinf(left_s):
        return narrower[0]
    return next(
        (each for each in narrower if SECONDS_A_WAY * num_ways(task.varied(breadth=each)) <= PREPARING * left_s), None
    )


def _fastest(results: Sequence[SearchResult]) -> SearchResult:
    return min(results, key=lambda result: result.prediction.step_s)


def offloads(task: PlanningTask) -> list[tuple[str, ...]]:
    """The sets of models in host memory that a search looks at: what the task says; and where it may choose others,
    those that nobody trains, and all that can wait. After these it looks at what `_needed_offload` leaves of the best.
    Devices that share the host's memory would gain nothing."""
    if not task.may_offload or task.cluster.hardware.shares_host_memory or task.searched != "all":
        return [task.offload]
    return list(dict.fromkeys([task.offload, *models_that_can_wait(task.graph)]))


def models_that_can_wait(graph: DataflowGraph) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """In host memory: the models that nobody trains, which only come and never go; and all but those that follow
    another."""
    trained = {call.model_name for call in graph.model_calls.values() if call.trains}
    followers = {follow.target for follow in graph.follows.values()}
    everything = tuple(model for model in graph.models if model not in followers)
    return tuple(model for model in everything if model not in trained), everything


def _needed_offload(task: PlanningTask, prediction: Prediction) -> tuple[str, ...]:
    """Of the models that a plan has in host memory those without which it would not fit, or take longer."""
    best = prediction
    for model in prediction.plan.offload:
        rest = tuple(other for other in best.plan.offload if other != model)
        there = predict_in_best_order(task, msgspec.structs.replace(best.plan, offload=rest, order=()))
        if there.fits and there.step_s <= best.step_s:
            best = there
    return best.plan.offload


def _with_best_steps(task: PlanningTask, prediction: Prediction) -> Prediction:
    """The plan with fewer steps in flight, where it is faster so: the calls of later steps then come in no other's way.

    No bound on all plans changes: with fewer steps in flight a plan does nothing that it may not do with more.
    """
    most = prediction.plan.max_steps_in_flight
    least = max((follow.staleness + 1 for follow in task.graph.follows.values()), default=1)
    found = [prediction]
    for fewer in range(least, most):
        if steps_of(fewer) == steps_of(most):  # others are simulated for another time
            plan = msgspec.structs.replace(prediction.plan, max_steps_in_flight=fewer, order=())
            found.append(predict_in_best_order(task, plan))
    best = min(found, key=lambda each: each.step_s)
    return best if best.step_s < prediction.step_s * (1 - ROUNDING) else prediction


@contextmanager
def without_collection() -> Iterator[None]:
    """No search for garbage while hundreds of thousands of objects are made, none of which is garbage: it took a
    quarter of the time. Afterwards all of them count as old, or the first search would go through each."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.freeze()
            gc.unfreeze()
            gc.enable()


class _Prepared(NamedTuple):
    """The options of a search, by call, its tables, and its request with the plans that it begins from. Options that
    only these plans have are not among `num_options`."""

    options: dict[str, list[Option]]
    num_options: dict[str, int]
    native: NativeProblem
    request: SearchRequest


def _prepare(task: PlanningTask, known: Sequence[Prediction], clock: _Clock, share: float, watch: Watch) -> _Prepared:
    """For a search from `known`, the plans by rule that fit, with a share of what is left of the budget beside what
    will be said of the plan."""
    budget, begun_s = clock.budget, clock.passed_s
    watch("options", "")
    with without_collection():
        options = worthwhile_options(task)
        num_options = {name: len(rows) for name, rows in options.items()}
        starts = [_choice(prediction.plan, options) for prediction in known]
        watch("tables", f"{sum(len(rows) for rows in options.values()):,} options")
        native = native_problem(build_problem(task, options, groups=True))
    evaluations = max(round(share * (budget.evaluations or default_evaluations(options))), 1)
    left_s = clock.left_s - EXPLAINING * (clock.passed_s - begun_s)
    seconds = None if budget.seconds is None else max(share * left_s, LEAST_SECONDS)
    budget = SearchBudget(evaluations=evaluations, seconds=seconds)
    return _Prepared(options, num_options, native, SearchRequest(budget=budget, seed=task.seed, starts=starts))


def _result(
    task: PlanningTask,
    rules: Sequence[PresetResult],
    known: Sequence[Prediction],
    prepared: _Prepared,
    found: Found,
) -> SearchResult:
    """The best plan of a search and of `known`. Raises NothingFitsError if none fits into memory."""
    native = prepared.native
    candidates: list[tuple[Prediction, Sequence[int]]] = list(zip(known, prepared.request.starts, strict=True))
    if found.feasible:
        costs, calls = "measured" if task.costs.profiled else "analytic", chosen(prepared.options, found.choice)
        plan = task.plan(calls, costs=costs, seed=task.seed, evaluations=found.evaluations)
        candidates.insert(0, (_ordered(task, plan, native, found.choice), found.choice))
    if not candidates:
        smallest = native.evaluate(native.smallest_plan(task.seed))["peak_bytes"]
        raise NothingFitsError(float(smallest), task.cluster, task.offload)
    # A search compares plans as they are simulated, each call as soon as it can; a plan is run in its own order.
    prediction, choice = min(candidates, key=lambda candidate: (not candidate[0].fits, candidate[0].step_s))
    cost_s = native.evaluate(choice)["step_time"]
    certificate = Certificate(
        cost_s=cost_s,
        lower_bound_s=found.lower_bound_s,
        proven=found.proven and cost_s <= found.step_s,
        has_all_meshes=has_all_meshes(task.cluster),
        breadth=task.searched,
        num_meshes=len(task.near) or None,
    )
    return SearchResult(
        prediction=_noted(prediction, certificate),
        certificate=certificate,
        rules=tuple(rules),
        evaluations=found.evaluations,
        evaluations_per_s=found.evaluations / max(found.seconds, 1e-9),
        trace=tuple(found.trace),
        num_options=prepared.num_options,
    )


def _best_rule(task: PlanningTask, rules: Sequence[PresetResult], known: Sequence[Prediction]) -> SearchResult:
    """The best of `known`, the plans by rule that fit, without a search."""
    best = min(known, key=lambda prediction: prediction.step_s)
    certificate = Certificate(
        cost_s=best.step_s, lower_bound_s=0.0, proven=False, has_all_meshes=has_all_meshes(task.cluster)
    )
    return SearchResult(prediction=_noted(best, certificate), certificate=certificate, rules=tuple(rules))


def _choice(plan: ExecutionPlan, options: dict[str, list[Option]]) -> list[int]:
    """The options of a plan's calls by number. On large clusters rules have meshes that a search leaves out: such an
    option is added."""
    choice = []
    for name, rows in options.items():
        option = option_of(msgspec.structs.replace(plan.calls[name], micro_dp=(1, 1)))  # groups are priced as it
        if option not in rows:
            rows.append(option)
        choice.append(rows.index(option))
    return choice


def _ordered(task: PlanningTask, plan: ExecutionPlan, native: NativeProblem, choice: Sequence[int]) -> Prediction:
    """The plan in the fastest of its possible orders, grouped as its homes if that fits, with copies filled in place
    where it would not fit otherwise."""
    calls = with_groups(plan.calls, task.homes, task.graph, task.cluster)
    grouped = msgspec.structs.replace(plan, calls=calls)
    prediction = fastest_order(task, grouped, native, choice)
    if prediction.fits:
        return prediction
    for other in (plan, with_copies_in_place(task, grouped), with_copies_in_place(task, plan)):
        # Not grouped: grouped calls may need communicators where others were shared.
        if other and (there := fastest_order(task, other, native, choice)).fits:
            return there
    return prediction


def _noted(prediction: Prediction, certificate: Certificate | None = None) -> Prediction:
    """The prediction with the search's knowledge in the plan's notes. Without a certificate there is no proof in them:
    it is about other plans."""
    plan = prediction.plan
    notes = {name: value for name, value in plan.notes.items() if name not in PROOF}
    notes |= {"peak_memory_gib": round(prediction.peak_bytes / GIB, 3)}
    if certificate and (plan.predicted_step_s or 0.0) >= certificate.lower_bound_s * (1 - ROUNDING):
        # The proof is about simulated plans; the plan's own order could do better, and the note would be wrong of it.
        notes |= {"lower_bound_s": round(certificate.lower_bound_s, 6), "proven_optimal": certificate.proven}
    return replace(prediction, plan=msgspec.structs.replace(plan, notes=notes))


def worthwhile_options(task: PlanningTask) -> dict[str, list[Option]]:
    """The options of every call among which the best plan is (`realhf.planning.dominance`); those that fit into memory
    alone, or all where there is none."""
    return {
        name: list(worthwhile(task, name)) or options_to_search(task, name, Dominance(task))
        for name in task.graph.model_calls
    }


class NothingFitsError(UserError):
    """No plan with these models in host memory fits; the smallest one that was found needs `smallest_bytes`."""

    def __init__(self, smallest_bytes: float, cluster: Cluster, offload: Sequence[str]):
        self.smallest_bytes, self._cluster, self._offload = smallest_bytes, cluster, offload
        waiting = f", with {', '.join(offload)} in host memory while nothing needs them," if offload else ""
        super().__init__(
            f"no plan fits into memory: the smallest one found{waiting} needs {smallest_bytes / GIB:.2f} GiB on a "
            f"device but {cluster.num_nodes} x {cluster.devices_per_node} devices ({cluster.hardware.name}) have "
            f"{cluster.device_memory_bytes / GIB:.2f} GiB each, of {cluster.hardware.description}; use more devices, a "
            "smaller batch or shorter sequences"
        )

    def knowing(self, smallest_bytes: float) -> "NothingFitsError":
        """The same where a plan of so many bytes was found elsewhere."""
        least = min(smallest_bytes, self.smallest_bytes)
        return NothingFitsError(least, self._cluster, self._offload)
