"""The memory of every worker: measured, predicted, and the limit."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
from markupsafe import Markup

from realhf.dataflow.plan import ExecutionPlan
from realhf.dataflow.rationale import DeviceMemory
from realhf.report.figures import (
    LEGEND_ABOVE,
    MEASURED_COLOUR,
    NUMBERED,
    PREDICTED_COLOUR,
    draw_limit,
    rows_from_top,
    styled,
)
from realhf.report.html import part

GIB, MIB = 2**30, 2**20
MAX_ROWS = 32
PREDICTED_CALL_COLOUR = "#dde4ee"
# A limit further away than this many times the longest bar is not drawn, only named in the text.
DRAWN_LIMIT = 2.5


@dataclass(frozen=True, kw_only=True)
class WorkerMemory:
    """The memory of one worker; `measured_bytes` is its peak in any call so far, 0 if none was measured."""

    worker: int
    measured_bytes: int
    predicted: DeviceMemory | None

    @property
    def largest_bytes(self) -> int:
        return max(self.measured_bytes, self.predicted.peak_bytes if self.predicted else 0)


def worker_memory(plan: ExecutionPlan, metrics: Sequence[dict[str, Any]]) -> list[WorkerMemory]:
    """One entry for each worker of the plan; [] if nothing was measured or predicted."""
    peaks = [0] * plan.num_devices
    for line in metrics:
        for worker, peak in enumerate(line.get("peak_bytes", ())[: plan.num_devices]):
            peaks[worker] = max(peaks[worker], peak)
    why = plan.rationale
    rows = [
        WorkerMemory(worker=worker, measured_bytes=peak, predicted=why.memory_of(worker) if why else None)
        for worker, peak in enumerate(peaks)
    ]
    return rows if any(row.largest_bytes for row in rows) else []


def memory_section(plan: ExecutionPlan, metrics: Sequence[dict[str, Any]]) -> Markup:
    """The section of the page, with the `MAX_ROWS` fullest workers."""
    fullest = sorted(worker_memory(plan, metrics), key=lambda row: -row.largest_bytes)[:MAX_ROWS]
    why = plan.rationale
    return part(
        "memory.html",
        rows=sorted(fullest, key=lambda row: row.worker),
        num_workers=plan.num_devices,
        why=why,
        communicator_bytes=max((memory.communicator_bytes for memory in why.memory), default=0) if why else 0,
        growth=_growth(metrics),
        size_text=_text,
        memory_figure=memory_figure,
    )


def memory_figure(rows: Sequence[WorkerMemory], limit_bytes: int | None) -> go.Figure:
    """Two bars a worker, measured and predicted, and the limit if it is not far away."""
    longest = max(row.largest_bytes for row in rows)
    unit, name = (GIB, "GiB") if longest >= GIB else (MIB, "MiB")
    workers = [f"worker {row.worker}" for row in rows]
    predicted = [row.predicted for row in rows if row.predicted]
    figure = go.Figure()
    if any(row.measured_bytes for row in rows):
        figure.add_bar(
            y=workers,
            x=[row.measured_bytes / unit for row in rows],
            name="measured",
            offsetgroup="measured",
            marker_color=MEASURED_COLOUR,
            text=[_label(row.measured_bytes, limit_bytes) for row in rows],
            hovertemplate=f"measured %{{x:.4g}} {name}<extra>%{{y}}</extra>",
            **NUMBERED,
        )
    if len(predicted) == len(rows):
        static = [memory.static_bytes / unit for memory in predicted]
        dynamic = [(memory.peak_bytes - memory.static_bytes) / unit for memory in predicted]
        for what, colour, values, base, texts in (
            ("predicted to stay", PREDICTED_COLOUR, static, None, None),
            (
                "predicted for a call",
                PREDICTED_CALL_COLOUR,
                dynamic,
                static,
                [_label(memory.peak_bytes, limit_bytes) for memory in predicted],
            ),
        ):
            figure.add_bar(
                y=workers,
                x=values,
                base=base,
                name=what,
                offsetgroup="predicted",
                marker_color=colour,
                text=texts,
                hovertemplate=f"{what}: %{{customdata:.4g}} {name}<extra>%{{y}}</extra>",
                customdata=values,
                **NUMBERED,
            )
    end = longest / unit
    if limit_bytes and limit_bytes <= DRAWN_LIMIT * longest:
        end = max(end, limit_bytes / unit)
        draw_limit(figure, limit_bytes / unit, f"limit {_text(limit_bytes)}")
    figure.update_layout(barmode="group", bargap=0.3, legend={"traceorder": "normal"} | LEGEND_ABOVE)
    # Room at the right for the words after the longest bar.
    figure.update_xaxes(title=name, range=[0, 1.2 * end])
    rows_from_top(figure, workers)
    return styled(figure, 100 + 52 * len(rows), {"l": 20, "r": 20, "t": 36, "b": 44})


def _growth(metrics: Sequence[dict[str, Any]]) -> str:
    """The fullest worker's memory in the first and the last step, which shows leaks."""
    peaks = [max(line.get("peak_bytes") or [0]) for line in metrics]
    if len(peaks) < 2 or not peaks[0]:
        return ""
    first, last = metrics[0]["step"], metrics[-1]["step"]
    return f"The fullest worker measured {_text(peaks[0])} in step {first} and {_text(peaks[-1])} in step {last}."


def _label(size_bytes: int, limit_bytes: int | None) -> str:
    share = f", {size_bytes / limit_bytes:.0%} of the limit" if limit_bytes else ""
    return f"{_text(size_bytes)}{share}" if size_bytes else ""


def _text(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.2f} GiB" if size_bytes >= GIB else f"{size_bytes / MIB:.0f} MiB"
