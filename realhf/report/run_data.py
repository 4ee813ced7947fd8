"""The content of a run directory, of a run that goes on, has finished or has crashed."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from realhf.base.errors import UserError
from realhf.base.files import decode_json
from realhf.dataflow.interface import PREEMPTIONS
from realhf.dataflow.plan import DIGEST_LENGTH, ExecutionPlan, load_plan, plan_digest
from realhf.report.curves import EVALUATION, Curve, evaluation_curves, split_curves
from realhf.rundir.events import Event, event_line
from realhf.rundir.lines import evaluation_line, read_lines, step_line
from realhf.rundir.paths import RunDirectory
from realhf.rundir.run import OtherRunVersionError, read_spec
from realhf.rundir.samples import StepSamples, read_samples
from realhf.rundir.starts import is_to_be_planned
from realhf.rundir.status import Status, read_status

T = TypeVar("T")

# A report shows the last steps only; the trace of a long run is not read whole.
TRACE_TAIL_BYTES = 64 * 2**20
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


class TraceEvent(msgspec.Struct, frozen=True):
    """One event of `trace.json`: worker `tid` did `name` in phase `cat`, from `ts` for `dur` microseconds."""

    name: str
    ph: str
    tid: Annotated[int, Meta(ge=0, le=2**20)]
    cat: str = ""
    ts: Annotated[float, Meta(ge=-1e17, le=1e17)] = 0.0
    dur: Annotated[float, Meta(ge=0, le=1e17)] = 0.0


@dataclass(frozen=True, kw_only=True)
class RunData:
    """All data of a report. Before the run has written anything, `status` is None and the sequences are empty.

    `metrics` have of a call its seconds alone, and `samples` are some of the run's: a long run has very many. `damaged`
    has a sentence about every file that could not be read as a whole; `plan` is None if it is one of them.
    """

    path: Path
    plan: ExecutionPlan | None
    status: Status | None
    experiment: dict[str, Any]
    metrics: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    events: list[TraceEvent]
    happened: list[Event]
    samples: list[StepSamples]
    damaged: tuple[str, ...]

    @property
    def state(self) -> str:
        """The state in words."""
        return STATE_NAMES[self.status.state] if self.status else "not started"

    @cached_property
    def curves(self) -> tuple[dict[str, Curve], dict[str, Curve]]:
        """The curves to show first, and the others: of evaluations, under names of their own, and of training."""
        of_evaluation = evaluation_curves(self.evaluations)
        main, others = (
            {f"{EVALUATION}: {name}": curve for name, curve in quality.items()} | training
            for quality, training in zip(of_evaluation, split_curves(self.metrics), strict=True)
        )
        return main, others

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of all steps over the time of all steps; None before the first step."""
        time_s = sum(line["time_s"] for line in self.metrics)
        return sum(line["tokens"] for line in self.metrics) / time_s if time_s > 0 else None

    @property
    def under_plan(self) -> list[dict[str, Any]]:
        """The metrics of the steps that were made under the present plan; a run may have had others before."""
        return lines_under(self.plan, self.metrics) if self.plan else self.metrics

    @property
    def median_step_s(self) -> float | None:
        """The median time of the steps under the present plan; None if there are none."""
        return statistics.median(line["time_s"] for line in self.under_plan) if self.under_plan else None


@dataclass(frozen=True, kw_only=True)
class CallTime:
    """Seconds of one call: the plan's prediction with its interval, if any, and the median over the measured steps."""

    call: str
    predicted_s: float | None
    measured_s: float | None
    interval_s: tuple[float, float] | None = None

    @property
    def ratio(self) -> float | None:
        """Measured over predicted, None if either is missing."""
        return self.measured_s / self.predicted_s if self.predicted_s and self.measured_s is not None else None


def read_run(directory: RunDirectory) -> RunData:
    """Reads all files of a run that are there and not damaged.

    Raises:
        UserError: the directory is not a run's, or another version of realhf has written it.
    """
    damaged: list[str] = []
    experiment, plan = experiment_of(directory, damaged), plan_of(directory, damaged)
    return RunData(
        path=directory.path,
        plan=plan,
        status=status_of(directory, damaged),
        experiment=experiment,
        metrics=lines_of(directory.metrics, _short_step_line, damaged),
        evaluations=lines_of(directory.evaluations, evaluation_line, damaged),
        events=read_trace(directory.trace, damaged=damaged),
        happened=lines_of(directory.events, event_line, damaged),
        samples=read_samples(directory.samples, damaged),
        damaged=tuple(damaged),
    )


def _short_step_line(line: bytes) -> dict[str, Any]:
    values = step_line(line)
    kept = ("seconds", PREEMPTIONS)
    calls = {name: {key: call[key] for key in kept if key in call} for name, call in values["calls"].items()}
    return values | {"calls": calls}


def trace_line(line: bytes) -> TraceEvent | None:
    """The event of a line of a trace; None for the enclosing brackets. Raises BadContentError."""
    line = line.strip().rstrip(b",")
    return None if line in (b"", b"[", b"]") else decode_json(line, TraceEvent)


def read_trace(path: Path, tail_bytes: int = TRACE_TAIL_BYTES, damaged: list[str] | None = None) -> list[TraceEvent]:
    """The events in the last `tail_bytes` of a trace, which has one event a line.

    After a crash the closing bracket may be missing and the last line cut off. Other lines that cannot be read add a
    sentence to `damaged`.
    """
    lines = lines_of(path, trace_line, [] if damaged is None else damaged, tail_bytes)
    return [event for event in lines if event is not None]


def lines_under(plan: ExecutionPlan, metrics: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of metrics of the steps made under a plan, with lines of older runs, which name no plan."""
    digest = plan_digest(plan)[:DIGEST_LENGTH]
    return [line for line in metrics if line.get("plan", digest) == digest]


def call_times(plan: ExecutionPlan, metrics: Sequence[dict[str, Any]]) -> list[CallTime]:
    """Predicted and measured seconds of every call of the plan, over the steps made under it."""
    lines = lines_under(plan, metrics)
    times = []
    predictions = {name: call.predicted_s for name, call in plan.calls.items()} | plan.beside
    for name, predicted_s in predictions.items():
        seconds = [line["calls"][name]["seconds"] for line in lines if name in line["calls"]]
        measured_s = statistics.median(seconds) if seconds else None
        interval_s = plan.intervals.call_s.get(name) if plan.intervals else None
        times.append(CallTime(call=name, predicted_s=predicted_s, measured_s=measured_s, interval_s=interval_s))
    return times


def plan_of(directory: RunDirectory, damaged: list[str]) -> ExecutionPlan | None:
    """The plan of a run; None before its job has made one, or, with a sentence in `damaged`, if it cannot be read.
    Raises UserError without a file."""
    if is_to_be_planned(directory):
        return None
    if not directory.plan.exists():
        raise UserError(f"{directory.path} is no run directory: it has no plan.json; give the --run-dir of a run")
    return _or_damaged(lambda: load_plan(directory.plan), damaged)


def status_of(directory: RunDirectory, damaged: list[str]) -> Status | None:
    """The content of `status.json`; None if it is missing, or, with a sentence in `damaged`, cannot be read."""
    return _or_damaged(lambda: read_status(directory.status), damaged)


def experiment_of(directory: RunDirectory, damaged: list[str]) -> dict[str, Any]:
    """The content of `experiment.json`; {} before the run's job has written it, or, with a sentence in `damaged`, if it
    cannot be read.

    Raises:
        UserError: another version of realhf has written the directory.
    """
    if is_to_be_planned(directory):
        return {}
    return _or_damaged(lambda: read_spec(directory.experiment, dict[str, Any]), damaged) or {}


def lines_of(path: Path, decode: Callable[[bytes], T], damaged: list[str], tail_bytes: int | None = None) -> list[T]:
    """The lines of a file that can be read; the others add a sentence to `damaged`."""
    lines = read_lines(path, decode, tail_bytes=tail_bytes)
    damaged += lines.damaged
    return lines.values


def _or_damaged(read: Callable[[], T], damaged: list[str]) -> T | None:
    try:
        return read()
    except OtherRunVersionError:
        raise
    except UserError as error:
        damaged.append(str(error))
        return None
