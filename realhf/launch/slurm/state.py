"""The state of a job, from SLURM's controller."""

import re
from dataclasses import dataclass

from realhf.launch.slurm.commands import TIMEOUT_S, output_of, slurm_command

# States a job does not leave again, unless it is requeued. Whatever else is shown, in this or a later SLURM, counts as
# unfinished.
_FINAL_STATES = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"}
    | {"REVOKED", "TIMEOUT"}
)
_WAITING_STATES = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"})


@dataclass(frozen=True, kw_only=True)
class JobState:
    """`name` is "" where the controller has forgotten the job; it does so some minutes after its end.

    `reason`: why it waits. `restarts`: how often SLURM has started it once more. `exit_code` as SLURM writes it, "3:0".
    `comment`: the message that the batch script has left (`cannot_run` in `job.py`).
    """

    name: str
    reason: str = ""
    nodes: str = ""
    restarts: int = 0
    exit_code: str = ""
    comment: str = ""

    @property
    def is_over(self) -> bool:
        return not self.name or self.name in _FINAL_STATES

    @property
    def is_waiting(self) -> bool:
        return self.name in _WAITING_STATES

    @property
    def is_ending(self) -> bool:
        """Whether SLURM has killed the remaining processes of this start of the job, or is about to."""
        return self.is_over or self.is_waiting or self.name == "COMPLETING"

    @property
    def in_words(self) -> str:
        """PENDING (Resources)"""
        details = [self.reason, f"exit code {self.exit_code}" if self.exit_code and self.is_over else ""]
        text = ", ".join(filter(None, details))
        return (self.name or "over") + (f" ({text})" if text else "")


def parsed(shown: str) -> JobState | None:
    """The state in a line of `scontrol show job --oneliner`; None where it has none."""
    found = {name: value for name, value in re.findall(r"\b(\w+)=(\S*)", shown) if value not in ("(null)", "None")}
    if not (name := re.match(r"[A-Z_]+", found.get("JobState", ""))):
        return None
    # NodeList is also the end of ReqNodeList and ExcNodeList, which are words of their own here.
    return JobState(
        name=name[0],
        reason=found.get("Reason", ""),
        nodes=found.get("NodeList", ""),
        restarts=int(found.get("Restarts", "0")),
        exit_code=found.get("ExitCode", ""),
        comment=found.get("Comment", ""),
    )


def _is_of_task(job: str, shown: str) -> bool:
    """Whether a line of `scontrol show job` is of this task, if the job is one of an array: 17_3."""
    task = job.partition("_")[2]
    found = re.search(r"\bArrayTaskId=([\d,-]+)(?=[%\s]|$)", shown)
    if not task or found is None:
        return True
    ranges = (part.partition("-") for part in found[1].split(",") if part)
    return any(int(first) <= int(task) <= int(last or first) for first, _, last in ranges)


def job_state(job: str, timeout_s: float = TIMEOUT_S) -> tuple[JobState | None, str]:
    """The job's state, or None and SLURM's message. Raises UserError where there is no SLURM."""
    shown = slurm_command("scontrol", "show", "job", "--oneliner", job, timeout_s=timeout_s)
    state = parsed(shown.stdout) if shown.returncode == 0 else None
    if state is not None and not _is_of_task(job, shown.stdout):
        state = JobState(name="CANCELLED")  # while it waited with others, which are shown in its place
    if state is None and re.search(r"invalid job id|^job \S+ not found", output_of(shown).lower()):
        state = JobState(name="")  # it ended, and the controller forgets after its MinJobAge
    return state, output_of(shown)
