"""A plan beside the presets and the alternatives of its calls: everything that `realhf plan --compare` says."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from realhf.planning.explain.alternatives import Alternative, best_alternatives
from realhf.planning.explain.analysis import Analysis, analyse
from realhf.planning.model.features import differences
from realhf.planning.presets import evaluate_presets
from realhf.planning.search import SearchResult
from realhf.planning.task import PlanningTask

SEARCHED, GIVEN = "searched", "given"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan and what is known of it; `problem` says why it cannot run (`analysis` is None where there is no plan)."""

    name: str
    analysis: Analysis | None
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """No plan of the options takes less than `lower_bound_s` a step; the searched one takes `cost_s` as simulated.

    Without `has_all_meshes` the options are those on aligned powers of two of nodes.
    """

    cost_s: float
    lower_bound_s: float
    proven: bool
    has_all_meshes: bool = True

    @property
    def gap(self) -> float:
        """How much slower than the best the plan can be, at most; 0 where it is proven."""
        return 0.0 if self.proven else self.cost_s / self.lower_bound_s - 1

    def __str__(self) -> str:
        plans = "plan" if self.has_all_meshes else "plan on meshes of aligned powers of two (all that was searched)"
        if self.proven:
            return f"optimal: no {plans} takes less than {self.cost_s:.4g} s a step"
        if self.lower_bound_s <= 0:
            return "no lower bound was proven"
        return (
            f"no {plans} takes less than {self.lower_bound_s:.4g} s a step; this one is within {self.gap:.1%} of that"
        )


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """`plan` first, then the presets, in their own order; `search_trace` as `SearchResult.trace`."""

    task: PlanningTask
    plan: Candidate
    presets: tuple[Candidate, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    certificate: Certificate | None = None
    search_trace: tuple[tuple[float, float], ...] = ()


def certificate_of(result: SearchResult) -> Certificate:
    return Certificate(
        cost_s=result.cost_s,
        lower_bound_s=result.lower_bound_s,
        proven=result.proven,
        has_all_meshes=result.has_all_meshes,
    )


def compare(task: PlanningTask, plan: Candidate, result: SearchResult | None) -> Comparison:
    """Evaluates all presets, and every other layout of every call of the plan."""
    assert plan.analysis is not None
    presets = []
    for preset in result.rules if result else evaluate_presets(task):
        analysis = analyse(task, preset.prediction) if preset.prediction else None
        presets.append(Candidate(name=preset.name, analysis=analysis, problem=preset.problem))
    return Comparison(
        task=task,
        plan=plan,
        presets=tuple(presets),
        alternatives=tuple(best_alternatives(task, plan.analysis.prediction.plan)),
        certificate=certificate_of(result) if result else None,
        search_trace=result.trace if result else (),
    )


def summary(comparison: Comparison) -> dict[str, Any]:
    """The comparison as JSON data; times in seconds, memory in bytes."""
    task, certificate = comparison.task, comparison.certificate
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
        "certificate": certificate
        and {
            "cost_s": certificate.cost_s,
            "lower_bound_s": certificate.lower_bound_s,
            "proven": certificate.proven,
            "has_all_meshes": certificate.has_all_meshes,
        },
        "search_trace": [list(point) for point in comparison.search_trace],
        "plans": [_candidate(task, candidate) for candidate in (comparison.plan, *comparison.presets)],
        "alternatives": [_alternative(alternative) for alternative in comparison.alternatives],
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
        "plan": msgspec.to_builtins(analysis.prediction.plan),
        "sharded": {name: str(found) for name, found in task.shardings(analysis.prediction.plan).items()},
    }


def _alternative(alternative: Alternative) -> Mapping[str, Any]:
    found = alternative.option is not None
    return {
        "call": alternative.call,
        "option": msgspec.to_builtins(alternative.option),
        "step_s": alternative.step_s if found else None,
        "planned_step_s": alternative.planned_step_s,
        "num_options": alternative.num_options,
        "num_too_large": alternative.num_too_large,
    }
