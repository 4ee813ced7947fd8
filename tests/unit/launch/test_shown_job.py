"""What scontrol shows of a job: lines of SLURM 22.05, recorded and shortened, and of 23.11 and later, written after the
manuals (not tested on one)."""

import subprocess

import pytest

from realhf.launch.slurm import state as state_module
from realhf.launch.slurm.state import JobState, job_state, parsed

RUNNING = (
    "JobId=1 JobName=realhf-ppo UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=4294901759 Nice=0 "
    "Account=(null) QOS=(null) JobState=RUNNING Reason=None Dependency=(null) Requeue=0 Restarts=0 BatchFlag=1 "
    "Reboot=0 ExitCode=0:0 RunTime=00:00:02 TimeLimit=01:00:00 Partition=main ReqNodeList=(null) "
    "ExcNodeList=(null) NodeList=node[1-2] BatchHost=node1 NumNodes=2 NumCPUs=6\n"
)
ENDED = RUNNING.replace("JobState=RUNNING Reason=None", "JobState=FAILED Reason=NonZeroExitCode").replace(
    "ExitCode=0:0", "ExitCode=17:0"
)
PENDING = RUNNING.replace("RUNNING Reason=None", "PENDING Reason=Resources").replace("=node[1-2] BatchHost=node1", "=")
NEWER = (
    "JobId=9 JobName=realhf-ppo UserId=me(1000) GroupId=me(1000) Account=lab QOS=normal "
    "JobState=PENDING Reason=ReqNodeNotAvail,_UnavailableNodes:n7 FailedNode=n7 Dependency=(null) ExitCode=0:0 "
    "DerivedExitCode=0:0 NodeList= SchedNodeList=n[1-2] Comment=realhf-setup:Zm9v TresPerNode=gres/gpu:8\n"
)


def test_a_job_of_each_kind() -> None:
    running, ended, pending = map(parsed, (RUNNING, ENDED, PENDING))
    assert running is not None
    assert (running.in_words, running.nodes, running.is_over) == ("RUNNING", "node[1-2]", False)
    assert ended is not None
    assert (ended.in_words, ended.is_over) == ("FAILED (NonZeroExitCode, exit code 17:0)", True)
    assert pending is not None
    assert (pending.in_words, pending.nodes) == ("PENDING (Resources)", "")


def test_of_newer_versions() -> None:
    state = parsed(NEWER)
    assert state is not None
    assert state.in_words == "PENDING (ReqNodeNotAvail,_UnavailableNodes:n7)"
    assert (state.nodes, state.comment) == ("", "realhf-setup:Zm9v")


@pytest.mark.parametrize(
    ("names", "over", "waiting", "ending"),
    [
        ("RUNNING SUSPENDED STOPPED RESIZING SOMETHING_NEW", False, False, False),
        ("PENDING CONFIGURING REQUEUED REQUEUE_HOLD REQUEUE_FED SPECIAL_EXIT", False, True, True),
        ("COMPLETING", False, False, True),
        (
            "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED REVOKED TIMEOUT",
            True,
            False,
            True,
        ),
    ],
)
def test_states_that_a_job_leaves_or_not(names: str, over: bool, waiting: bool, ending: bool) -> None:
    for name in names.split():
        state = parsed(f"JobId=1 JobState={name} ExitCode=3:0 Restarts=2")
        assert state is not None
        assert (state.is_over, state.is_waiting, state.is_ending, state.restarts) == (over, waiting, ending, 2), name
        assert state.in_words == (f"{name} (exit code 3:0)" if over else name)
    assert JobState(name="").is_over
    assert JobState(name="").in_words == "over"


def test_what_is_no_job() -> None:
    assert parsed("slurm_load_jobs error: Unable to contact slurm controller\n") is None


@pytest.mark.parametrize(
    ("tasks", "job", "name"),
    [
        ("0-3%2", "20_3", "PENDING"),
        ("1-2,7,9-12%1", "20_7", "PENDING"),
        ("1-2,7,9-12%1", "20_11", "PENDING"),
        ("1-2%1", "20_0", "CANCELLED"),
        ("2", "20_2", "PENDING"),
        ("1", "20", "PENDING"),
    ],
)
def test_a_task_that_is_not_among_those_that_wait_was_cancelled(
    tasks: str, job: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SLURM shows the tasks of an array that wait as one job, whichever is asked for."""
    shown = PENDING.replace("JobId=1 ", f"JobId=20 ArrayJobId=20 ArrayTaskId={tasks} ")
    answered(monkeypatch, 0, shown)
    found, _ = job_state(job)
    assert found is not None
    assert found.name == name


def test_a_task_that_slurm_has_forgotten_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    answered(monkeypatch, 1, "Job 20_0 not found")
    found, _ = job_state("20_0")
    assert found is not None
    assert found.is_over


@pytest.mark.parametrize(
    ("code", "text", "name"),
    [
        (1, "slurm_load_jobs error: Invalid job id specified\n", ""),
        (1, "Job 17 not found", ""),
        (1, "slurm_load_jobs error: Unable to contact slurm controller (connect failure)", None),
        (1, RUNNING, None),
        (0, RUNNING.replace("JobName=realhf-ppo", "JobName=job_x_not_found"), "RUNNING"),
        (0, RUNNING + "invalid job id", "RUNNING"),
    ],
)
def test_a_job_that_the_controller_does_not_know_is_over_and_silence_says_nothing(
    monkeypatch: pytest.MonkeyPatch, code: int, text: str, name: str | None
) -> None:
    answered(monkeypatch, code, text)
    state, said = job_state("17")
    assert (state.name if state else None) == name
    assert said == " ".join(text.split())


def test_a_question_has_the_deadline_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """`realhf status` does not wait a minute for a controller that is away."""
    asked: list[float] = []

    def command(*words: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
        asked.append(timeout_s)
        return subprocess.CompletedProcess(words, 0, RUNNING, "")

    monkeypatch.setattr(state_module, "slurm_command", command)
    job_state("1", timeout_s=3.0)
    job_state("1")
    assert asked == [3.0, 60.0]
    assert JobState(name="PENDING").restarts == 0


def answered(monkeypatch: pytest.MonkeyPatch, code: int, text: str) -> None:
    """Has SLURM's commands print a text."""
    monkeypatch.setattr(
        state_module, "slurm_command", lambda *words, **_: subprocess.CompletedProcess(words, code, text, "")
    )
