"""One SLURM job: submitted, waited for, and ended."""

import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass

from realhf.base.errors import RunError, UserError
from realhf.base.files import last_lines
from realhf.launch.launcher import UNKNOWN_RETURNCODE, Exit
from realhf.launch.process import Job
from realhf.launch.slurm.script import SlurmOptions, sbatch_text

# States a job does not leave again. Whatever else is shown, in this or a later SLURM, counts as unfinished.
_FINAL_STATES = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"}
    | {"REVOKED", "TIMEOUT"}
)
_WAITING_STATES = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"})
_LOG_LINES = 10
_COMMAND_TIMEOUT_S = 60.0
# Between a job's end and the moment when exit codes written on its nodes must be visible here.
_FILES_SETTLE_S = 2.0
# How long a job whose processes have all ended may take to end by itself.
_JOB_END_S = 60.0
# What SLURM may take to kill tasks that ignore SIGTERM: its KillWait (30 s by default), and the kill itself.
_KILL_S = 300.0


@dataclass(frozen=True)
class _State:
    """What the controller says of a job; `name` is "" where it has forgotten the job."""

    name: str
    detail: str = ""

    @property
    def is_over(self) -> bool:
        return not self.name or self.name in _FINAL_STATES

    @property
    def is_ending(self) -> bool:
        """Whether SLURM is about to kill what is left of it, or has done so."""
        return self.is_over or self.name == "COMPLETING"


class SubmittedJob:
    """A job in SLURM's queue, present or past. Works with and without SLURM's accounting.

    A process leaves its exit code in a file (`script.py`); without one, as after a node's failure, the job's state
    counts. Construction raises UserError where SLURM refuses the job, or there is no SLURM.
    """

    def __init__(self, options: SlurmOptions, job: Job) -> None:
        self._options, self._directory = options, job.directory
        self._left = [process.name for process in job.processes]  # those whose ends have not been told
        self._first_failure = ""
        self._state = _State("PENDING")
        self._looked_s = self._ended_s = 0.0
        self.id = _submit(sbatch_text(options, job), job)
        self._submitted_s = self._answered_s = time.monotonic()

    def status(self) -> str:
        """One line for the user: "job 17: PENDING (Resources)"."""
        return f"job {self.id}: {self._state.name or 'over'}{self._state.detail and f' ({self._state.detail})'}"

    def poll(self) -> list[Exit]:
        """As `Launcher.poll`."""
        if not self._left:
            return []
        now_s = time.monotonic()
        if not self._state.is_over and now_s - self._looked_s >= self._options.poll_interval_s:
            self._look()
            self._check_waiting()
        exits = self._recorded_exits()
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

    def _look(self) -> None:
        self._looked_s = time.monotonic()
        shown = slurm_command("scontrol", "show", "job", "--oneliner", self.id)
        if shown.returncode == 0 and (state := re.search(r"\bJobState=([A-Z_]+)", shown.stdout)):
            details = re.findall(r"\bReason=(?!None\b)(\S+)", shown.stdout)[:1]
            if state[1] in _FINAL_STATES:
                details += [f"exit code {code}" for code in re.findall(r"\bExitCode=(\d+:\d+)", shown.stdout)[:1]]
            self._state = _State(state[1], ", ".join(details))
        elif "invalid job id" in _output(shown).lower():
            self._state = _State("")  # it ended, and the controller forgets after its MinJobAge
        elif self._looked_s - self._answered_s > self._options.controller_timeout_s:
            raise RunError(
                f"SLURM's controller has not answered for {self._options.controller_timeout_s:g} s "
                f"({_output(shown)}); job {self.id} may still run: see squeue and scancel"
            )
        else:
            return
        self._answered_s = self._looked_s
        if self._state.is_over:
            self._ended_s = self._looked_s

    def _check_waiting(self) -> None:
        limit_s = self._options.queue_timeout_s
        waited_s = time.monotonic() - self._submitted_s
        if limit_s is not None and self._state.name in _WAITING_STATES and waited_s > limit_s:
            status = self.status()
            self.stop(grace_s=0)
            raise RunError(f"the job did not start within {limit_s:g} s and was cancelled; {status}")

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
        found = [path for path in self._directory.exits.iterdir() if path.name in self._left]
        found.sort(key=lambda path: (path.stat().st_mtime_ns, path.name))
        return [end for path in found if (end := self._exit(path.name, int(path.read_text()))) is not None]

    def _exit(self, name: str, code: int) -> Exit | None:
        """None for a task that was killed because its job is ending: only the job's state tells why that is."""
        returncode, note = 128 - code if 128 < code < 193 else code, ""  # bash's way of telling a signal
        if returncode < 0 and self._first_failure:
            # SLURM kills the tasks beside the one that failed: to show them as killed would hide which it was.
            returncode, note = UNKNOWN_RETURNCODE, f"ended by SLURM after {self._first_failure} had failed"
        elif returncode < 0:
            if not self._state.is_ending:
                self._look()
            if self._state.is_ending:
                return None
        if returncode and not self._first_failure:
            self._first_failure = name
        self._left.remove(name)
        return Exit(name=name, returncode=returncode, note=note)

    def _unrecorded_exits(self) -> list[Exit]:
        """Those that say nothing of themselves, when the job is over."""
        is_good = self._state.name == "COMPLETED"
        note = "" if is_good else self.status()
        if not is_good and not self._first_failure:
            note += last_lines(self._directory.job_log, _LOG_LINES)
        left, self._left = self._left, []
        return [Exit(name=name, returncode=0 if is_good else UNKNOWN_RETURNCODE, note=note) for name in left]


def _submit(text: str, job: Job) -> str:
    """The number of the job that SLURM has made of a batch script. Raises UserError where it refuses."""
    job.directory.exits.mkdir(parents=True, exist_ok=True)
    for left in job.directory.exits.iterdir():  # by an earlier start of the run
        left.unlink()
    script = job.directory.launcher / "job.sbatch"
    script.write_text(text)
    submitted = slurm_command("sbatch", "--parsable", str(script))
    job_id = submitted.stdout.strip().partition(";")[0]  # "17" or "17;cluster"
    if submitted.returncode or not job_id.isdecimal():
        raise UserError(
            f"SLURM refused the job: {_output(submitted) or 'no reason given'}; "
            f"check partition, account, nodes and limits (the script is {script})"
        )
    return job_id


def slurm_command(*command: str) -> subprocess.CompletedProcess[str]:
    """Runs a SLURM command, with a deadline. Raises UserError where there is no such command."""
    # What an enclosing job put into the environment would speak for that job.
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SRUN_"))}
    if "SLURM_CONF" in os.environ:
        env["SLURM_CONF"] = os.environ["SLURM_CONF"]
    if shutil.which(command[0]) is None:
        raise UserError(f"{command[0]} was not found: is this a machine of a SLURM cluster? else use --launcher local")
    try:
        return subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no answer within {_COMMAND_TIMEOUT_S:g} s")


def _output(ended: subprocess.CompletedProcess[str]) -> str:
    return " ".join((ended.stderr.strip() or ended.stdout.strip()).split())
