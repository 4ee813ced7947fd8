"""The HTML page of a plan before it runs: its timeline, its memory, and a comparison with other plans."""

from collections.abc import Callable, Sequence
from html import escape
from itertools import groupby
from typing import Any

import plotly.graph_objects as go

from realhf.dataflow.plan import CallPlan, interval_text
from realhf.planning.explain.analysis import BESIDE, COMPUTE, Analysis, Span
from realhf.planning.explain.comparison import Candidate, Comparison
from realhf.planning.search import SearchResult
from realhf.report.figures import LEGEND_ABOVE, LINE_COLOURS, MEASURED_COLOUR, OTHER_COLOUR, PHASE_COLOURS, styled
from realhf.report.html import document, figure_html, section, table

GIB = 2**30
STEPS_SHOWN = 2
CALL_COLOURS = (*LINE_COLOURS[:1], "#5b9bd5", "#6a8f3c", "#b48a2c", "#8e6bb0", "#c2574f", "#2f7f86", "#7a8290")
STATIC_COLOUR, COMMUNICATOR_COLOUR, DYNAMIC_COLOUR, LIMIT_COLOUR = "#3b6fb6", "#8a7fb5", "#9cc3e6", "#c2574f"
SAME = 5e-4
LABELLED = 0.07  # share of the width: shorter bars have no room for a name


def plan_page(comparison: Comparison) -> str:
    """One file with all its content, readable without a network."""
    analysis = comparison.analysis
    sections = [
        _head(comparison, analysis),
        _timeline(analysis),
        _memory(comparison, analysis),
        _calls(analysis),
        _compared(comparison),
        _alternatives(comparison),
        _search(comparison),
    ]
    return document("execution plan", [part for part in sections if part])


def device_groups(num_devices: int, key: Callable[[int], object]) -> list[range]:
    """Groups of neighbouring devices with the same key, so that equal rows are shown once."""
    groups = (list(group) for _, group in groupby(range(num_devices), key))
    return [range(group[0], group[-1] + 1) for group in groups]


def _head(comparison: Comparison, analysis: Analysis) -> str:
    task = comparison.task
    cluster, tokens = task.cluster, task.workload.text(task.batch_size)
    range_text = interval_text(comparison.candidates[0].step_interval_s)
    facts = [
        (f"{analysis.step_s:.4g} s", f"a step, predicted (90 %: {range_text})"),
        (f"{analysis.tokens_per_s:,.0f}", "tokens/s"),
        (f"{analysis.gpu_hours_per_million_tokens:.3g}", "GPU-hours per million tokens"),
        (
            f"{analysis.prediction.peak_bytes / GIB:.1f} GiB",
            f"on the fullest device, of {cluster.device_memory_bytes / GIB:.1f}",
        ),
    ]
    setting = (
        f"{cluster.num_nodes} x {cluster.devices_per_node} {cluster.hardware.name} · {task.batch_size} samples of "
        f"{tokens} tokens a step · {task.dtype}"
    )
    lines = [
        '<div class="title"><h1>Execution plan</h1></div>',
        f'<div class="muted">{escape(setting)}</div>',
        '<div class="facts">',
        *(f"<div><b>{escape(value)}</b><span>{escape(what)}</span></div>" for value, what in facts),
        "</div>",
        f'<p style="margin-top: 14px">Limited by {escape(analysis.limits)}.</p>',
    ]
    if comparison.certificate:
        lines.append(f"<p>Certificate: {escape(str(comparison.certificate))}.</p>")
    if comparison.candidates[0].problem:
        lines.append('<pre class="failure">This plan does not fit into the memory of the devices.</pre>')
    return "\n".join(lines)


def _timeline(analysis: Analysis) -> str:
    return section(
        "Timeline of two steps",
        '<p class="muted">Predicted, the first two steps; the second is the lighter one. Devices that do the same are '
        "one row. White is idle.</p>",
        figure_html(timeline_figure(analysis)),
    )


def timeline_figure(analysis: Analysis) -> go.Figure:
    """One row for each group of devices with the same work, coloured by call; transfers by kind."""
    spans = [span for span in analysis.spans if span.step < STEPS_SHOWN and span.end_s > span.start_s]
    num_devices = len(analysis.prediction.device_bytes)
    by_device = {d: tuple(span for span in spans if d in span.devices) for d in range(num_devices)}
    groups = device_groups(num_devices, by_device.__getitem__)
    end_s = max(span.end_s for span in spans)
    rows = {_range(group): by_device[group[0]] for group in groups}
    rows |= {BESIDE: beside} if (beside := tuple(span for span in spans if span.kind == BESIDE)) else {}
    row_height = max(26, min(52, 640 // len(rows)))
    figure = go.Figure()
    calls = [*analysis.prediction.plan.calls, *analysis.prediction.plan.beside]
    for name, colour in _legend(calls, spans).items():
        bars = [
            (row, span)
            for row, of_row in rows.items()
            for span in of_row
            if (span.name if span.kind in (COMPUTE, BESIDE) else span.kind) == name
        ]
        label = name.replace("_", "<br>", 1) if row_height >= 40 else name
        figure.add_bar(
            y=[row for row, _ in bars],
            x=[span.end_s - span.start_s for _, span in bars],
            base=[span.start_s for _, span in bars],
            name=name,
            orientation="h",
            width=0.8,
            marker={
                "color": colour,
                "opacity": [1.0 if span.step % 2 == 0 else 0.62 for _, span in bars],
                "line": {"color": "white", "width": 0.5},
            },
            text=[label if span.end_s - span.start_s > LABELLED * end_s else "" for _, span in bars],
            textposition="inside" if name in calls else "none",
            textfont={"color": "white"},
            textangle=0,
            insidetextanchor="middle",
            customdata=[[span.name, span.step + 1, span.start_s, span.end_s] for _, span in bars],
            hovertemplate="<b>%{customdata[0]}</b>, step %{customdata[1]}<br>%{x:.4g} s, from %{customdata[2]:.4g} to "
            "%{customdata[3]:.4g} s<extra>devices %{y}</extra>",
        )
    figure.update_layout(barmode="overlay", uniformtext={"minsize": 9, "mode": "hide"}, legend=LEGEND_ABOVE)
    figure.update_xaxes(title="seconds", range=[0, end_s])
    return _by_device(figure, list(rows), row_height)


def _legend(calls: Sequence[str], spans: Sequence[Span]) -> dict[str, str]:
    """Colour of every call, and of the kinds of transfer that take time."""
    colours = {name: CALL_COLOURS[i % len(CALL_COLOURS)] for i, name in enumerate(calls)}
    kinds = dict.fromkeys(span.kind for span in spans if span.kind not in (COMPUTE, BESIDE))
    return colours | {kind: PHASE_COLOURS.get(kind, OTHER_COLOUR) for kind in kinds}


def _memory(comparison: Comparison, analysis: Analysis) -> str:
    return section(
        "Memory of the devices",
        '<p class="muted">Lasting tensors (parameters, gradients, optimizer states; communicators), the most that a '
        "call needs beside them, and the limit.</p>",
        figure_html(memory_figure(analysis, comparison.task.cluster.device_memory_bytes)),
    )


def memory_figure(analysis: Analysis, limit_bytes: float) -> go.Figure:
    """Stacked bars in GiB, one row for each group of devices with the same needs."""
    needs = analysis.prediction.needs
    groups = device_groups(len(needs), needs.__getitem__)
    rows = [_range(group) for group in groups]
    of_groups = [needs[group[0]] for group in groups]
    parts = [
        ("stays", STATIC_COLOUR, [(need.static_bytes - need.communicator_bytes) / GIB for need in of_groups]),
        ("communicators", COMMUNICATOR_COLOUR, [need.communicator_bytes / GIB for need in of_groups]),
        ("while a call runs", DYNAMIC_COLOUR, [(need.peak_bytes - need.static_bytes) / GIB for need in of_groups]),
    ]
    figure = go.Figure()
    for name, colour, values in parts:
        if name == "communicators" and not any(values):
            continue
        figure.add_bar(
            y=rows, x=values, name=name, orientation="h", width=0.7, marker_color=colour,
            hovertemplate=f"{name}: %{{x:.2f}} GiB<extra>devices %{{y}}</extra>",
        )  # fmt: skip
    limit = limit_bytes / GIB
    figure.add_vline(x=limit, line={"color": LIMIT_COLOUR, "width": 2, "dash": "dash"})
    figure.add_annotation(
        x=limit, y=1, yref="paper", xanchor="right", yanchor="bottom", showarrow=False,
        text=f"limit {limit:.1f} GiB", font={"color": LIMIT_COLOUR},
    )  # fmt: skip
    largest = max(limit, analysis.prediction.peak_bytes / GIB)
    figure.update_layout(barmode="stack", legend=LEGEND_ABOVE | {"traceorder": "normal"})
    figure.update_xaxes(title="GiB", range=[0, largest * 1.05])
    return _by_device(figure, rows, max(26, min(40, 520 // len(groups))))


def _by_device(figure: go.Figure, rows: Sequence[str], row_height: int) -> go.Figure:
    """Rows of devices from the top, numbered at the left."""
    figure.update_yaxes(
        title="devices",
        type="category",
        categoryorder="array",
        categoryarray=list(rows),
        range=[len(rows) - 0.5, -0.5],
        automargin=True,
        ticksuffix="  ",
        dtick=1,
    )
    return styled(figure, 100 + row_height * len(rows), {"l": 20, "r": 20, "t": 40, "b": 44})


def _calls(analysis: Analysis) -> str:
    plan = analysis.prediction.plan
    header = ["call", "devices", "dp", "tp", "pp", "micro-batches", "computed with", "predicted, s", "90 %, s"]
    header.append("share of the longest chain")
    ranges = plan.intervals.call_s if plan.intervals else {}
    rows = [
        [
            name,
            _range(call.mesh.devices),
            call.replicas_text,
            str(call.tp),
            call.stages_text,
            str(call.micro_batches),
            str(call.compute) or "-",
            "-" if call.predicted_s is None else f"{call.predicted_s:.3f}",
            interval_text(ranges.get(name)),
            f"{analysis.chain.get(name, 0):.0%}",
        ]
        for name, call in plan.calls.items()
    ]
    rows += [
        [
            name,
            BESIDE,
            *["-"] * 5,
            f"{seconds:.3f}",
            interval_text(ranges.get(name)),
            f"{analysis.chain.get(name, 0):.0%}",
        ]
        for name, seconds in plan.beside.items()
    ]
    return section("Calls", table(header, rows))


def _compared(comparison: Comparison) -> str:
    if not comparison.presets:
        return ""
    candidates = comparison.candidates
    header = ["plan", "s a step", "90 %, s", "x", "slower", "tokens/s", "GPU-h per Mtok", "peak, GiB", "busiest device"]
    header.append("limited by")
    rows = [[candidate.name, *_row(candidate, comparison.analysis.step_s)] for candidate in candidates]
    problems = "".join(
        f"<p><b>{escape(candidate.name)}</b> cannot run: {escape(candidate.problem)}</p>"
        for candidate in comparison.presets
        if candidate.problem
    )
    return section(
        "Compared with plans by rule", figure_html(_compared_figure(candidates)), table(header, rows), problems
    )


def _row(candidate: Candidate, base_step_s: float) -> list[str]:
    analysis = candidate.analysis
    if analysis is None:
        return ["-"] * 9
    if candidate.problem:
        return [*["-"] * 6, f"{analysis.prediction.peak_bytes / GIB:.1f}", "-", "memory"]
    return [
        f"{analysis.step_s:.4g}",
        interval_text(candidate.step_interval_s),
        f"{analysis.step_s / base_step_s:.2f}",
        candidate.slower_text,
        f"{analysis.tokens_per_s:,.0f}",
        f"{analysis.gpu_hours_per_million_tokens:.3g}",
        f"{analysis.prediction.peak_bytes / GIB:.1f}",
        f"{analysis.busy:.0%}",
        analysis.bottleneck,
    ]


def _compared_figure(candidates: Sequence[Candidate]) -> go.Figure:
    """Tokens a second of the plans that can run, as bars."""
    able = [(c.name, c.analysis.tokens_per_s) for c in candidates if c.analysis and not c.problem]
    figure = go.Figure()
    figure.add_bar(
        y=[name for name, _ in able],
        x=[rate for _, rate in able],
        orientation="h",
        width=0.7,
        marker_color=[MEASURED_COLOUR, *["#b8c4d6"] * (len(able) - 1)],
        text=[f"{rate:,.0f}" for _, rate in able],
        textposition="outside",
        cliponaxis=False,
        hovertemplate="%{y}: %{x:,.0f} tokens/s<extra></extra>",
    )
    figure.update_xaxes(
        title="tokens/s", range=[0, 1.12 * max([rate for _, rate in able], default=1)], tickformat=",~r"
    )
    figure.update_yaxes(autorange="reversed", automargin=True, ticksuffix="  ")
    return styled(figure, 80 + 30 * len(able), {"l": 20, "r": 20, "t": 12, "b": 44})


def _alternatives(comparison: Comparison) -> str:
    if not comparison.alternatives:
        return ""
    rows = []
    for alternative in comparison.alternatives:
        too_large = f"{alternative.num_too_large:,} of {alternative.num_layouts:,}"
        if alternative.option is None:
            rows.append([alternative.call, "nothing else fits", "-", "-", too_large])
            continue
        share = alternative.slower_by
        words = "the same" if abs(share) < SAME else f"{share:+.1%}"
        rows.append([alternative.call, _option(alternative.option), f"{alternative.step_s:.4g}", words, too_large])
    return section(
        "Why not",
        '<p class="muted">The best other devices or strategy of each call, the rest of the plan as it is.</p>',
        table(["call", "instead", "s a step", "slower by", "layouts that do not fit"], rows),
    )


def _search(comparison: Comparison) -> str:
    if not (comparison.result and comparison.result.trace):
        return ""
    return section(
        "Cost over the search",
        '<p class="muted">The best plan so far, in seconds a step (more where it did not fit into memory), and the '
        "lower bound that was proven.</p>",
        figure_html(_search_figure(comparison.result)),
    )


def _search_figure(result: SearchResult) -> go.Figure:
    """The best step time over the milliseconds since the first plan; values far above the last are cut off."""
    trace = result.trace
    start_s = trace[0][0]
    last = trace[-1][1]
    end_ms = (trace[-1][0] - start_s) * 1.05e3 or 1.0
    figure = go.Figure()
    figure.add_scatter(
        x=[(at_s - start_s) * 1e3 for at_s, _ in trace] + [end_ms],
        y=[cost_s for _, cost_s in trace] + [last],
        mode="lines",
        name="best plan so far",
        line={"shape": "hv", "color": MEASURED_COLOUR, "width": 2},
        hovertemplate="%{x:.3g} ms: %{y:.4g} s a step<extra></extra>",
    )
    lowest, lower_bound_s = last, result.certificate.lower_bound_s
    if 0 < lower_bound_s < float("inf"):
        lowest = min(last, lower_bound_s)
        figure.add_scatter(
            x=[0, end_ms],
            y=[lower_bound_s] * 2,
            mode="lines",
            name="lower bound",
            line={"color": LIMIT_COLOUR, "width": 2, "dash": "dash"},
            hovertemplate="no plan is below %{y:.4g} s a step<extra></extra>",
        )
    figure.update_layout(legend=LEGEND_ABOVE)
    figure.update_xaxes(title="milliseconds", range=[0, end_ms], ticklabelstandoff=4)
    highest = min(max(cost for _, cost in trace), 1.25 * last)
    room = 0.08 * (highest - lowest) or 0.05 * last
    figure.update_yaxes(title="s a step", range=[lowest - room, highest + room], ticksuffix="  ", nticks=6)
    return styled(figure, 300, {"l": 20, "r": 20, "t": 40, "b": 44})


def _option(call: CallPlan) -> str:
    return f"{_range(call.mesh.devices)}: {call.strategy}, {call.way_text}"


def _range(devices: Sequence[Any] | range) -> str:
    first, last = devices[0], devices[-1]
    return str(first) if first == last else f"{first}-{last}"
