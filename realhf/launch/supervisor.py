"""Watches a run from outside until it ends, and says in one message why it ended badly."""

import math
import signal
import time
from collections.abc import Callable, Sequence

from realhf.base.errors import RunError
from realhf.base.files import last_lines
from realhf.launch.launcher import UNKNOWN_RETURNCODE, Exit, Launcher
from realhf.launch.process import MASTERLESS_RETURNCODE, TOLD_RETURNCODE, Job
from realhf.rundir.flight_recorder import read_activity
from realhf.rundir.paths import MASTER, RunDirectory, worker_of
from realhf.rundir.status import known_status

POLL_S = 0.1
# Return codes of workers that have told the master their failure, or whose end has another cause.
_NOT_THE_CAUSE = (0, TOLD_RETURNCODE, MASTERLESS_RETURNCODE, UNKNOWN_RETURNCODE)
# After a first bad end, the others get this long to end as well: the first to be seen is not always the cause, and the
# master takes a few seconds to find it out (more on a busy machine).
_SETTLE_S = 30.0
# A worker that ended without telling the master is the cause; others may have ended of the same one in that moment.
_SILENT_SETTLE_S = 1.0
_WORKERS_END_S = 120.0
_STOP_GRACE_S = 3.0
LOG_LINES = 8
# A message has at most twenty lines.
_DESCRIBED = 2
_NAMED = 8
# Exit codes that have a meaning of their own, here or for the command line.
_NOT_PASSED_ON = (2, 130, TOLD_RETURNCODE, UNKNOWN_RETURNCODE, MASTERLESS_RETURNCODE)
# The master writes its status every second, on a busy machine too. One that does not for this long is given up.
MASTER_SILENCE_S = 60.0
# Shared file systems may show a file late, up to a minute with NFS's defaults.
_FILES_LATE_S = 90.0
# A poll later than this means that this process stood still itself, and has missed signs of life.
_STOOD_STILL_S = 5.0


def supervise(
    launcher: Launcher,
    job: Job,
    on_poll: Callable[[], None],
    start: Callable[[], None] | None = None,
    *,
    is_ahead: Callable[[], bool] = lambda: False,
    leaves: bool = False,
) -> None:
    """Starts the processes of a job (`start`: in its own way), and returns when all have ended well; `on_poll` is
    called ten times a second. `is_ahead`: whether the job, which may run, has yet to start its processes.

    Raises:
        RunError: one ended badly. Whatever is raised (Ctrl-C too, unless that `leaves` them), all are stopped first.
    """
    exits: dict[str, Exit] = {}
    master = _SignsOfLife(job.directory, MASTER_SILENCE_S + launcher.is_remote * _FILES_LATE_S)
    try:
        start() if start else launcher.start(job)
        deadline, was_ahead = math.inf, is_ahead()
        while len(exits) < len(job.processes):
            exits |= {end.name: end for end in sorted(launcher.poll(), key=lambda end: not end.is_killed)}
            on_poll()
            bad = [end for end in exits.values() if end.returncode != 0]
            if bad and _is_settled(exits):
                break
            deadline = min(deadline, time.monotonic() + _patience_s(bad, MASTER in exits))
            if time.monotonic() > deadline:
                break
            if launcher.is_waiting() or was_ahead:
                master.wait()
            elif MASTER not in exits:
                master.check()
            was_ahead = is_ahead()
            time.sleep(POLL_S)
        on_poll()
    except KeyboardInterrupt:
        if leaves:
            launcher.leave()
        raise
    finally:
        _stop(launcher)
    bad = [end for end in exits.values() if end.returncode != 0]
    if bad:
        raise _explain(bad, job.directory, launcher)
    if late := [process.name for process in job.processes if process.name not in exits]:
        raise RunError(
            f"the master ended but {', '.join(late)} did not within {_WORKERS_END_S:g} s; logs in {job.directory.logs}"
        )


def _stop(launcher: Launcher) -> None:
    try:
        launcher.stop(grace_s=_STOP_GRACE_S)
    except KeyboardInterrupt:  # once more: the user does not want to wait
        launcher.stop(grace_s=0)
        raise


class _SignsOfLife:
    """Whether the master still writes its status, once it has begun to: before that it may wait in a queue.

    Only changes of the file count, by this process's clock: clocks of nodes differ.
    """

    def __init__(self, directory: RunDirectory, silence_s: float) -> None:
        self._directory, self._silence_s = directory, silence_s
        self._first = self._last = self._updated()
        self._seen_s = self._checked_s = time.monotonic()

    def wait(self) -> None:
        """Notes that there is no master yet, or none any more until the job starts again."""
        self._first = self._last = self._updated()

    def check(self) -> None:
        """To be called often. Raises RunError when the master is silent for too long."""
        now_s, updated = time.monotonic(), self._updated()
        if updated != self._last or now_s - self._checked_s > _STOOD_STILL_S:
            self._last, self._seen_s = updated, now_s
        self._checked_s = now_s
        if self._last != self._first and now_s - self._seen_s > self._silence_s:
            raise RunError(
                f"the master has been silent for {now_s - self._seen_s:.0f} s: it hangs, or its node does"
                f"{_last_activity(self._directory, MASTER)}; log: {self._directory.log(MASTER)}"
            )

    def _updated(self) -> float | None:
        status = known_status(self._directory.status)
        return None if status is None else status.updated


def _is_settled(exits: dict[str, Exit]) -> bool:
    """Whether the cause is known: a process was killed, or the master has written down the failure."""
    return any(end.is_killed for end in exits.values()) or MASTER in exits


def _patience_s(bad: Sequence[Exit], has_master_ended: bool) -> float:
    """How long the others are waited for after these ends."""
    if any(_is_silent(end) for end in bad):
        return _SILENT_SETTLE_S
    return _SETTLE_S if bad else _WORKERS_END_S if has_master_ended else math.inf


def _is_silent(end: Exit) -> bool:
    """Whether a process ended badly without a word: it was killed, or is a worker that ended by itself."""
    return end.is_killed or (end.name != MASTER and end.returncode not in _NOT_THE_CAUSE)


def _explain(bad: Sequence[Exit], directory: RunDirectory, launcher: Launcher) -> RunError:
    """The most telling of several bad ends: the silent ones, else the failure that the master reported, else all.

    Among silent ends, only those like the first count: the others may be a consequence.
    """
    silent = [end for end in bad if _is_silent(end)]
    silent = [end for end in silent if end.is_killed == silent[0].is_killed]
    status = known_status(directory.status)
    if not silent and status is not None and status.state == "failed":
        return RunError(status.message, status.blamed)
    blamed = silent or bad
    workers = [index for end in blamed if (index := worker_of(end.name)) is not None]
    code = next((end.returncode for end in blamed if not end.is_killed and end.returncode not in _NOT_PASSED_ON), 1)
    return RunError(_described(blamed, directory, launcher), workers, code)


def _described(blamed: Sequence[Exit], directory: RunDirectory, launcher: Launcher) -> str:
    """At most `_DESCRIBED` ends in full; ends known only by the job's state share one sentence."""
    unknown = [end for end in blamed if end.returncode == UNKNOWN_RETURNCODE and end.note]
    known = [end for end in blamed if end not in unknown]
    texts = [_describe(end, directory, launcher) for end in known[:_DESCRIBED]]
    if rest := known[_DESCRIBED:]:
        texts.append(f"ended badly too: {', '.join(end.name for end in rest)}")
    if unknown:
        notes = "; ".join(dict.fromkeys(end.note for end in unknown))
        names = ", ".join(end.name for end in unknown[:_NAMED]) + (", ..." if len(unknown) > _NAMED else "")
        log = "" if known else f"; log: {directory.job_log}{last_lines(directory.job_log, LOG_LINES)}"
        texts.append(f"{notes}: ended {names}{_last_activity(directory, unknown[0].name)}{log}")
    return "\n".join(texts)


def _describe(end: Exit, directory: RunDirectory, launcher: Launcher) -> str:
    if end.is_killed:
        names = {number.value: f" ({number.name})" for number in signal.Signals}  # most real-time signals have none
        how = f"was killed by signal {-end.returncode}{names.get(-end.returncode, '')}"
    else:
        how = f"ended with exit code {end.returncode}"
    note = f" ({end.note})" if end.note else ""
    log = directory.log(end.name)
    # The master is on the first host.
    host = launcher.place(worker_of(end.name) or 0) if launcher.is_remote else None
    on = f" on {host}" if host else ""
    return f"{end.name} {how}{on}{_last_activity(directory, end.name)}{note}; log: {log}{last_lines(log, LOG_LINES)}"


def _last_activity(directory: RunDirectory, process: str) -> str:
    activity = read_activity(directory.activity(process))
    return f"; last activity: {activity}" if activity else ""
