"""One SLURM job: submitted, waited for, and ended."""

import base64
import binascii
import contextlib
import math
import re
import time
from pathlib import Path

from realhf.base.errors import RunError, UserError
from realhf.base.files import read_text
from realhf.launch.launcher import UNKNOWN_RETURNCODE, Exit
from realhf.launch.process import Job
from realhf.launch.slurm.commands import slurm_command
from realhf.launch.slurm.offer import ask
from realhf.launch.slurm.refusal import refusal, unmet
from realhf.launch.slurm.script import SlurmOptions
from realhf.launch.slurm.state import JobState, job_state
from realhf.launch.slurm.submission import submit
from realhf.rundir.paths import MASTER
from realhf.rundir.starts import current_start
from realhf.rundir.status import known_status

_ON_ALL = "all nodes of the job must see it at the same path"
# Reasons for which a job pends until somebody changes it or the cluster; and one that may also be of the moment.
_NEVER = re.compile(
    r"Partition(Node|Time)Limit|BadConstraints|Invalid(Account|QOS)|AccountNotAllowed|QOSNotAllowed"
    r"|(QOS|Assoc)M(ax|in)\w*PerJob(Limit)?"
)
_PERHAPS_NEVER = "PartitionConfig"
# Between a job's end and the moment when exit codes written on its nodes must be visible here.
_FILES_SETTLE_S = 2.0
# How long a job whose processes have all ended may take to end by itself.
_JOB_END_S = 60.0
# The time that SLURM may take to kill tasks that ignore SIGTERM: its KillWait (30 s by default), and the kill itself.
_KILL_S = 300.0


class SubmittedJob:
    """A job in SLURM's queue, present or past. Works with and without SLURM's accounting.

    A process leaves its exit code in a file (`job.sbatch.jinja`); without one, as after a node's failure, the job's
    state counts. A job that SLURM starts once more goes on: only its last start has ends to tell. Construction submits
    it, unless `job_id` names one that was submitted; it raises UserError where SLURM refuses, or there is no SLURM.
    """

    def __init__(self, options: SlurmOptions, job: Job, job_id: str = "") -> None:
        self._options, self._job, self._directory = options, job, job.directory
        self._start = job.start_id
        self._ended_start: str | None = None  # the start before SLURM's last one
        self._left = [process.name for process in job.processes]  # those whose ends have not been told
        self._first_failure = self._judged = ""
        self._state = JobState(name="PENDING")
        self._looked_s = self._ended_s = -math.inf
        self.id = job_id or submit(options, job)
        self._waits_since_s = self._answered_s = time.monotonic()
        self._restarts = 0
        if job_id:
            self._adopt()

    def status(self) -> str:
        """One line for the user: "job 17: PENDING (Resources)"."""
        return f"job {self.id}: {self._state.in_words}"

    @property
    def is_waiting(self) -> bool:
        """Whether no process of it runs, and it will start."""
        return self._state.is_waiting

    def poll(self) -> list[Exit]:
        """As `Launcher.poll`."""
        if not self._left:
            return []
        now_s = time.monotonic()
        if not self._state.is_over and now_s - self._looked_s >= self._options.poll_interval_s:
            self._look()
            self._check_waiting()
        exits = self._recorded_exits()
        if self._state.is_over and (why := cannot_run(self._state.comment, self._job)):
            raise UserError(f"job {self.id} has ended: {why}")
        if self._state.is_over and now_s - self._ended_s >= _FILES_SETTLE_S:
            exits += self._unrecorded_exits()
        return exits

    def stop(self, grace_s: float) -> None:
        """As `Launcher.stop`."""
        if not self._left and self._ends_within(_JOB_END_S):
            return  # it came to its own end and is not to be shown as cancelled
        slurm_command("scancel", self.id)  # SIGTERM now, SIGKILL after the cluster's KillWait
        if not self._ends_within(grace_s):
            slurm_command("scancel", "--signal=KILL", "--full", self.id)
            if not self._ends_within(_KILL_S):
                raise RunError(f"{self.status()} after scancel; end it by hand: scancel {self.id}")
        self._left = []

    # -- what the controller says

    def _adopt(self) -> None:
        state, _ = job_state(self.id)
        if state is not None:
            self._state, self._restarts = state, state.restarts
            if state.is_waiting and state.restarts:  # its next start has no id yet
                self._ended_start = self._start

    def _look(self) -> None:
        self._looked_s = time.monotonic()
        state, said = job_state(self.id)
        if state is None:
            if self._looked_s - self._answered_s > self._options.controller_timeout_s:
                raise RunError(
                    f"SLURM's controller has not answered for {self._options.controller_timeout_s:g} s "
                    f"({said}); job {self.id} may still run: see squeue and scancel"
                )
            return
        if state.restarts > self._restarts:  # exit codes of the earlier start do not count
            self._left, self._first_failure = [process.name for process in self._job.processes], ""
            self._restarts, self._ended_start = state.restarts, self._start
            self._waits_since_s = self._looked_s
        self._state, self._answered_s = state, self._looked_s
        if self._state.is_over:
            self._ended_s = self._looked_s

    def _check_waiting(self) -> None:
        self._check_reason()
        limit_s = self._options.queue_timeout_s
        waited_s = time.monotonic() - self._waits_since_s
        if limit_s is not None and self._state.is_waiting and waited_s > limit_s:
            status = self.status()
            self.stop(grace_s=0)
            raise RunError(f"the job did not start within {limit_s:g} s and was cancelled; {status}")

    def _check_reason(self) -> None:
        """Cancels a job that pends for a reason that does not go away."""
        if self._state.name != "PENDING" or self._state.reason == self._judged:
            return
        self._judged = self._state.reason
        is_final = _NEVER.fullmatch(self._judged) is not None
        if is_final or self._judged == _PERHAPS_NEVER:
            offer = ask()
            if is_final or any(unmet(self._options, self._job, offer)):
                text = refusal(f"{self.status()}, cancelled", self._options, self._job, offer)
                self.stop(grace_s=0)
                raise UserError(text)

    def _ends_within(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while True:
            self._look()
            if self._state.is_over:
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(min(self._options.poll_interval_s, 0.5))

    # -- how processes ended

    def _recorded_exits(self) -> list[Exit]:
        """Those whose tasks have noted an exit code, in the order in which they did."""
        folder = self._exits()
        found = [path for path in folder.iterdir() if path.name in self._left] if folder else []
        found.sort(key=lambda path: (path.stat().st_mtime_ns, path.name))
        codes = ((path.name, _code_in(path)) for path in found)
        ends = (self._exit(name, code) for name, code in codes if code is not None)
        return [end for end in ends if end is not None]

    def _exit(self, name: str, code: int) -> Exit | None:
        """None for a task that was killed because its job is ending: only the job's state tells why that is."""
        returncode, note = 128 - code if 128 < code < 193 else code, ""  # bash's way of telling a signal
        if returncode == 0 and not self._is_last_start():
            return None
        if returncode < 0 and self._first_failure:
            # SLURM kills the tasks beside the one that failed: to show them as killed would hide which it was.
            returncode, note = UNKNOWN_RETURNCODE, f"ended by SLURM after {self._first_failure} had failed"
        elif returncode:
            restarts = self._restarts
            if not self._state.is_ending:
                self._look()
            if self._restarts != restarts or (returncode < 0 and self._state.is_ending):
                return None
        if returncode and not self._first_failure:
            self._first_failure = name
        self._left.remove(name)
        return Exit(name=name, returncode=returncode, note=note)

    def _exits(self) -> Path | None:
        """Where the tasks of the job's present start leave their exit codes; None until that has begun."""
        if self._restarts or self._job.is_made_ready_there:
            self._start = current_start(self._directory) or self._start
        folder = self._directory.exits / self._start
        return folder if self._start != self._ended_start and folder.is_dir() else None

    def _is_last_start(self) -> bool:
        """Whether tasks that have ended well were the job's last: it may start once more from its checkpoint."""
        if self._state.is_over:
            return True
        if (self._directory.exits / self._start / MASTER).exists():
            status = known_status(self._directory.status)
            return status is None or status.state != "requeued"
        return False

    def _unrecorded_exits(self) -> list[Exit]:
        """Those that say nothing of themselves, when the job is over."""
        is_good = self._state.name == "COMPLETED"
        note = "" if is_good else self.status() + (f" on {self._state.nodes}" if self._state.nodes else "")
        left, self._left = self._left, []
        return [Exit(name=name, returncode=0 if is_good else UNKNOWN_RETURNCODE, note=note) for name in left]


def _code_in(path: Path) -> int | None:
    """The exit code that a task has noted; None for a file that holds none, whose task then counts as unrecorded."""
    with contextlib.suppress(OSError, ValueError):
        return int(read_text(path))
    return None


def cannot_run(comment: str, job: Job) -> str:
    """Why a job cannot run on its nodes, for the user, as its batch script leaves it in the job's comment (`stop`); ""
    where the comment tells no reason."""
    kind, _, code = comment.partition(":")
    try:
        what = base64.b64decode(code).decode(errors="replace").strip()
    except binascii.Error:
        return ""
    match kind:
        case "realhf-directory":
            return (
                f"the run directory {job.directory.path} is not there on {what}; {_ON_ALL}: give --run-dir on a file "
                "system that they share"
            )
        case "realhf-interpreter":
            return (
                f"the program {job.workers[0].argv[0]} is not there on {what}; {_ON_ALL}: install realhf on a file "
                "system that they share, and run it from there"
            )
        case "realhf-setup":
            return f"--setup-line {what!r} failed on its first node; try it on a node (srun --pty bash)"
        case _:
            return ""
