"""The activity of every worker during the last complete steps of a run."""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from realhf.dataflow.plan import ExecutionPlan
from realhf.report.curves import EVALUATION
from realhf.report.run_data import TraceEvent

WAITING = "waiting"
BESIDE = "beside"  # calls that occupy no device
STEPS_SHOWN = 2

_EVALUATION = re.compile(rf".+ of {EVALUATION}\S* batch \d+")
_EVENT_NAME = re.compile(r"(?P<call>.+) of step (?P<step>\d+)")


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Worker `worker` was in `phase` from `start_s` to `end_s` of the timeline; `label` names the call or the model."""

    worker: int
    phase: str
    label: str
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The segments of all workers; a worker's segments cover 0 to `duration_s` without gaps. Calls beside the devices,
    which overlap with these, are in `beside`.

    `steps` counts from 1, as `metrics.jsonl` does.
    """

    steps: tuple[int, ...]
    num_workers: int
    duration_s: float
    segments: tuple[Segment, ...]
    beside: tuple[Segment, ...] = ()

    def share(self, phase: str) -> float:
        """The share of all workers' time in `phase`, from 0 to 1."""
        return sum(s.duration_s for s in (*self.segments, *self.beside) if s.phase == phase) / (
            self.duration_s * self.num_workers
        )


def last_steps(plan: ExecutionPlan, events: Sequence[TraceEvent]) -> Timeline | None:
    """The timeline of the last two consecutive complete steps: every planned worker has computed each call of them.

    One step if there are no two, None if there is none. Steps overlap, so segments of other steps within that time are
    shown too.
    """
    # Writing checkpoints and sending parameters run beside the other phases.
    spans = [event for event in events if event.ph == "X" and event.cat not in ("writing", "sending", BESIDE)]
    complete = _complete_steps(plan, spans)
    if not complete:
        return None
    last = complete[-1]
    steps = [step for step in complete if last - STEPS_SHOWN < step <= last]
    beside = [event for event in events if event.ph == "X" and event.cat == BESIDE]
    shown = [span for span in [*spans, *beside] if (name := _call_and_step(span)) and name[1] in steps]
    start = min(span.ts for span in shown)
    end = max(span.ts + span.dur for span in shown)
    num_workers = max(plan.num_devices, 1 + max(span.tid for span in spans))
    by_worker: dict[int, list[TraceEvent]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.ts):
        if span.ts + span.dur > start and span.ts < end:
            by_worker[span.tid].append(span)
    return Timeline(
        steps=tuple(steps),
        num_workers=num_workers,
        duration_s=(end - start) / 1e6,
        segments=tuple(
            segment for worker in range(num_workers) for segment in _segments(by_worker[worker], worker, start, end)
        ),
        beside=tuple(_segment(span, start, end) for span in beside if span.ts + span.dur > start and span.ts < end),
    )


def _complete_steps(plan: ExecutionPlan, spans: Sequence[TraceEvent]) -> list[int]:
    computed_by: dict[tuple[str, int], set[int]] = defaultdict(set)
    for span in spans:
        name = _call_and_step(span)
        if span.cat == "compute" and name is not None:
            computed_by[name].add(span.tid)
    steps = sorted({step for _, step in computed_by})
    return [
        step
        for step in steps
        if all(computed_by[name, step] >= set(call.mesh.devices) for name, call in plan.calls.items())
    ]


def _segments(spans: Sequence[TraceEvent], worker: int, start: float, end: float) -> list[Segment]:
    """One worker's spans, in order, cut to `start` and `end` (microseconds), with waiting in the gaps."""
    segments: list[Segment] = []
    now_s, duration_s = 0.0, (end - start) / 1e6
    behind_all = Segment(worker=worker, phase=WAITING, label="", start_s=duration_s, end_s=duration_s)
    for segment in [*(_segment(span, start, end) for span in spans), behind_all]:
        if segment.start_s > now_s:
            segments.append(Segment(worker=worker, phase=WAITING, label="", start_s=now_s, end_s=segment.start_s))
            now_s = segment.start_s
        if segment.end_s > now_s:
            segments.append(replace(segment, start_s=now_s))
            now_s = segment.end_s
    return segments


def _segment(span: TraceEvent, start: float, end: float) -> Segment:
    """A span cut to `start` and `end` (microseconds)."""
    phase, label = _describe(span)
    start_s, end_s = (max(span.ts, start) - start) / 1e6, (min(span.ts + span.dur, end) - start) / 1e6
    return Segment(worker=span.tid, phase=phase, label=label, start_s=start_s, end_s=end_s)


def _describe(span: TraceEvent) -> tuple[str, str]:
    """Phase and label of a span; computing for an evaluation is a phase of its own."""
    name = _call_and_step(span)
    if name is not None:
        call, step = name
        return span.cat, f"{call}, step {step}"
    is_evaluating = span.cat == "compute" and _EVALUATION.fullmatch(span.name) is not None
    return EVALUATION if is_evaluating else span.cat, span.name


def _call_and_step(span: TraceEvent) -> tuple[str, int] | None:
    """The call and the step of a span; None for a span of no step."""
    match = _EVENT_NAME.fullmatch(span.name)
    return (match["call"], int(match["step"])) if match else None
