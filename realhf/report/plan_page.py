"""The HTML page of a plan before it runs: its timeline, its memory, and a comparison with other plans."""

from collections.abc import Callable, Sequence
from itertools import groupby

import plotly.graph_objects as go

from realhf.dataflow.plan import interval_text
from realhf.dataflow.rationale import slower_text
from realhf.geometry.layout import DeviceMesh
from realhf.planning.explain.analysis import BESIDE, COMPUTE, Analysis, Span
from realhf.planning.explain.comparison import Alternative, Candidate, Comparison
from realhf.planning.search import SearchResult
from realhf.report.figures import (
    LEGEND_ABOVE,
    LIMIT_COLOUR,
    LINE_COLOURS,
    MEASURED_COLOUR,
    NAMED,
    NUMBERED,
    OTHER_COLOUR,
    PHASE_COLOURS,
    PREDICTED_COLOUR,
    draw_limit,
    rows_from_top,
    styled,
)
from realhf.report.html import document
from realhf.report.plan_section import call_rows

GIB = 2**30
STEPS_SHOWN = 2
CALL_COLOURS = (*LINE_COLOURS[:1], "#5b9bd5", "#6a8f3c", "#b48a2c", "#8e6bb0", "#c2574f", "#2f7f86", "#7a8290")
STATIC_COLOUR, COMMUNICATOR_COLOUR, DYNAMIC_COLOUR = "#3b6fb6", "#8a7fb5", "#9cc3e6"
LABELLED = 0.07  # share of the width: shorter bars have no room for a name


def plan_page(comparison: Comparison) -> str:
    """One file with all its content, readable without a network."""
    analysis, task, candidates = comparison.analysis, comparison.task, comparison.candidates
    tokens = task.workload.text(task.batch_size)
    return document(
        "plan.html",
        title="execution plan",
        comparison=comparison,
        setting=f"{task.cluster.num_nodes} x {task.cluster.devices_per_node} {task.cluster.hardware.name} · "
        f"{task.batch_size} samples of {tokens} tokens a step · {task.dtype}",
        values=_facts(comparison),
        timeline=timeline_figure(analysis),
        memory=memory_figure(analysis, task.cluster.device_memory_bytes),
        calls=[[*cells, f"{analysis.chain.get(cells[0], 0):.0%}"] for cells in call_rows(comparison.plan)],
        candidates=[[candidate.name, *_row(candidate, analysis.step_s)] for candidate in candidates],
        compared_figure=_compared_figure,
        alternatives=[_alternative(one) for one in comparison.alternatives],
        search_figure=_search_figure,
    )


def _facts(comparison: Comparison) -> list[tuple[str, str]]:
    analysis, limit_gib = comparison.analysis, comparison.task.cluster.device_memory_bytes / GIB
    range_text = interval_text(comparison.candidates[0].step_interval_s)
    return [
        (f"{analysis.step_s:.4g} s", f"a step, predicted (90 %: {range_text})"),
        (f"{analysis.tokens_per_s:,.0f}", "tokens/s"),
        (f"{analysis.gpu_hours_per_million_tokens:.3g}", "GPU-hours per million tokens"),
        (f"{analysis.prediction.peak_bytes / GIB:.1f} GiB", f"on the fullest device, of {limit_gib:.1f}"),
    ]


def device_groups(num_devices: int, key: Callable[[int], object]) -> list[DeviceMesh]:
    """Groups of neighbouring devices with the same key, so that equal rows are shown once."""
    groups = (list(group) for _, group in groupby(range(num_devices), key))
    return [DeviceMesh(group[0], len(group)) for group in groups]


def timeline_figure(analysis: Analysis) -> go.Figure:
    """One row for each group of devices with the same work, coloured by call; transfers by kind."""
    spans = [span for span in analysis.spans if span.step < STEPS_SHOWN and span.end_s > span.start_s]
    num_devices = len(analysis.prediction.device_bytes)
    by_device = {d: tuple(span for span in spans if d in span.devices) for d in range(num_devices)}
    groups = device_groups(num_devices, by_device.__getitem__)
    end_s = max(span.end_s for span in spans)
    rows = {group.text: by_device[group.first] for group in groups}
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
            width=0.8,
            marker={
                "color": colour,
                "opacity": [1.0 if span.step % 2 == 0 else 0.62 for _, span in bars],
                "line": {"color": "white", "width": 0.5},
            },
            text=[label if span.end_s - span.start_s > LABELLED * end_s else "" for _, span in bars],
            textposition="inside" if name in calls else "none",
            customdata=[[span.name, span.step + 1, span.start_s, span.end_s] for _, span in bars],
            hovertemplate="<b>%{customdata[0]}</b>, step %{customdata[1]}<br>%{x:.4g} s, from %{customdata[2]:.4g} to "
            "%{customdata[3]:.4g} s<extra>devices %{y}</extra>",
            **NAMED,
        )
    figure.update_layout(barmode="overlay", uniformtext={"minsize": 9, "mode": "hide"}, legend=LEGEND_ABOVE)
    figure.update_xaxes(title="seconds", range=[0, end_s])
    return _by_device(figure, list(rows), row_height)


def _legend(calls: Sequence[str], spans: Sequence[Span]) -> dict[str, str]:
    """Colour of every call, and of the kinds of transfer that take time."""
    colours = {name: CALL_COLOURS[i % len(CALL_COLOURS)] for i, name in enumerate(calls)}
    kinds = dict.fromkeys(span.kind for span in spans if span.kind not in (COMPUTE, BESIDE))
    return colours | {kind: PHASE_COLOURS.get(kind, OTHER_COLOUR) for kind in kinds}


def memory_figure(analysis: Analysis, limit_bytes: float) -> go.Figure:
    """Stacked bars in GiB, one row for each group of devices with the same needs."""
    needs = analysis.prediction.needs
    groups = device_groups(len(needs), needs.__getitem__)
    rows = [group.text for group in groups]
    of_groups = [needs[group.first] for group in groups]
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
    draw_limit(figure, limit, f"limit {limit:.1f} GiB")
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
        width=0.7,
        marker_color=[MEASURED_COLOUR, *[PREDICTED_COLOUR] * (len(able) - 1)],
        text=[f"{rate:,.0f}" for _, rate in able],
        hovertemplate="%{y}: %{x:,.0f} tokens/s<extra></extra>",
        **NUMBERED,
    )
    figure.update_xaxes(
        title="tokens/s", range=[0, 1.12 * max([rate for _, rate in able], default=1)], tickformat=",~r"
    )
    rows_from_top(figure, [name for name, _ in able])
    return styled(figure, 80 + 30 * len(able), {"l": 20, "r": 20, "t": 12, "b": 44})


def _alternative(one: Alternative) -> list[str]:
    too_large = f"{one.num_too_large:,} of {one.num_layouts:,}"
    if (call := one.option) is None:
        return [one.call, "nothing else fits", "-", "-", too_large]
    layout = f"{call.mesh.text}: {call.strategy}, {call.way_text}"
    return [one.call, layout, f"{one.step_s:.4g}", slower_text(one.slower_by), too_large]


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
