"""A plan beside the presets and the alternatives of its calls, and beside those of other clusters or stalenesses."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import msgspec

from realhf.base.errors import UserError
from realhf.dataflow.graph import GENERATE
from realhf.dataflow.plan import CallPlan, ExecutionPlan
from realhf.planning.explain.analysis import Analysis, analyse
from realhf.planning.model.features import differences
from realhf.planning.options import call_options, option_of
from realhf.planning.predict import Prediction, predict, predict_in_best_order
from realhf.planning.presets import PresetResult, evaluate_preset, evaluate_presets
from realhf.planning.problem.builder import build_problem
from realhf.planning.problem.native import native_problem
from realhf.planning.search import Certificate, SearchResult
from realhf.planning.task import PlanningTask


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan and what is known of it; `problem` says why it cannot run (`analysis` is None where there is no plan)."""

    name: str
    analysis: Analysis | None
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """The fastest other layout of `call` while all other calls stay; `step_s` is the step's time then.

    `planned_step_s` is the plan's, simulated in the same way (each call as soon as it can, no given order).
    None if no other layout of the call fits into memory.
    """

    call: str
    option: CallPlan | None
    step_s: float
    planned_step_s: float
    num_options: int
    num_too_large: int

    @property
    def slower_by(self) -> float:
        """As a part of the plan's step."""
        return (self.step_s - self.planned_step_s) / self.planned_step_s


def best_alternatives(task: PlanningTask, plan: ExecutionPlan) -> list[Alternative]:
    """For each call: every other mesh and strategy of it is evaluated with the rest of the plan as it is."""
    return [_best(task, plan, name) for name in plan.calls]


def _best(task: PlanningTask, plan: ExecutionPlan, name: str) -> Alternative:
    chosen = {call: [option_of(entry)] for call, entry in plan.calls.items()}
    planned = chosen[name][0]
    rows = call_options(task.graph.calls[name], task.batch_size, task.cluster)
    options = [planned, *(option for option in rows if option.layout != planned.layout)]
    native = native_problem(build_problem(replace(task, offload=plan.offload), {**chosen, name: options}))
    place = list(task.graph.calls).index(name)
    (planned_step_s, _), *evaluations = native.evaluate_all([0] * len(task.graph.calls), place)
    best, best_s, too_large = None, float("inf"), 0
    for option, (step_s, feasible) in zip(options[1:], evaluations, strict=True):
        if not feasible:
            too_large += 1
        elif step_s < best_s:
            best, best_s = option, step_s
    call = None
    if best:
        call = best.call_plan(predicted_s=task.call_models[name].seconds(best.layout.strategy, best.micro_batches))
    return Alternative(
        call=name,
        option=call,
        step_s=best_s,
        planned_step_s=planned_step_s,
        num_options=len(options) - 1,
        num_too_large=too_large,
    )


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A plan, the search that found it (None: it was given), and the heuristic plan.

    `presets`, in their own order, and `alternatives` are empty where only the plan itself was asked for.
    """

    task: PlanningTask
    plan: Candidate
    result: SearchResult | None
    heuristic: PresetResult
    presets: tuple[Candidate, ...] = ()
    alternatives: tuple[Alternative, ...] = ()

    @property
    def analysis(self) -> Analysis:
        """That of the plan."""
        assert self.plan.analysis is not None
        return self.plan.analysis

    @property
    def certificate(self) -> Certificate | None:
        return self.result.certificate if self.result else None


def describe(task: PlanningTask, prediction: Prediction, result: SearchResult | None) -> Comparison:
    """The predicted plan of a search (None: a given one) beside the heuristic alone."""
    problem = "" if result or prediction.fits else "memory"
    candidate = Candidate(name="searched" if result else "given", analysis=analyse(task, prediction), problem=problem)
    return Comparison(task=task, plan=candidate, result=result, heuristic=evaluate_preset("heuristic", task))


def compare(alone: Comparison) -> Comparison:
    """With all presets, and with the best other layout of every call of the plan."""
    task = alone.task
    presets = []
    for preset in alone.result.rules if alone.result else evaluate_presets(task):
        analysis = analyse(task, preset.prediction) if preset.prediction else None
        presets.append(Candidate(name=preset.name, analysis=analysis, problem=preset.problem))
    alternatives = best_alternatives(task, alone.analysis.prediction.plan)
    return replace(alone, presets=tuple(presets), alternatives=tuple(alternatives))


def summary(comparison: Comparison) -> dict[str, Any]:
    """The comparison as data of `msgspec.to_builtins`; times in seconds, memory in bytes."""
    task, result = comparison.task, comparison.result
    certificate = asdict(result.certificate) if result else None
    if certificate:
        del certificate["feasible"]  # a search without a plan is an error
    return {
        "cluster": {
            "hardware": task.cluster.hardware.name,
            "num_nodes": task.cluster.num_nodes,
            "devices_per_node": task.cluster.devices_per_node,
            "device_memory_bytes": task.cluster.device_memory_bytes,
        },
        "workload": {
            "batch_size": task.batch_size,
            "prompt_tokens": task.workload.prompt_tokens,
            "new_tokens": task.workload.new_tokens,
            "tokens_per_step": task.tokens_per_step,
            "dtype": task.dtype,
        },
        "features": differences(task.costs.features),
        "certificate": certificate,
        "search_trace": result.trace if result else (),
        "plans": [_candidate(task, candidate) for candidate in (comparison.plan, *comparison.presets)],
        "alternatives": [
            asdict(alternative) | ({} if alternative.option else {"step_s": None})
            for alternative in comparison.alternatives
        ],
    }


def _candidate(task: PlanningTask, candidate: Candidate) -> Mapping[str, Any]:
    analysis = candidate.analysis
    result: dict[str, Any] = {"name": candidate.name, "feasible": not candidate.problem, "problem": candidate.problem}
    if analysis is None:
        return result
    return result | {
        "step_s": analysis.step_s,
        "tokens_per_s": analysis.tokens_per_s,
        "gpu_hours_per_million_tokens": analysis.gpu_hours_per_million_tokens,
        "peak_bytes": analysis.peak_bytes,
        "device_bytes": analysis.prediction.device_bytes,
        "communicator_bytes": analysis.communicator_bytes,
        "longest_chain": analysis.chain,
        "busiest_device": analysis.busiest_device,
        "busy": analysis.busy,
        "plan": analysis.prediction.plan,
        "sharded": {name: str(found) for name, found in task.shardings(analysis.prediction.plan).items()},
    }


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """The best plan of one case. `problem` says why there is none.

    `generates_apart`: generation and training of a model have no device in common.
    """

    name: str
    found: Comparison | None
    problem: str = ""
    generates_apart: bool = False


def solve_cases(tasks: Mapping[str, PlanningTask], search: Callable[[PlanningTask], SearchResult]) -> list[CaseResult]:
    """One search for each task. A task for which nothing fits does not end the others.

    Tasks on one cluster come in the order of their staleness: the plan of one counts for the next one, too, in the
    order that is the fastest there.
    """
    is_one_cluster = len({task.cluster for task in tasks.values()}) == 1
    results = []
    fresher = None
    for name, task in tasks.items():
        try:
            result = search(task)
        except UserError as error:
            results.append(CaseResult(name=name, found=None, problem=str(error)))
            continue
        prediction = predict(task, result.plan)
        if is_one_cluster and fresher:
            in_flight = task.max_steps_in_flight
            plan = msgspec.structs.replace(fresher, order=(), max_steps_in_flight=in_flight, predicted_step_s=None)
            prediction = min(prediction, predict_in_best_order(task, plan), key=lambda each: each.step_s)
        fresher = prediction.plan
        apart = _generates_apart(task, prediction.plan)
        results.append(CaseResult(name=name, found=describe(task, prediction, result), generates_apart=apart))
    return results


def _generates_apart(task: PlanningTask, plan: ExecutionPlan) -> bool:
    """Whether some model generates and trains, and does not do both on any one device (disaggregated)."""
    calls = task.graph.calls.values()
    pairs = [
        (plan.calls[a.name].mesh, plan.calls[b.name].mesh)
        for a, b in product(calls, calls)
        if a.model_name == b.model_name and a.interface_type is GENERATE and b.trains
    ]
    return bool(pairs) and not any(generation.overlaps(training) for generation, training in pairs)
