"""The HTML page of a report: one file with everything in it, readable without a network."""

import json
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import plotly.io
from plotly.offline import get_plotlyjs

from realhf.api.plan import ExecutionPlan, write_atomically
from realhf.api.status import Status
from realhf.report.figures import accuracy_curves, curves_figure, split_curves, timeline_figure, times_figure
from realhf.report.run_data import RunData, call_times, read_run
from realhf.report.timeline import EVALUATION, last_steps
from realhf.scheduler.run_directory import RunDirectory

# The browser is told to load nothing from anywhere.
CONTENT_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"

STATE_NAMES = {
    "starting": "starting",
    "running": "running",
    "done": "finished",
    "failed": "failed",
    "interrupted": "interrupted",
}

STYLE = """
:root { color-scheme: light }
* { box-sizing: border-box }
body { margin: 0; background: #f4f5f7; color: #24292f }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif }
main { max-width: 1180px; margin: 0 auto; padding: 28px 24px 60px }
h1 { font-size: 26px; margin: 0; overflow-wrap: anywhere }
h2 { font-size: 18px; margin: 0 0 4px }
p { margin: 4px 0 10px } .muted { color: #6a737d } .path { font-size: 13px; overflow-wrap: anywhere }
section { background: white; border: 1px solid #e3e6ea; border-radius: 10px; padding: 18px 22px; margin-top: 18px }
.title { display: flex; gap: 14px; align-items: center; flex-wrap: wrap }
.state { border-radius: 999px; padding: 2px 14px; font-weight: 600; font-size: 14px; background: #e3e6ea }
.state.done { background: #d9f2e3; color: #17663c }
.state.running, .state.starting { background: #dbe8fb; color: #1d4f91 }
.state.failed { background: #fbdedb; color: #9a2318 } .state.interrupted { background: #fdecd2; color: #8a5300 }
.facts { display: flex; flex-wrap: wrap; gap: 12px 44px; margin-top: 16px }
.facts div { min-width: 90px } .facts b { display: block; font-size: 21px; font-weight: 600; line-height: 1.3 }
.facts span { color: #6a737d; font-size: 13px }
pre { background: #f6f7f9; border-radius: 6px; padding: 12px; font-size: 13px; line-height: 1.45 }
pre { white-space: pre-wrap; overflow-wrap: anywhere }
pre.failure { background: #fdf1f0; border-left: 4px solid #d1483a; max-height: 340px; overflow-y: auto }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; margin: 8px 0 }
th, td { padding: 5px 22px 5px 0; text-align: right; border-bottom: 1px solid #eceef1; white-space: nowrap }
th { color: #6a737d; font-weight: 500 } th:first-child, td:first-child { text-align: left }
table.words td:last-child { text-align: left; white-space: normal; overflow-wrap: anywhere }
summary { cursor: pointer; color: #1d4f91; margin-top: 6px }
code { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 13px }
.total td { font-weight: 600 }
"""

# A figure inside a closed <details> has no size until it is opened.
SCRIPT = """
document.querySelectorAll("details").forEach(d => d.addEventListener("toggle",
  () => d.querySelectorAll(".js-plotly-plot").forEach(p => Plotly.Plots.resize(p))));
"""


def write_report(directory: RunDirectory) -> Path:
    """Writes `report.html` of a run, whatever its state, in place of an earlier one; returns its path.

    Raises:
        UserError: the directory is none of a run, or one of its files is damaged.
    """
    write_atomically(directory.report, page(read_run(directory), now_s=time.time()).encode())
    return directory.report


def page(run: RunData, now_s: float) -> str:
    """The whole page as HTML; `now_s` is the time of the report in seconds since the epoch."""
    sections = [_head(run, now_s), _curves(run), _times(run), _timeline(run), _plan(run.plan), _experiment(run)]
    return document(f"{run.path.name}: {_state(run.status)}", sections)


def document(title: str, sections: Sequence[str]) -> str:
    """A page that holds its style, its scripts and plotly, and loads nothing."""
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{CONTENT_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style><script>{get_plotlyjs()}</script></head><body><main>",
            *sections,
            f"</main><script>{SCRIPT}</script></body></html>\n",
        ]
    )


def _state(status: Status | None) -> str:
    return STATE_NAMES[status.state] if status else "not started"


def _head(run: RunData, now_s: float) -> str:
    status = run.status
    done = max([line["step"] for line in run.metrics], default=status.step if status else 0)
    tokens_per_s, step_s = run.tokens_per_s, run.median_step_s
    predicted = f"{run.plan.predicted_step_s:.3g} s predicted" if run.plan.predicted_step_s else "no prediction"
    facts = [
        (f"{done} of {status.steps}" if status else str(done), "steps"),
        ("-" if tokens_per_s is None else f"{tokens_per_s:,.0f}", "tokens/s, whole run"),
        ("-" if step_s is None else f"{step_s:.3g} s", f"a step (median); {predicted}"),
        (str(run.plan.num_devices), "device" if run.plan.num_devices == 1 else "devices"),
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
    return "\n".join(lines)


def _name(run: RunData) -> str:
    kind = run.experiment.get("experiment_class")
    return f"{run.path.name} ({kind})" if kind else run.path.name


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _age(status: Status | None, now_s: float) -> str:
    """How long ago a run that is not over was last heard of: it may have died without a word."""
    if status is None or status.state not in ("starting", "running"):
        return ""
    return f"; the run wrote its status {_duration(now_s - status.updated)} before"


def _duration(seconds: float) -> str:
    minutes = seconds / 60
    if minutes < 2:
        return f"{max(0.0, seconds):.0f} s"
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.0f} h"


def _curves(run: RunData) -> str:
    main, others = split_curves(run.metrics)
    charts = {name: {name: curve} for name, curve in main.items()}
    evaluations = accuracy_curves(run.evaluations)
    if evaluations:
        charts = {EVALUATION: evaluations} | charts
    if not charts and not others:
        return section("Metrics", '<p class="muted">No step has ended yet.</p>')
    body = [figure_html(curves_figure(charts))] if charts else []
    if others:
        figure = figure_html(curves_figure({name: {name: curve} for name, curve in others.items()}))
        body.append(f"<details{'' if charts else ' open'}><summary>all other statistics</summary>{figure}</details>")
    return section("Metrics", '<p class="muted">Over the steps.</p>', *body)


def _times(run: RunData) -> str:
    times = call_times(run.plan, run.metrics)
    rows = [[time.call, _seconds(time.predicted_s), _seconds(time.measured_s), _ratio(time.ratio)] for time in times]
    predicted_s, step_s = run.plan.predicted_step_s, run.median_step_s
    ratio = step_s / predicted_s if predicted_s and step_s is not None else None
    total = ["whole step", _seconds(predicted_s), _seconds(step_s), _ratio(ratio)]
    header = ["call", "predicted, s", "measured, s", "measured / predicted"]
    steps = f"{len(run.metrics)} step{'' if len(run.metrics) == 1 else 's'}"
    note = f"Measured: the median of {steps}; reallocation and transfer count in the whole step only."
    if not any(time.predicted_s for time in times):
        note += " The plan carries no predictions (it was not made by a search)."
    body = [f'<p class="muted">{note} Calls overlap, so they need not add up to the step.</p>']
    body.append(table(header, [*rows, total], has_total=True))
    if any(time.measured_s is not None or time.predicted_s is not None for time in times):
        body.append(figure_html(times_figure(times)))
    return section("Predicted against measured time", *body)


def _timeline(run: RunData) -> str:
    timeline = last_steps(run.plan, run.events)
    if timeline is None:
        return section("Timeline", '<p class="muted">No step is complete in the trace yet.</p>')
    steps = " and ".join(str(step) for step in timeline.steps)
    return section(
        f"Timeline of step{'' if len(timeline.steps) == 1 else 's'} {steps}",
        '<p class="muted">What every worker did; the legend gives the share of all workers\' time. Waiting for other '
        "workers inside a call counts as the call. The whole run: <code>trace.json</code> opens in Perfetto.</p>",
        figure_html(timeline_figure(timeline)),
    )


def _plan(plan: ExecutionPlan) -> str:
    header = ["call", "devices", "dp", "tp", "pp", "micro-batches", "predicted, s"]
    rows = [
        [name, _devices(*c.devices), str(c.dp), str(c.tp), c.stages_text, str(c.micro_batches), _seconds(c.predicted_s)]
        for name, c in plan.calls.items()
    ]
    words = [
        ["order", _order(plan)],
        ["steps in flight", f"at most {plan.max_steps_in_flight}"],
        *([name, _note(value)] for name, value in plan.notes.items()),
    ]
    return section("Execution plan", table(header, rows), table([], words, style="words"))


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


def _experiment(run: RunData) -> str:
    if not run.experiment:
        return ""
    text = escape(json.dumps(run.experiment, indent=2))
    return section("Experiment", f"<details><summary>every field, resolved</summary><pre>{text}</pre></details>")


def section(title: str, *body: str) -> str:
    """A part of the page; `body` is HTML."""
    return "\n".join([f"<section><h2>{escape(title)}</h2>", *body, "</section>"])


def table(header: Sequence[str], rows: Sequence[Sequence[str]], style: str = "", has_total: bool = False) -> str:
    """A table of plain texts; with `has_total` the last row stands out."""
    lines = [f'<div class="scroll"><table class="{style}">']
    if header:
        lines.append("<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in header) + "</tr>")
    for index, row in enumerate(rows):
        mark = ' class="total"' if has_total and index == len(rows) - 1 else ""
        lines.append(f"<tr{mark}>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>")
    return "\n".join([*lines, "</table></div>"])


def figure_html(figure: go.Figure) -> str:
    """The figure as a part of a `document`."""
    html: Any = plotly.io.to_html(
        figure,
        full_html=False,
        include_plotlyjs=False,  # the page has it once, in its head
        config={"responsive": True, "displayModeBar": False},
    )
    return str(html)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
