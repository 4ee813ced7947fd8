"""The present state of a run: progress and speed, the activity of each process, failures so far."""

import re
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realhf.base.files import read_text
from realhf.dataflow.plan import ExecutionPlan
from realhf.report.curves import Trends, trends_of
from realhf.report.run_data import experiment_of, lines_of, plan_of, status_of
from realhf.rundir.checkpoints import saved_steps
from realhf.rundir.events import Event, event_line
from realhf.rundir.flight_recorder import read_activity
from realhf.rundir.lines import evaluation_line, read_spread, step_line
from realhf.rundir.paths import MASTER, RunDirectory, worker_name
from realhf.rundir.status import known_status

# The speed is that of the last steps, so that a change of plan, nodes or response lengths shows soon.
SPEED_STEPS = 20
METRICS_TAIL_BYTES = 2**20
SPREAD_PLACES, SPREAD_BYTES = 48, 2**16
LAST_EVALUATIONS = 5
# The master writes its status every second; the supervisor gives up one that is silent for this long.
SILENCE_S = 60.0
CLOCKS_DIFFER_S = 5.0
LOOKED_AT_S = 2.5
STARTS = ("started", "resumed", "restarted", "requeued")
FINISHED = "finished"
ENDED = (FINISHED, "failed", "interrupted", "stopped")
# If the launching process is gone, a shorter silence is enough: a living master would write every second.
ORPHAN_SILENCE_S = 5.0


@dataclass(frozen=True, kw_only=True)
class ProcessState:
    """One process: its last activity, since how many seconds (None: nothing yet, or the run has finished).

    peak_bytes: the most that models and data took in the last step; None if it was not measured.
    predicted_bytes: the plan's prediction of the peak.
    """

    name: str
    activity: str | None
    since_s: float | None
    peak_bytes: int | None = None
    predicted_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The speed of the last steps by the clock, with evaluations and checkpoints between them."""

    step_s: float
    tokens_per_s: float


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """The state of a run at one moment; times are in seconds.

    state: that of `status.json`; "finished" after all steps; "not started" without a status; "lost" if a run that is
        not over is silent: a running one for `SILENCE_S`, or any whose launching process is gone.
    silent_s: the silence of a run that is not over.
    remaining_s: the remaining time at the present speed.
    trends: the statistics that matter most, from the run's first steps to its last.
    evaluations: the statistics of the first and the last evaluations, by their names, with the step.
    last_failure: the first line of the newest failure's message.
    uniform_rewards: that rewards taught nothing, and the remedies; "" where that was not so.
    returncode: the exit code of the launching process of a failed run.
    damaged: a sentence about every file that could not be read as a whole.
    """

    path: str
    experiment: str
    state: str
    message: str
    step: int
    steps: int
    num_workers: int | None
    silent_s: float | None
    speed: Speed | None
    remaining_s: float | None
    trends: Trends | None
    evaluations: tuple[dict[str, Any], ...]
    processes: tuple[ProcessState, ...]
    checkpoints: tuple[int, ...]
    checkpoint_age_s: float | None
    restarts: int
    last_failure: str
    uniform_rewards: str
    returncode: int
    memory_limit_bytes: int | None
    damaged: tuple[str, ...]


def run_now_s(directory: RunDirectory) -> float:
    """The present by the clock of the run's master, which may be on another host whose clock differs.

    Where the status seems old, or of the future, it is looked at for a few seconds: a living master writes another one.
    """
    before = known_status(directory.status)
    if before is None or before.state in ENDED or abs(time.time() - before.updated) < CLOCKS_DIFFER_S:
        return time.time()
    deadline_s = time.monotonic() + LOOKED_AT_S
    while time.monotonic() < deadline_s:
        time.sleep(0.1)
        after = known_status(directory.status)
        if after is not None and after.updated != before.updated:
            return after.updated
    return time.time()


def read_run_status(directory: RunDirectory, now_s: float) -> RunStatus:
    """The status at `now_s` (seconds since the epoch) of a run that goes on, has finished or has crashed.

    Raises:
        UserError: the directory is not a run's, or another version of realhf has written it.
    """
    is_orphan = _is_orphan(directory)  # asked before its last status is read, since it may be about to end well
    damaged: list[str] = []
    experiment = experiment_of(directory, damaged)
    plan, status = plan_of(directory, damaged), status_of(directory, damaged)
    metrics = lines_of(directory.metrics, step_line, damaged, tail_bytes=METRICS_TAIL_BYTES)
    evaluations = lines_of(directory.evaluations, evaluation_line, damaged)
    events = lines_of(directory.events, event_line, damaged)
    state: str = status.state if status else "unknown" if directory.status.exists() else "not started"
    state = FINISHED if state == "done" else state
    silent_s = max(0.0, now_s - status.updated) if status and state not in ENDED else None
    if silent_s is not None and (
        (state == "running" and silent_s > SILENCE_S) or (is_orphan and silent_s > ORPHAN_SILENCE_S)
    ):
        state = "lost"
    if status:
        step, steps = status.step, status.steps
    else:  # not begun, or damaged
        step, steps = max((line["step"] for line in metrics), default=0), _planned_steps(experiment)
    speed = speed_of(metrics, events)
    checkpoints = saved_steps(directory.checkpoints)
    written = [event for event in events if event.event == "checkpoint" and event.step in checkpoints[-1:]]
    failures = [event for event in events if event.event == "failed"]
    return RunStatus(
        path=str(directory.path),
        experiment=str(experiment.get("experiment_class", "")),
        state=state,
        message=status.message if status else "",
        step=step,
        steps=steps,
        num_workers=plan.num_devices if plan else None,
        silent_s=silent_s,
        speed=speed,
        remaining_s=speed.step_s * (steps - step) if speed and steps and state == "running" else None,
        trends=trends_of(_over_the_run(directory, metrics)),
        evaluations=tuple(evaluations[:1] + evaluations[1:][-LAST_EVALUATIONS:]),
        processes=_processes(directory, plan, metrics, now_s, was_good=state == FINISHED),
        checkpoints=tuple(checkpoints),
        checkpoint_age_s=max(0.0, now_s - written[-1].time_s) if written else None,
        restarts=sum(event.event in ("restarted", "requeued") for event in events),
        last_failure=failures[-1].message.partition("\n")[0] if failures else "",
        uniform_rewards="".join(event.message for event in events if event.event == "uniform_rewards"),
        returncode=status.returncode if status else 1,
        memory_limit_bytes=plan.rationale.device_memory_bytes if plan and plan.rationale else None,
        damaged=tuple(damaged),
    )


def _over_the_run(directory: RunDirectory, newest: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines of metrics from a long run's beginning on, and behind them the newest ones."""
    begin = newest[0]["step"] if newest else 0
    if begin <= 1:
        return list(newest)
    spread = read_spread(directory.metrics, step_line, SPREAD_PLACES, SPREAD_BYTES)
    earlier = {line["step"]: line for _, lines in spread for line in lines if line["step"] < begin}
    return [*(earlier[step] for step in sorted(earlier)), *newest]


def _planned_steps(experiment: dict[str, Any]) -> int:
    """The `steps` of `experiment.json`, 0 if it has none."""
    values = experiment.get("values")
    steps = values.get("steps") if isinstance(values, dict) else None
    return steps if isinstance(steps, int) else 0


def _is_orphan(directory: RunDirectory) -> bool:
    """Whether the launching process ran on this machine and is gone, with all that it started; SLURM jobs go on."""
    try:
        holder = read_text(directory.launcher / "launcher.lock", errors="replace")
    except OSError:
        return False
    if (directory.launcher / "job.sbatch").exists():
        return False
    found = re.fullmatch(r"process (\d+) on (.+)", holder)
    return found is not None and found[2] == socket.gethostname() and not Path("/proc", found[1]).exists()


def speed_of(metrics: Iterable[dict[str, Any]], events: Sequence[Event]) -> Speed | None:
    """The speed of the last steps since the run's last start; None before the first step has ended."""
    start_s = max((event.time_s for event in events if event.event in STARTS), default=0.0)
    lines = [line for line in metrics if line["calls"] and _end_s(line) >= start_s][-SPEED_STEPS - 1 :]
    if not lines:
        return None
    if len(lines) == 1:
        return Speed(step_s=lines[0]["time_s"], tokens_per_s=lines[0]["tokens_per_s"])
    seconds = _end_s(lines[-1]) - _end_s(lines[0])
    tokens = sum(line["tokens"] for line in lines[1:])
    return Speed(step_s=seconds / (len(lines) - 1), tokens_per_s=tokens / seconds if seconds > 0 else 0.0)


def _end_s(line: dict[str, Any]) -> float:
    """When a step ended, in seconds since the epoch."""
    return max(float(call["end"]) for call in line["calls"].values())


def _processes(
    directory: RunDirectory,
    plan: ExecutionPlan | None,
    metrics: Sequence[dict[str, Any]],
    now_s: float,
    *,
    was_good: bool,
) -> tuple[ProcessState, ...]:
    peaks = metrics[-1].get("peak_bytes", []) if metrics else []
    found = []
    rationale = plan.rationale if plan else None
    for name, worker in [(MASTER, None), *((worker_name(i), i) for i in range(plan.num_devices if plan else 0))]:
        activity = None if was_good else read_activity(directory.activity(name))
        predicted = rationale.memory_of(worker) if rationale and worker is not None else None
        found.append(
            ProcessState(
                name=name,
                activity=activity.text if activity else None,
                since_s=max(0.0, now_s - activity.since) if activity else None,
                peak_bytes=peaks[worker] if worker is not None and worker < len(peaks) else None,
                predicted_bytes=predicted.peak_bytes if predicted else None,
            )
        )
    return tuple(found)
