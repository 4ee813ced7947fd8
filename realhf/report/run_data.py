"""What a run directory holds, read back: of a run that goes on, has finished or has crashed."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from realhf.api.errors import UserError
from realhf.api.plan import DIGEST_LENGTH, ExecutionPlan, load_plan, plan_digest
from realhf.api.status import Status, read_status
from realhf.scheduler.events import Event, read_events
from realhf.scheduler.run_directory import RunDirectory

# A report shows the last steps only; the trace of a long run is not read whole.
TRACE_TAIL_BYTES = 64 * 2**20


class TraceEvent(msgspec.Struct, frozen=True):
    """One event of `trace.json`: worker `tid` did `name` in phase `cat`; `ts` and `dur` are microseconds."""

    name: str
    ph: str
    tid: int
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RunData:
    """All that a report is made from. `status` is None and the sequences are empty before there is anything."""

    path: Path
    plan: ExecutionPlan
    status: Status | None
    experiment: dict[str, Any]
    metrics: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    events: list[TraceEvent]
    happened: list[Event]

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of all steps over the time of all steps, None before the first."""
        time_s = sum(line["time_s"] for line in self.metrics)
        return sum(line["tokens"] for line in self.metrics) / time_s if time_s > 0 else None

    @property
    def under_plan(self) -> list[dict[str, Any]]:
        """The metrics of the steps that were made under the plan as it is now; a run may have had others before."""
        return lines_under(self.plan, self.metrics)

    @property
    def median_step_s(self) -> float | None:
        """Of the steps under the plan as it is now."""
        return statistics.median(line["time_s"] for line in self.under_plan) if self.under_plan else None


@dataclass(frozen=True, kw_only=True)
class CallTime:
    """Seconds of one call: as planned (None if the plan says nothing), and the median over the steps measured."""

    call: str
    predicted_s: float | None
    measured_s: float | None

    @property
    def ratio(self) -> float | None:
        """Measured over predicted, None if either is missing."""
        return self.measured_s / self.predicted_s if self.predicted_s and self.measured_s is not None else None


def read_run(directory: RunDirectory) -> RunData:
    """Reads what is there.

    Raises:
        UserError: the directory is none of a run, or one of its files is damaged other than by
            being cut off at its end.
    """
    return RunData(
        path=directory.path,
        plan=plan_of(directory),
        status=status_of(directory),
        experiment=experiment_of(directory),
        metrics=read_json_lines(directory.metrics),
        evaluations=read_json_lines(directory.evaluations),
        events=read_trace(directory.trace),
        happened=read_events(directory.events),
    )


def read_json_lines(path: Path, *, tail_bytes: int | None = None) -> list[dict[str, Any]]:
    """All objects of a JSON lines file, or those in its last `tail_bytes`; [] where there is no file yet.

    A last line without its line break is left out: it is still being written, or its writer died.

    Raises:
        UserError: a line is not a JSON object; names the file and which of the lines read it is.
    """
    if not path.is_file():
        return []
    with path.open("rb") as file:
        size = file.seek(0, 2)
        start = max(0, size - tail_bytes) if tail_bytes is not None else 0
        file.seek(start)
        complete, _, _ = file.read(size - start).rpartition(b"\n")
    lines = complete.splitlines()[1 if start else 0 :]  # the seek has cut the first one
    values = []
    for number, line in enumerate(lines, start=1):
        try:
            values.append(msgspec.json.decode(line, type=dict[str, Any]))
        except msgspec.DecodeError as error:
            raise UserError(f"{path}:{number}: not a JSON object ({error}); remove the line") from None
    return values


def read_trace(path: Path, tail_bytes: int = TRACE_TAIL_BYTES) -> list[TraceEvent]:
    """The events in the last `tail_bytes` of a trace with one event a line, [] where there is no file yet.

    The closing bracket may be missing and the last line cut off, as a crash leaves them.

    Raises:
        UserError: another line is not an event; names file and event.
    """
    if not path.is_file():
        return []
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - tail_bytes))
        lines = file.read().splitlines()
    lines = [line.strip().rstrip(b",") for line in lines[1:]]  # the first is the bracket, or a line cut by the seek
    decoder = msgspec.json.Decoder(TraceEvent)
    events = []
    for number, line in enumerate(lines, start=1):
        if line in (b"", b"]"):
            continue
        try:
            events.append(decoder.decode(line))
        except msgspec.DecodeError as error:
            if number == len(lines):
                break
            raise UserError(f"{path}: event {number} is none ({error}); remove the file or its line") from None
    return events


def lines_under(plan: ExecutionPlan, metrics: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of metrics of the steps made under a plan. Lines that name none (of older runs) count."""
    digest = plan_digest(plan)[:DIGEST_LENGTH]
    return [line for line in metrics if line.get("plan", digest) == digest]


def call_times(plan: ExecutionPlan, metrics: Sequence[dict[str, Any]]) -> list[CallTime]:
    """Predicted and measured seconds of every call of the plan, in its order, of the steps made under it."""
    lines = lines_under(plan, metrics)
    times = []
    for name, call in plan.calls.items():
        seconds = [line["calls"][name]["seconds"] for line in lines if name in line["calls"]]
        measured_s = statistics.median(seconds) if seconds else None
        times.append(CallTime(call=name, predicted_s=call.predicted_s, measured_s=measured_s))
    return times


def plan_of(directory: RunDirectory) -> ExecutionPlan:
    """The plan of a run. Raises UserError if the directory is none of a run."""
    if not directory.plan.is_file():
        raise UserError(f"{directory.path} is no run directory: it has no plan.json; give the --run-dir of a run")
    return load_plan(directory.plan)


def status_of(directory: RunDirectory) -> Status | None:
    """What `status.json` says, None before it is there. Raises UserError if it is damaged."""
    try:
        return read_status(directory.status)
    except msgspec.DecodeError as error:
        raise UserError(f"{directory.status}: not the status of a run ({error}); remove the file") from None


def experiment_of(directory: RunDirectory) -> dict[str, Any]:
    """What `experiment.json` says, {} where it is not there. Raises UserError if it is damaged."""
    path = directory.experiment
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise UserError(f"{path}: not a JSON object ({error}); remove the file") from None
