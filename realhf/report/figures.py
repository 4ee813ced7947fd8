"""The figures of a report: curves, predicted against measured times, the timeline."""

from collections.abc import Mapping, Sequence
from itertools import cycle

import plotly.graph_objects as go
from plotly.colors import qualitative
from plotly.subplots import make_subplots

from realhf.report.curves import EVALUATION, Curve, points_of_each, thinned
from realhf.report.run_data import CallTime
from realhf.report.timeline import BESIDE, WAITING, Timeline

PHASE_COLOURS = {
    "compute": "#3b6fb6",
    "reallocation": "#e8833a",
    "transfer": "#3f9e6e",
    "offload": "#c2574f",
    "checkpoint": "#8e6bb0",
    EVALUATION: "#9cc3e6",
    WAITING: "#e6e8ec",
}
LABELLED_PHASES = ("compute", "checkpoint", BESIDE)
OTHER_COLOUR = "#9aa0a6"
LINE_COLOURS = ("#3b6fb6", "#e8833a", "#3f9e6e", "#8e6bb0", "#c2574f", "#7a8290")
PREDICTED_COLOUR, MEASURED_COLOUR, LIMIT_COLOUR = "#b8c4d6", "#3b6fb6", "#c2574f"
# Options of bars with their numbers behind them, and of bars that may have a name inside.
NUMBERED = {"orientation": "h", "textposition": "outside", "cliponaxis": False}
NAMED = {"orientation": "h", "textfont": {"color": "white"}, "textangle": 0, "insidetextanchor": "middle"}
LEGEND_ABOVE = {"orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom"}
COLUMNS = 3
MAX_POINTS_WITH_MARKERS = 40


def runs_colours(names: Sequence[str]) -> dict[str, str]:
    """A colour for each of several runs; above thirty runs some share one."""
    return dict(zip(names, cycle((*LINE_COLOURS, *qualitative.Dark24)), strict=False))


def curves_figure(charts: dict[str, dict[str, Curve]], colours: Mapping[str, str] | None = None) -> go.Figure:
    """Small charts side by side over the steps: title -> its curves by name. `colours`: of the curves, for a page that
    has their legend; else the charts name theirs."""
    rows = -(-len(charts) // COLUMNS)
    height = 70 + 190 * rows
    max_points = points_of_each(sum(map(len, charts.values())))
    figure = make_subplots(
        rows=rows,
        cols=COLUMNS,
        subplot_titles=list(charts),
        horizontal_spacing=0.07,
        vertical_spacing=min(0.5, 75 / height),
    )
    for index, (title, curves) in enumerate(charts.items()):
        row, column = index // COLUMNS + 1, index % COLUMNS + 1
        for other, (name, curve) in zip(_cycle(len(curves)), curves.items(), strict=True):
            colour = colours[name] if colours else other
            steps, values = thinned(curve, max_points)
            has_markers = len(steps) <= MAX_POINTS_WITH_MARKERS
            line = go.Scatter(
                x=steps,
                y=[None if value is None else float(f"{value:.6g}") for value in values],
                name=name,
                mode="lines+markers" if has_markers else "lines",
                line={"color": colour, "width": 2},
                marker={"size": 5},
                hovertemplate=f"step %{{x}}<br>{name} %{{y:.4g}}<extra></extra>",
                showlegend=False,
            )
            figure.add_trace(line, row=row, col=column)
        if list(curves) != [title] and not colours:
            _name_inside(figure, list(curves), row, column)
        numbers = [value for _, values in curves.values() for value in values if value is not None]
        if title == EVALUATION and all(0 <= number <= 1 for number in numbers):
            figure.update_yaxes(range=[-0.03, 1.03], row=row, col=column)
    last_step = max(steps[-1] for curves in charts.values() for steps, _ in curves.values())
    figure.update_xaxes(range=[-0.02 * last_step, 1.03 * last_step], tick0=0, dtick=_step_between_ticks(last_step))
    figure.update_yaxes(nticks=5, tickformat="~g")
    figure.update_annotations(font_size=13)
    return styled(figure, height, {"l": 48, "r": 12, "t": 36, "b": 34})


def times_figure(times: Sequence[CallTime]) -> go.Figure:
    """Predicted and measured seconds of every call, as bars."""
    calls = [time.call for time in times]
    figure = go.Figure()
    bars = [("measured (median)", MEASURED_COLOUR, [time.measured_s for time in times])]
    if any(time.predicted_s is not None for time in times):
        bars.append(("predicted", PREDICTED_COLOUR, [time.predicted_s for time in times]))
    for name, colour, seconds in bars:
        figure.add_bar(
            y=calls,
            x=seconds,
            name=name,
            marker_color=colour,
            text=["" if value is None else f"{value:.3g} s" for value in seconds],
            hovertemplate=f"%{{y}}<br>{name} %{{x:.4g}} s<extra></extra>",
            **NUMBERED,
        )
    figure.update_layout(barmode="group", bargap=0.3, legend={"traceorder": "normal"} | LEGEND_ABOVE)
    figure.update_xaxes(title="seconds", rangemode="tozero")
    rows_from_top(figure, calls)
    # Room at the right for the numbers after the longest bar.
    longest = max((s for _, _, seconds in bars for s in seconds if s is not None), default=1.0)
    figure.update_xaxes(range=[0, longest * 1.12])
    return styled(figure, 90 + 24 * len(bars) * len(calls) + 12 * len(calls), {"l": 20, "r": 20, "t": 36, "b": 44})


def timeline_figure(timeline: Timeline) -> go.Figure:
    """One row a worker, its time coloured by phase, and one below it for its calls beside the devices, if any."""
    figure = go.Figure()
    row_height = max(24, min(44, 900 // timeline.num_workers))
    drawn = [*timeline.segments, *timeline.beside]
    for phase in dict.fromkeys([*PHASE_COLOURS, *(segment.phase for segment in drawn)]):
        segments = [segment for segment in drawn if segment.phase == phase]
        if not segments:
            continue
        figure.add_bar(
            y=[_row_of(segment.worker, segment.phase) for segment in segments],
            x=[segment.duration_s for segment in segments],
            base=[segment.start_s for segment in segments],
            name=f"{phase} {timeline.share(phase):.1%}",
            width=0.78,
            marker={"color": PHASE_COLOURS.get(phase, OTHER_COLOUR), "line": {"color": "white", "width": 0.5}},
            text=[_short(segment.label, two_lines=row_height >= 40) for segment in segments],
            textposition="inside" if phase in LABELLED_PHASES else "none",
            customdata=[[segment.label, segment.start_s, segment.end_s] for segment in segments],
            hovertemplate=f"<b>{phase}</b> %{{customdata[0]}}<br>%{{x:.4f}} s, from %{{customdata[1]:.3f}} to "
            "%{customdata[2]:.3f} s<extra>%{y}</extra>",
            **NAMED,
        )
    figure.update_layout(barmode="overlay", uniformtext={"minsize": 9, "mode": "hide"}, legend=LEGEND_ABOVE)
    rules = {segment.worker for segment in timeline.beside}
    rows = [
        _row_of(worker, phase)
        for worker in range(timeline.num_workers)
        for phase in ("", *([BESIDE] if worker in rules else []))
    ]
    figure.update_xaxes(title="seconds", range=[0, timeline.duration_s])
    rows_from_top(figure, rows)
    return styled(figure, 100 + row_height * len(rows), {"l": 20, "r": 20, "t": 36, "b": 44})


def _row_of(worker: int, phase: str) -> str:
    return f"worker {worker}" + (f" {BESIDE}" if phase == BESIDE else "")


def _short(label: str, two_lines: bool) -> str:
    """ "actor_generate, step 3" -> "actor / generate", on two lines if a row has room for them."""
    call = label.split(",")[0]
    return call.replace("_", "<br>", 1) if two_lines else call


def rows_from_top(figure: go.Figure, rows: Sequence[str]) -> None:
    """Rows of bars in this order, the first one on top."""
    figure.update_yaxes(
        categoryorder="array", categoryarray=list(rows), autorange="reversed", automargin=True, ticksuffix="  "
    )


def draw_limit(figure: go.Figure, x: float, text: str) -> None:
    """A dashed line across all bars, with its meaning above."""
    figure.add_vline(x=x, line={"color": LIMIT_COLOUR, "width": 2, "dash": "dash"})
    figure.add_annotation(
        x=x, y=1, yref="paper", xanchor="right", yanchor="bottom", showarrow=False,
        text=text, font={"color": LIMIT_COLOUR},
    )  # fmt: skip


def styled(figure: go.Figure, height: int, margin: dict[str, int]) -> go.Figure:
    """The figure in the looks of all figures; `height` and `margin` in pixels."""
    figure.update_layout(
        template="plotly_white",
        height=height,
        margin=margin,
        font={"family": "system-ui, -apple-system, Segoe UI, Roboto, sans-serif", "size": 12, "color": "#30363d"},
        hoverlabel={"font_size": 12},
        paper_bgcolor="rgba(0,0,0,0)",
    )
    figure.update_xaxes(automargin=True)
    return figure


def _name_inside(figure: go.Figure, names: Sequence[str], row: int, column: int) -> None:
    """The names of the curves in their colours, at the top left of their chart, in place of a legend."""
    for index, (name, colour) in enumerate(zip(names, _cycle(len(names)), strict=True)):
        figure.add_annotation(
            text=name,
            font={"color": colour},
            showarrow=False,
            x=0.02,
            y=0.97 - 0.13 * index,
            xref="x domain",
            yref="y domain",
            xanchor="left",
            yanchor="top",
            row=row,
            col=column,
        )


def _step_between_ticks(last_step: int) -> int:
    """The smallest of 1, 2, 5, 10, 20, ... that gives at most six ticks: steps are whole numbers."""
    size = 1
    while True:
        for factor in (1, 2, 5):
            if last_step <= 5 * factor * size:
                return factor * size
        size *= 10


def _cycle(count: int) -> list[str]:
    return [LINE_COLOURS[i % len(LINE_COLOURS)] for i in range(count)]
