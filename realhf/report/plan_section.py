"""The plan of a run on its page: where every call runs, and why."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from realhf.dataflow.interface import PREEMPTIONS
from realhf.dataflow.plan import ExecutionPlan, interval_text, updates_text
from realhf.dataflow.rationale import Instead, Rationale, Worth, slower_text
from realhf.report.html import part

# Notes of the search that the rationale has in full.
SAID = ("evaluations", "peak_memory_gib", "lower_bound_s", "proven_optimal", "hardware", "costs")


def plan_section(plan: ExecutionPlan, lines: Sequence[Mapping[str, Any]]) -> Markup:
    """The section of the plan, with its reasons if it has a rationale; `lines` of metrics are of steps under it."""
    why = plan.rationale
    words = [["order", _order(plan)], ["steps in flight", f"at most {plan.max_steps_in_flight}"]]
    if plan.copies:
        words.append(["parameters not from home", plan.copies_text])
    if plan.broadcasts:
        words.append(["parameters by broadcasts", ", ".join(plan.broadcasts)])
    if plan.changes:
        words.append(["copies that get only what changed", ", ".join(plan.changes)])
    if plan.staleness:
        words.append(["rollouts", f"by weights {updates_text(plan.staleness)} old"])
    if why:
        words += [*_reasons(plan, why), *_preemptions(why, lines)]
    words += [[name, _note(value)] for name, value in plan.notes.items() if not (why and name in SAID)]
    return part(
        "execution_plan.html",
        calls=call_rows(plan),
        words=words,
        worth=[_worth(plan, one) for one in why.worth] if why else [],
        instead=[_instead(one) for one in why.instead] if why else [],
    )


def call_rows(plan: ExecutionPlan) -> list[list[str]]:
    """The cells of a table of the plan's calls, beginning with the name."""
    ranges = plan.intervals.call_s if plan.intervals else {}
    rows = [
        [
            name,
            call.mesh.text,
            call.replicas_text,
            str(call.tp),
            call.stages_text,
            str(call.micro_batches),
            str(call.compute) or "-",
            "-" if call.predicted_s is None else f"{call.predicted_s:.3f}",
            interval_text(ranges.get(name)),
        ]
        for name, call in plan.calls.items()
    ]
    beside = [
        [name, "beside", *["-"] * 5, f"{seconds:.3f}", interval_text(ranges.get(name))]
        for name, seconds in plan.beside.items()
    ]
    return rows + beside


def _reasons(plan: ExecutionPlan, why: Rationale) -> list[list[str]]:
    step_s = plan.predicted_step_s
    source = "measured layer timings" if why.profiled else "the analytic model (no profile was there)"
    reasons = [["chosen", why.origin], ["predicted from", f"{source}, hardware {why.hardware}"]]
    if why.certificate:
        reasons.append(["how good", why.certificate])
    if why.heuristic_step_s is None:
        heuristic = "none is legal"
    else:
        fits = "" if why.heuristic_fits else ", and does not fit into memory"
        ratio = f", {why.heuristic_step_s / step_s:.2f} x this plan" if step_s else ""
        heuristic = f"{why.heuristic_step_s:.4g} s a step{ratio}{fits}"
    return [*reasons, ["all calls alike", heuristic], ["limited by", why.limits]]


def _preemptions(why: Rationale, lines: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A row for each generation whose KV cache does not hold all sequences: as predicted, and as measured."""
    rows = []
    for name, predicted in why.preemptions.items():
        calls = [line["calls"][name] for line in lines if name in line["calls"]]
        counts = [call[PREEMPTIONS] for call in calls if PREEMPTIONS in call]
        measured = f", {statistics.median(counts):.0f} measured (median)" if counts else ""
        rows.append([f"preemptions of {name}", f"{predicted:.0f} a step and rank predicted{measured}"])
    return rows


def _instead(one: Instead) -> list[str]:
    slower = slower_text(one.slower_by) if one.layout else "-"
    return [one.call, one.layout or "nothing else fits", slower, f"{one.num_too_large:,} of {one.num_others:,}"]


def _worth(plan: ExecutionPlan, one: Worth) -> list[str]:
    if one.without_s is None:
        return [one.of, one.feature, "does not fit", ""]
    longer = f"{one.without_s / plan.predicted_step_s - 1:+.1%}" if plan.predicted_step_s else ""
    return [one.of, one.feature, f"{one.without_s:.4g} s", longer]


def _order(plan: ExecutionPlan) -> str:
    if not plan.order:
        return "one step after the other, the calls as listed"
    return " → ".join(
        entry.call
        + (f" (of {entry.steps_back} step{'s' if entry.steps_back > 1 else ''} before)" if entry.steps_back else "")
        for entry in plan.order
    )


def _note(value: str | int | float | bool) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
