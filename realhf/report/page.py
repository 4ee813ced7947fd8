"""The HTML page of a report: one file with everything in it, readable without a network."""

import json
import statistics
import time
from collections.abc import Mapping
from html import escape
from itertools import groupby
from pathlib import Path

from realhf.base.durations import duration
from realhf.base.files import write_atomically
from realhf.dataflow.plan import ExecutionPlan, interval_text
from realhf.report.curves import Curve, curves_of, evaluation_curves, split_curves
from realhf.report.figures import curves_figure, timeline_figure, times_figure
from realhf.report.html import document, figure_html, section, table
from realhf.report.plan_section import plan_section
from realhf.report.run_data import RunData, call_times, read_run
from realhf.report.samples_section import samples_section
from realhf.report.timeline import EVALUATION, last_steps
from realhf.report.worker_memory import memory_section
from realhf.rundir.paths import RunDirectory
from realhf.rundir.status import Status

MAX_EVALUATIONS = 12  # columns of a table
STATE_NAMES = {
    "starting": "starting",
    "running": "running",
    "done": "finished",
    "failed": "failed",
    "interrupted": "interrupted",
    "stopped": "stopped with a checkpoint",
    "requeued": "its job is to start once more",
    "replan": "between two plans",
}


def write_report(directory: RunDirectory) -> Path:
    """Writes `report.html` of a run in any state, replacing an earlier one; returns its path.

    Raises:
        UserError: the directory is not a run's, or another version of realhf has written it.
    """
    write_atomically(directory.report, page(read_run(directory), now_s=time.time()).encode())
    return directory.report


def page(run: RunData, now_s: float) -> str:
    """The whole page as HTML; `now_s` is the time of the report in seconds since the epoch."""
    sections = [
        _head(run, now_s),
        _curves(run),
        _evaluations(run),
        samples_section(run.samples),
        *(_under_plan(run, run.plan) if run.plan else []),
        _events(run),
        _experiment(run),
    ]
    return document(f"{run.path.name}: {_state(run.status)}", sections)


def _under_plan(run: RunData, plan: ExecutionPlan) -> list[str]:
    """The sections that need a plan."""
    return [_times(run, plan), _timeline(run, plan), memory_section(plan, run.under_plan), plan_section(plan)]


def _state(status: Status | None) -> str:
    return STATE_NAMES[status.state] if status else "not started"


def _head(run: RunData, now_s: float) -> str:
    status = run.status
    done = max([line["step"] for line in run.metrics], default=status.step if status else 0)
    tokens_per_s, step_s = run.tokens_per_s, run.median_step_s
    plan = run.plan
    predicted = f"{plan.predicted_step_s:.3g} s predicted" if plan and plan.predicted_step_s else "no prediction"
    num_devices = plan.num_devices if plan else None
    facts = [
        (f"{done} of {status.steps}" if status else str(done), "steps"),
        ("-" if tokens_per_s is None else f"{tokens_per_s:,.0f}", "tokens/s, whole run"),
        ("-" if step_s is None else f"{step_s:.3g} s", f"a step (median); {predicted}"),
        ("-" if num_devices is None else str(num_devices), "device" if num_devices == 1 else "devices"),
    ]
    lines = [
        f'<div class="title"><h1>{escape(_name(run))}</h1>',
        f'<span class="state {status.state if status else ""}">{_state(status)}</span></div>',
        f'<div class="path muted">{escape(str(run.path))} · report of {_clock(now_s)}{_age(status, now_s)}</div>',
        '<div class="facts">',
        *(f"<div><b>{escape(value)}</b><span>{escape(what)}</span></div>" for value, what in facts),
        "</div>",
    ]
    if status and status.message:
        lines.append(f'<pre class="failure">{escape(status.message.strip())}</pre>')
    lines += [f'<pre class="failure">damaged: {escape(sentence)}</pre>' for sentence in run.damaged]
    return "\n".join(lines)


def _name(run: RunData) -> str:
    kind = run.experiment.get("experiment_class")
    return f"{run.path.name} ({kind})" if kind else run.path.name


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _age(status: Status | None, now_s: float) -> str:
    """How old the status of a run is that is not over: the run may have died without writing another."""
    if status is None or status.state not in ("starting", "running"):
        return ""
    return f"; the run wrote its status {duration(max(now_s - status.updated, 0.0))} before"


def _curves(run: RunData) -> str:
    (main, others), (quality, rest) = split_curves(run.metrics), evaluation_curves(run.evaluations)
    together = {name: curve for name, curve in quality.items() if name.startswith("accuracy")}  # on one scale
    single = _own_charts({name: curve for name, curve in quality.items() if name not in together}, f"{EVALUATION}: ")
    charts = ({EVALUATION: together} if together else {}) | single | _own_charts(main)
    return metrics_section(charts, _own_charts(rest, f"{EVALUATION}: ") | _own_charts(others))


def _own_charts(curves: dict[str, Curve], prefix: str = "") -> dict[str, dict[str, Curve]]:
    return {prefix + name: {prefix + name: curve} for name, curve in curves.items()}


def _evaluations(run: RunData) -> str:
    """A table of all statistics of the evaluations; "" if there are none."""
    curves = curves_of(run.evaluations)
    if not curves:
        return ""
    lines = run.evaluations
    shown = list(range(len(lines)))
    if len(lines) > MAX_EVALUATIONS:  # the first and the last one are among them
        shown = [place * (len(lines) - 1) // (MAX_EVALUATIONS - 1) for place in range(MAX_EVALUATIONS)]
    rows = [[name, *(_short_number(values[i]) for i in shown)] for name, (_, values) in curves.items()]
    note = f"After how many steps; {len(shown)} of {len(lines)} evaluations." if len(shown) < len(lines) else ""
    header = ["statistic", *(f"step {lines[i]['step']}" for i in shown)]
    return section("Evaluations", f'<p class="muted">{note or "After how many steps."}</p>', table(header, rows))


def metrics_section(
    main: dict[str, dict[str, Curve]], others: dict[str, dict[str, Curve]], colours: Mapping[str, str] | None = None
) -> str:
    """The charts to show first, and the others folded. See `curves_figure`."""
    if not main and not others:
        return section("Metrics", '<p class="muted">No step has ended yet.</p>')
    body = [figure_html(curves_figure(main, colours))] if main else []
    if others:
        figure = figure_html(curves_figure(others, colours))
        body.append(f"<details{'' if main else ' open'}><summary>all other statistics</summary>{figure}</details>")
    return section("Metrics", '<p class="muted">Over the steps.</p>', *body)


def _times(run: RunData, plan: ExecutionPlan) -> str:
    times = call_times(plan, run.metrics)
    rows = [
        [time.call, _seconds(time.predicted_s), interval_text(time.interval_s), _seconds(time.measured_s),
         _ratio(time.ratio)]
        for time in times
    ]  # fmt: skip
    predicted_s, step_s = plan.predicted_step_s, run.median_step_s
    ratio = step_s / predicted_s if predicted_s and step_s is not None else None
    of_step = interval_text(plan.intervals.step_s if plan.intervals else None)
    total = ["whole step", _seconds(predicted_s), of_step, _seconds(step_s), _ratio(ratio)]
    header = ["call", "predicted, s", "90 %, s", "measured, s", "measured / predicted"]
    count = len(run.under_plan)
    steps = f"{count} step{'' if count == 1 else 's'}" + (" under this plan" if count < len(run.metrics) else "")
    note = f"Measured: the median of {steps}; reallocation and transfer count in the whole step only."
    if not any(time.predicted_s for time in times):
        note += " The plan carries no predictions (it was not made by a search)."
    body = [f'<p class="muted">{note} Calls overlap, so they need not add up to the step.</p>']
    body.append(table(header, [*rows, total], has_total=True))
    if any(time.measured_s is not None or time.predicted_s is not None for time in times):
        body.append(figure_html(times_figure(times)))
    return section("Predicted against measured time", *body)


def _timeline(run: RunData, plan: ExecutionPlan) -> str:
    timeline = last_steps(plan, run.events)
    if timeline is None:
        return section("Timeline", '<p class="muted">No step is complete in the trace yet.</p>')
    steps = " and ".join(str(step) for step in timeline.steps)
    return section(
        f"Timeline of step{'' if len(timeline.steps) == 1 else 's'} {steps}",
        '<p class="muted">Activities of every worker; the legend gives the share of all workers\' time. Waiting for '
        "other workers inside a call counts as the call. The whole run: <code>trace.json</code> opens in Perfetto.</p>",
        figure_html(timeline_figure(timeline)),
    )


def _events(run: RunData) -> str:
    """The section of events of the run as a whole, such as restarts and new plans."""
    title = "Changes of the run"
    if not run.happened:
        return section(title, '<p class="muted">Nothing is noted: no restart, no other plan.</p>')
    rows = []
    for event in run.happened:
        message = event.message.partition("\n")[0]  # further lines are the end of a log
        rows.append([_clock(event.time_s), event.event, str(event.step), message])
    note = '<p class="muted">Starts, checkpoints, failures, restarts and other plans, after how many steps.</p>'
    return section(title, note, table(["time", "what", "steps made", ""], rows, style="words"), _plans(run))


def _plans(run: RunData) -> str:
    """A table of steps, workers and plans, if workers or plan have changed; else nothing."""
    rows = []
    for (plan, num_workers), lines in groupby(run.metrics, lambda line: (line.get("plan"), line.get("num_workers"))):
        made = list(lines)
        step_s = statistics.median(line["time_s"] for line in made)
        rows.append([f"{made[0]['step']}-{made[-1]['step']}", str(num_workers), str(plan), f"{step_s:.3g}"])
    if len(rows) < 2:
        return ""
    note = "The plan is <code>plan.json</code>, those before are <code>plan-1.json</code> and so on."
    return f'<p class="muted">{note}</p>' + table(["steps", "workers", "plan", "s a step (median)"], rows)


def _experiment(run: RunData) -> str:
    if not run.experiment:
        return ""
    text = escape(json.dumps(run.experiment, indent=2))
    return section("Experiment", f"<details><summary>every field, resolved</summary><pre>{text}</pre></details>")


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _short_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
