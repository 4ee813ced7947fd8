"""The HTML page of a report: one file with everything in it, readable without a network."""

import json
import statistics
import time
from itertools import groupby
from pathlib import Path

from markupsafe import Markup

from realhf.base.durations import duration
from realhf.base.files import write_atomically
from realhf.dataflow.plan import ExecutionPlan, interval_text
from realhf.report.curves import EVALUATION, Curve, curves_of
from realhf.report.figures import timeline_figure, times_figure
from realhf.report.html import document, part
from realhf.report.plan_section import plan_section
from realhf.report.run_data import CallTime, RunData, call_times, read_run
from realhf.report.samples_section import samples_section
from realhf.report.timeline import last_steps
from realhf.report.worker_memory import memory_section
from realhf.rundir.paths import RunDirectory

MAX_EVALUATIONS = 12  # columns of a table


def write_report(directory: RunDirectory) -> Path:
    """Writes `report.html` of a run in any state, replacing an earlier one; returns its path.

    Raises:
        UserError: the directory is not a run's, or another version of realhf has written it.
    """
    write_atomically(directory.report, page(read_run(directory), now_s=time.time()).encode())
    return directory.report


def page(run: RunData, now_s: float) -> str:
    """The whole page as HTML; `now_s` is the time of the report in seconds since the epoch."""
    kind = run.experiment.get("experiment_class")
    shown = _shown_evaluations(len(run.evaluations))
    return document(
        "report.html",
        title=f"{run.path.name}: {run.state}",
        name=f"{run.path.name} ({kind})" if kind else run.path.name,
        run=run,
        now_s=now_s,
        clock=_clock,
        age=_age(run, now_s),
        values=_facts(run),
        charts=_charts(run),
        shown=[f"step {run.evaluations[i]['step']}" for i in shown],
        evaluations=[
            [name, *(_number(values[i], ".4g") for i in shown)]
            for name, (_, values) in curves_of(run.evaluations).items()
        ],
        samples=samples_section(run.samples),
        under_plan=_under_plan(run, run.plan) if run.plan else "",
        # Further lines of a message are the end of a log.
        events=[
            [_clock(event.time_s), event.event, event.step, event.message.partition("\n")[0]] for event in run.happened
        ],
        plans=_plans(run),
        experiment=json.dumps(run.experiment, indent=2),
    )


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _age(run: RunData, now_s: float) -> str:
    """How old the status of a run is that is not over: the run may have died without writing another."""
    if run.status is None or run.status.state not in ("starting", "running"):
        return ""
    return f"; the run wrote its status {duration(max(now_s - run.status.updated, 0.0))} before"


def _facts(run: RunData) -> list[tuple[str, str]]:
    status, plan, step_s = run.status, run.plan, run.median_step_s
    done = max([line["step"] for line in run.metrics], default=status.step if status else 0)
    predicted = f"{plan.predicted_step_s:.3g} s predicted" if plan and plan.predicted_step_s else "no prediction"
    return [
        (f"{done} of {status.steps}" if status and status.steps else str(done), "steps"),
        (_number(run.tokens_per_s, ",.0f"), "tokens/s, whole run"),
        ("-" if step_s is None else f"{step_s:.3g} s", f"a step (median); {predicted}"),
        (str(plan.num_devices) if plan else "-", "device" if plan and plan.num_devices == 1 else "devices"),
    ]


def _charts(run: RunData) -> tuple[dict[str, dict[str, Curve]], dict[str, dict[str, Curve]]]:
    """The charts to show first, and the others: one a statistic, but for the accuracies, which have one scale."""
    main, others = ({name: {name: curve} for name, curve in curves.items()} for curves in run.curves)
    prefix = f"{EVALUATION}: "
    accuracies = [name for name in main if name.startswith(f"{prefix}accuracy")]
    together = {name.removeprefix(prefix): main.pop(name)[name] for name in accuracies}
    return ({EVALUATION: together} if together else {}) | main, others


def _shown_evaluations(count: int) -> list[int]:
    """The places of those in the table; the first and the last one are among them."""
    if count <= MAX_EVALUATIONS:
        return list(range(count))
    return [place * (count - 1) // (MAX_EVALUATIONS - 1) for place in range(MAX_EVALUATIONS)]


def _under_plan(run: RunData, plan: ExecutionPlan) -> Markup:
    """The sections that need a plan."""
    times = call_times(plan, run.metrics)
    whole = CallTime(
        call="whole step",
        predicted_s=plan.predicted_step_s,
        measured_s=run.median_step_s,
        interval_s=plan.intervals.step_s if plan.intervals else None,
    )
    count = len(run.under_plan)
    is_known = any(time.measured_s is not None or time.predicted_s is not None for time in times)
    return part(
        "under_plan.html",
        times=[
            [
                time.call,
                _number(time.predicted_s, ".3f"),
                interval_text(time.interval_s),
                _number(time.measured_s, ".3f"),
                _number(time.ratio, ".2f"),
            ]
            for time in [*times, whole]
        ],
        steps=f"{count} step{'' if count == 1 else 's'}" + (" under this plan" if count < len(run.metrics) else ""),
        is_predicted=any(time.predicted_s for time in times),
        times_figure=times_figure(times) if is_known else None,
        timeline=last_steps(plan, run.events),
        timeline_figure=timeline_figure,
        memory=memory_section(plan, run.under_plan),
        execution_plan=plan_section(plan, run.under_plan),
    )


def _plans(run: RunData) -> list[list[str]]:
    """Steps, workers, plan and seconds a step from each change of workers or plan to the next."""
    rows = []
    for (plan, num_workers), lines in groupby(run.metrics, lambda line: (line.get("plan"), line.get("num_workers"))):
        made = list(lines)
        step_s = statistics.median(line["time_s"] for line in made)
        rows.append([f"{made[0]['step']}-{made[-1]['step']}", str(num_workers), str(plan), f"{step_s:.3g}"])
    return rows


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
