"""A plan beside the presets and the alternatives of its calls, and beside those of other clusters or stalenesses: for
people, as data, and as the rationale that is kept with the plan."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import groupby, product
from typing import Any

import msgspec

from realhf.base.errors import UserError
from realhf.dataflow.plan import CallPlan, ExecutionPlan
from realhf.dataflow.rationale import DeviceMemory, Instead, Rationale
from realhf.planning.explain.analysis import Analysis, analyse
from realhf.planning.model.features import differences
from realhf.planning.options import call_options, option_of
from realhf.planning.predict import predict, predict_in_best_order
from realhf.planning.presets import PresetResult, evaluate_preset, evaluate_presets
from realhf.planning.problem.builder import build_problem
from realhf.planning.problem.native import native_problem
from realhf.planning.problem.simulation import DeviceNeed
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
    call = task.graph.model_calls[name]
    rows = call_options(call, task.batch_size, task.cluster, task.graph.pools.get(call.model_name))
    options = [planned, *(option for option in rows if option.layout != planned.layout)]
    native = native_problem(build_problem(replace(task, offload=plan.offload), {**chosen, name: options}))
    place = list(task.graph.model_calls).index(name)
    (planned_step_s, _), *evaluations = native.evaluate_all([0] * len(task.graph.model_calls), place)
    others = zip(options[1:], evaluations, strict=True)
    fitting = [(step_s, option) for option, (step_s, feasible) in others if feasible]
    best_s, best = min(fitting, key=lambda entry: entry[0], default=(float("inf"), None))
    return Alternative(
        call=name,
        option=best.call_plan(predicted_s=task.call_models[name].seconds(*best.shape)) if best else None,
        step_s=best_s,
        planned_step_s=planned_step_s,
        num_options=len(evaluations),
        num_too_large=len(evaluations) - len(fitting),
    )


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A plan, the search that found it (None: it was given), and the heuristic plan.

    `presets`, in their own order, and `alternatives` are empty where only the plan itself was asked for.
    """

    task: PlanningTask
    analysis: Analysis
    result: SearchResult | None
    heuristic: PresetResult
    presets: tuple[Candidate, ...] = ()
    alternatives: tuple[Alternative, ...] = ()

    @property
    def plan(self) -> ExecutionPlan:
        return self.analysis.prediction.plan

    @property
    def candidates(self) -> list[Candidate]:
        """The plan, and the presets."""
        problem = "" if self.result or self.analysis.prediction.fits else "memory"
        name = "searched" if self.result else "given"
        return [Candidate(name=name, analysis=self.analysis, problem=problem), *self.presets]

    @property
    def certificate(self) -> Certificate | None:
        return self.result.certificate if self.result else None

    @property
    def generates_apart(self) -> bool:
        """Whether some model generates and trains, and does not do both on any one device (disaggregated)."""
        calls = self.task.graph.model_calls.values()
        pairs = [
            (self.plan.calls[a.name].mesh, self.plan.calls[b.name].mesh)
            for a, b in product(calls, calls)
            if a.model_name == b.model_name and a.generates and b.trains
        ]
        return bool(pairs) and not any(generation.overlaps(training) for generation, training in pairs)


def describe(task: PlanningTask, plan: SearchResult | ExecutionPlan) -> Comparison:
    """The plan of a search, or a given one, beside the heuristic alone. Raises UserError as `predict`."""
    result = plan if isinstance(plan, SearchResult) else None
    prediction = plan.prediction if isinstance(plan, SearchResult) else predict(task, plan)
    heuristic = evaluate_preset("heuristic", task)
    return Comparison(task=task, analysis=analyse(task, prediction), result=result, heuristic=heuristic)


def compare(alone: Comparison) -> Comparison:
    """With all presets, and with the best other layout of every call of the plan."""
    task, presets = alone.task, []
    for preset in alone.result.rules if alone.result else evaluate_presets(task):
        analysis = analyse(task, preset.prediction) if preset.prediction else None
        presets.append(Candidate(name=preset.name, analysis=analysis, problem=preset.problem))
    return replace(alone, presets=tuple(presets), alternatives=tuple(best_alternatives(task, alone.plan)))


def explain(alone: Comparison) -> ExecutionPlan:
    """The plan with its rationale."""
    task, result, simple = alone.task, alone.result, alone.heuristic
    origin = "given to the run"
    if result:
        options = " x ".join(map(str, result.num_options.values()))
        origin = f"the best of {result.evaluations:,} plans that a search looked at, out of {options} options"
    rationale = Rationale(
        origin=origin,
        hardware=task.cluster.hardware.name,
        profiled=task.costs.profiled,
        certificate=str(alone.certificate or ""),
        limits=alone.analysis.limits,
        heuristic_step_s=simple.prediction.step_s if simple.prediction else None,
        heuristic_fits=not simple.problem,
        device_memory_bytes=task.cluster.device_memory_bytes,
        memory=_memory(alone.analysis.prediction.needs),
        instead=tuple(_instead(alternative) for alternative in best_alternatives(task, alone.plan)),
    )
    return msgspec.structs.replace(alone.plan, rationale=rationale)


def _memory(needs: list[DeviceNeed]) -> tuple[DeviceMemory, ...]:
    """Neighbouring devices with the same needs are one entry."""
    memory, first = [], 0
    for need, group in groupby(needs):
        devices = (first, len(list(group)))
        memory.append(DeviceMemory(devices=devices, **{name: round(size) for name, size in asdict(need).items()}))
        first = sum(devices)
    return tuple(memory)


def _instead(alternative: Alternative) -> Instead:
    option = alternative.option
    plural = "es" if option and option.micro_batches != 1 else ""
    return Instead(
        call=alternative.call,
        layout=f"{option.layout}, {option.micro_batches} micro-batch{plural}" if option else "",
        slower_by=alternative.slower_by if option else 0.0,
        num_too_large=alternative.num_too_large,
        num_others=alternative.num_options,
    )


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
        "plans": [_candidate(task, candidate) for candidate in comparison.candidates],
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
    prediction = analysis.prediction
    return result | {
        "step_s": prediction.step_s,
        "tokens_per_s": analysis.tokens_per_s,
        "gpu_hours_per_million_tokens": analysis.gpu_hours_per_million_tokens,
        "peak_bytes": prediction.peak_bytes,
        "device_bytes": prediction.device_bytes,
        "communicator_bytes": [need.communicator_bytes for need in prediction.needs],
        "longest_chain": analysis.chain,
        "busiest_device": analysis.busiest_device,
        "busy": analysis.busy,
        "plan": prediction.plan,
        "sharded": {name: str(found) for name, found in task.shardings(prediction.plan).items()},
    }


def solve_cases(
    tasks: Mapping[str, PlanningTask], search: Callable[[PlanningTask], SearchResult]
) -> dict[str, Comparison | UserError]:
    """By name the best plan of each task, or why there is none: one search for each.

    Tasks on one cluster come in the order of their staleness: the plan of one counts for the next one, too, in the
    order that is the fastest there.
    """
    is_one_cluster = len({task.cluster for task in tasks.values()}) == 1
    results: dict[str, Comparison | UserError] = {}
    fresher = None
    for name, task in tasks.items():
        try:
            result = search(task)
        except UserError as error:
            results[name] = error
            continue
        if is_one_cluster and fresher:
            in_flight = task.max_steps_in_flight
            plan = msgspec.structs.replace(fresher, order=(), max_steps_in_flight=in_flight, predicted_step_s=None)
            predictions = (result.prediction, predict_in_best_order(task, plan))
            result = replace(result, prediction=min(predictions, key=lambda each: each.step_s))
        fresher = result.plan
        results[name] = describe(task, result)
    return results
