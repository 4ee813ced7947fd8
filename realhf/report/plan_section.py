"""The plan of a run on its page: where every call runs, and why."""

from realhf.dataflow.plan import ExecutionPlan, interval_text, updates_text
from realhf.dataflow.rationale import Instead, Rationale
from realhf.report.html import section, table

SAME = 5e-4
# Notes of the search that the rationale has in full.
SAID = ("evaluations", "peak_memory_gib", "lower_bound_s", "proven_optimal", "hardware", "costs")


def plan_section(plan: ExecutionPlan) -> str:
    """The section of the plan, with its reasons if it has a rationale."""
    why = plan.rationale
    header = ["call", "devices", "dp", "tp", "pp", "micro-batches", "computed with", "predicted, s", "90 %, s"]
    ranges = plan.intervals.call_s if plan.intervals else {}
    rows = [
        [
            name,
            _devices(*call.devices),
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
    rows += [
        [name, "beside", *["-"] * 5, f"{seconds:.3f}", interval_text(ranges.get(name))]
        for name, seconds in plan.beside.items()
    ]
    words = [["order", _order(plan)], ["steps in flight", f"at most {plan.max_steps_in_flight}"]]
    if plan.copies:
        words.append(["parameters not from home", plan.copies_text])
    if plan.staleness:
        words.append(["rollouts", f"by weights {updates_text(plan.staleness)} old"])
    if why:
        words += _reasons(plan, why)
    words += [[name, _note(value)] for name, value in plan.notes.items() if not (why and name in SAID)]
    body = [table(header, rows), table([], words, style="words")]
    if why and why.worth:
        body.append(_worth(plan, why))
    if why and why.instead:
        body.append(_instead(why))
    return section("Execution plan and why", *body)


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


def _instead(why: Rationale) -> str:
    """The table of the best other layout of each call."""
    header = ["call", "best other layout", "step slower by", "layouts that do not fit"]
    rows = [
        [one.call, one.layout or "nothing else fits", _slower(one), f"{one.num_too_large:,} of {one.num_others:,}"]
        for one in why.instead
    ]
    note = '<p class="muted">Each call in its best other layout, predicted, the rest of the plan as it is.</p>'
    return f"<details><summary>why not otherwise</summary>{note}{table(header, rows)}</details>"


def _worth(plan: ExecutionPlan, why: Rationale) -> str:
    """The table of the gain of each choice of the plan."""
    rows = []
    for one in why.worth:
        without = "does not fit" if one.without_s is None else f"{one.without_s:.4g} s"
        share = ""
        if one.without_s is not None and plan.predicted_step_s:
            share = f"{one.without_s / plan.predicted_step_s - 1:+.1%}"
        rows.append([one.of, one.feature, without, share])
    note = '<p class="muted">A step of the best plan found without it, the rest of the plan as it is.</p>'
    return note + table(["call or model", "chosen", "step without it", "longer by"], rows)


def _slower(instead: Instead) -> str:
    if not instead.layout:
        return "-"
    return "the same" if abs(instead.slower_by) < SAME else f"{instead.slower_by:+.1%}"


def _order(plan: ExecutionPlan) -> str:
    if not plan.order:
        return "one step after the other, the calls as listed"
    return " → ".join(
        entry.call
        + (f" (of {entry.steps_back} step{'s' if entry.steps_back > 1 else ''} before)" if entry.steps_back else "")
        for entry in plan.order
    )


def _devices(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first}-{first + count - 1}"


def _note(value: str | int | float | bool) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
