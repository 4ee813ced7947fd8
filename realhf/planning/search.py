"""Finds the fastest plan: never a slower one than any plan by rule (`realhf.planning.presets`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from realhf.base.errors import UserError
from realhf.base.numbers import STEPS_IN_FLIGHT, check_range
from realhf.dataflow.offload import check_offload
from realhf.dataflow.plan import ExecutionPlan
from realhf.planning.model.cluster import Cluster, has_all_meshes
from realhf.planning.model.hardware import GIB
from realhf.planning.model.reallocation import with_groups
from realhf.planning.options import Option, all_options, chosen, option_of
from realhf.planning.predict import Prediction, fastest_order
from realhf.planning.presets import PresetResult, evaluate_presets
from realhf.planning.problem.builder import build_problem
from realhf.planning.problem.native import NativeProblem, SearchRequest, native_problem, search_problem
from realhf.planning.request import SEEDS, SearchBudget, Watch, unwatched
from realhf.planning.task import PlanningTask

EVALUATIONS_PER_OPTION = 20
DEFAULT_EVALUATIONS = (20_000, 2_000_000)  # at least, at most
ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """No feasible plan costs less than `lower_bound_s` seconds a step, which the best one found costs as `cost_s`.

    `lower_bound_s` is infinite if it is proven that no plan fits. `proven`: no feasible plan is faster. With `feasible`
    false, `cost_s` is of a plan that does not fit. Without `has_all_meshes` all this is about plans on meshes of
    aligned powers of two of nodes.
    """

    cost_s: float
    lower_bound_s: float
    proven: bool
    feasible: bool = True
    has_all_meshes: bool = True

    @property
    def gap(self) -> float:
        """How much slower than the best the plan can be, as a part of the best, at most; 0 where it is proven."""
        if self.proven:
            return 0.0
        return self.cost_s / self.lower_bound_s - 1 if self.lower_bound_s > 0 else float("inf")

    def __str__(self) -> str:
        if not self.feasible:
            return "no plan fits into memory (proven)" if self.proven else "no plan that fits into memory was found"
        plans = "plan" if self.has_all_meshes else "plan on meshes of aligned powers of two (all that was searched)"
        if self.proven:
            return f"optimal: no {plans} takes less than {self.cost_s:.4g} s a step"
        if self.lower_bound_s <= 0:
            return "no lower bound was proven"
        return (
            f"no {plans} takes less than {self.lower_bound_s:.4g} s a step; this one is within {self.gap:.1%} of that"
        )


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The plan of the least predicted step among what a search found and the plans by rule that fit, `rules`.

    `certificate` is of its simulated seconds per step (makespan of the unrolled steps / steps); `prediction.step_s`
    is the time in the plan's own order, which differs where the simulation is not periodic. `trace`: (seconds of the
    search, seconds of a step) of every plan that was better than those before.
    """

    prediction: Prediction
    certificate: Certificate
    evaluations: int
    evaluations_per_s: float
    trace: tuple[tuple[float, float], ...]
    num_options: dict[str, int]
    rules: tuple[PresetResult, ...] = ()

    @property
    def plan(self) -> ExecutionPlan:
        return self.prediction.plan


def default_evaluations(options: Mapping[str, Sequence[Option]]) -> int:
    """A budget that grows with the problem: within 1 to 2 % of the best plan in seconds, for what was measured."""
    least, most = DEFAULT_EVALUATIONS
    return min(max(EVALUATIONS_PER_OPTION * sum(len(rows) for rows in options.values()), least), most)


def search_plan(task: PlanningTask, budget: SearchBudget, seed: int, watch: Watch = unwatched) -> SearchResult:
    """Searches mesh, strategy and micro-batches of every call (ReaL, section 5.2), from the plans by rule on.

    The default budget is `default_evaluations`. Whatever it is, no plan by rule that fits has a shorter predicted step.

    Raises:
        UserError: `offload` names other than models of the graph, a call has no legal option, a number is out of its
            range, or no plan fits into memory.
    """
    check_range("seed", seed, *SEEDS)
    check_range("max_steps_in_flight", task.max_steps_in_flight, *STEPS_IN_FLIGHT)
    check_offload(task.offload, task.graph)
    rules = evaluate_presets(task, watch)
    known = [rule.prediction for rule in rules if rule.prediction is not None and not rule.problem]
    watch("options", "")
    options = all_options(task)
    num_options = {name: len(rows) for name, rows in options.items()}
    if not has_all_meshes(task.cluster):
        options = {name: without_hopeless(task, name, rows) for name, rows in options.items()}
    starts = [_choice(prediction.plan, options) for prediction in known]
    watch("tables", f"{sum(len(rows) for rows in options.values()):,} options")
    native = native_problem(build_problem(task, options, groups=True))
    if budget.evaluations is None:
        budget = replace(budget, evaluations=default_evaluations(options))
    found = search_problem(native, SearchRequest(budget=budget, seed=seed, starts=starts), watch)
    candidates = list(zip(known, starts, strict=True))
    if found.feasible:
        costs = "measured" if task.costs.profiled else "analytic"
        calls = chosen(options, found.choice)
        plan = task.plan(calls, costs=costs, seed=seed, evaluations=found.evaluations)
        candidates.insert(0, (_ordered(task, plan, native, found.choice), found.choice))
    if not candidates:
        smallest = native.evaluate(native.smallest_plan(seed))["peak_bytes"]
        raise UserError(_nothing_fits(smallest, task.cluster))
    # A search compares plans as they are simulated, each call as soon as it can; a plan is run in its own order.
    prediction, choice = min(candidates, key=lambda candidate: (not candidate[0].fits, candidate[0].step_s))
    cost_s = native.evaluate(choice)["step_time"]
    certificate = Certificate(
        cost_s=cost_s,
        lower_bound_s=found.lower_bound_s,
        proven=found.proven and cost_s <= found.step_s,
        has_all_meshes=has_all_meshes(task.cluster),
    )
    return SearchResult(
        prediction=_noted(prediction, certificate),
        certificate=certificate,
        evaluations=found.evaluations,
        evaluations_per_s=found.evaluations / max(found.seconds, 1e-9),
        trace=found.trace,
        num_options=num_options,
        rules=tuple(rules),
    )


def _choice(plan: ExecutionPlan, options: dict[str, list[Option]]) -> list[int]:
    """The options of a plan's calls by number. On large clusters rules have meshes that a search leaves out: such an
    option is added."""
    choice = []
    for name, rows in options.items():
        option = option_of(plan.calls[name])
        if option not in rows:
            rows.append(option)
        choice.append(rows.index(option))
    return choice


def _ordered(task: PlanningTask, plan: ExecutionPlan, native: NativeProblem, choice: Sequence[int]) -> Prediction:
    """The plan in the fastest of its possible orders, grouped as its homes if that fits."""
    calls = with_groups(plan.calls, task.homes, task.graph, task.cluster)
    prediction = fastest_order(task, msgspec.structs.replace(plan, calls=calls), native, choice)
    if prediction.fits:
        return prediction
    # Grouped calls may need communicators where others were shared.
    plain = fastest_order(task, plan, native, choice)
    return plain if plain.fits else prediction


def _noted(prediction: Prediction, certificate: Certificate) -> Prediction:
    """With what the search knows of the plan in its notes."""
    plan, lower_bound_s = prediction.plan, certificate.lower_bound_s
    notes = {**plan.notes, "peak_memory_gib": round(prediction.peak_bytes / GIB, 3)}
    if (plan.predicted_step_s or 0.0) >= lower_bound_s * (1 - ROUNDING):
        # The proof is about simulated plans; the plan's own order could do better, and the note would be wrong of it.
        notes |= {"lower_bound_s": round(lower_bound_s, 6), "proven_optimal": certificate.proven}
    return replace(prediction, plan=msgspec.structs.replace(plan, notes=notes))


def without_hopeless(task: PlanningTask, name: str, options: Sequence[Option]) -> list[Option]:
    """The options of a call that may fit into memory: no feasible plan has another. All if there is none."""
    model, limit = task.call_models[name], task.cluster.device_memory_bytes
    fits = {shape: model.least_bytes(*shape) <= limit for shape in dict.fromkeys(option.shape for option in options)}
    return [option for option in options if fits[option.shape]] or list(options)


def _nothing_fits(smallest_bytes: float, cluster: Cluster) -> str:
    return (
        f"no plan fits into memory: the smallest one found needs {smallest_bytes / GIB:.2f} GiB on a device but "
        f"{cluster.num_nodes} x {cluster.devices_per_node} devices ({cluster.hardware.name}) have "
        f"{cluster.device_memory_bytes / GIB:.2f} GiB each, of {cluster.hardware.description}; use more devices, a "
        "smaller batch or shorter sequences"
    )
