"""A SLURM job from its submission to its end, with a stand-in for the controller and for the clock."""

import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from realhf.base.errors import RunError, UserError
from realhf.launch.launcher import UNKNOWN_RETURNCODE, Exit
from realhf.launch.process import Job, ProcessSpec
from realhf.launch.slurm import job as job_module
from realhf.launch.slurm import submission
from realhf.launch.slurm.job import SubmittedJob, cannot_run
from realhf.launch.slurm.offer import Nodes, Offer
from realhf.launch.slurm.script import SlurmOptions
from realhf.launch.slurm.state import JobState
from realhf.rundir.paths import RunDirectory
from realhf.rundir.status import Status, write_status

OPTIONS = SlurmOptions(cpu_only=True, poll_interval_s=2.0, queue_timeout_s=100.0, controller_timeout_s=50.0)
NODES = Nodes(partition="main", is_default=True, count=4, cpus=64, memory_mb=64_000)


class Controller:
    """What it says of job 17, what it was asked to do, and its clock. `after` is called at each look."""

    def __init__(self) -> None:
        self.state: JobState | None = JobState(name="PENDING", reason="Resources")
        self.commands: list[tuple[str, ...]] = []
        self.times_s: list[float] = []  # of the commands
        self.now_s = 1000.0
        self.asked = self.submitted = 0  # for what the cluster offers; jobs
        self.looks = 0
        self.after: Callable[[], None] = lambda: None

    def job_state(self, job: str) -> tuple[JobState | None, str]:
        assert job == "17"
        self.looks += 1
        self.after()
        return self.state, "no answer"

    def command(self, *words: str, **_: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(words)
        self.times_s.append(self.now_s)
        return subprocess.CompletedProcess(words, 0, "", "")

    def submit(self, options: SlurmOptions, job: Job) -> str:
        self.submitted += 1
        return "17"

    def ask(self) -> Offer:
        self.asked += 1
        return Offer(nodes=(NODES,))

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Controller:
    made = Controller()
    monkeypatch.setattr(job_module, "time", made)
    monkeypatch.setattr(job_module, "job_state", made.job_state)
    monkeypatch.setattr(job_module, "slurm_command", made.command)
    monkeypatch.setattr(job_module, "submit", made.submit)
    monkeypatch.setattr(job_module, "ask", made.ask)
    return made


@pytest.fixture
def job(tmp_path: Path) -> Job:
    processes = tuple(ProcessSpec(name=name, argv=("true",)) for name in ("master", "worker-0", "worker-1"))
    made = Job(
        directory=RunDirectory.create(tmp_path / "run"), processes=processes, workers_per_node=2, start_id="first"
    )
    made.exits.mkdir(parents=True)
    return made


def says(controller: Controller, name: str, **more: Any) -> None:
    controller.state = JobState(name=name, **more)


def left(job: Job, **codes: int) -> None:
    for name, code in codes.items():
        (job.exits / name.replace("_", "-")).write_text(f"{code}\n")


def test_ends_are_told_once_as_tasks_note_them(controller: Controller, job: Job) -> None:
    says(controller, "RUNNING")
    submitted = SubmittedJob(OPTIONS, job)
    assert submitted.poll() == []
    left(job, worker_1=3)
    assert submitted.poll() == [Exit(name="worker-1", returncode=3)]
    assert submitted.poll() == []
    left(job, worker_0=128 + signal.SIGKILL)
    [end] = submitted.poll()
    assert end == Exit(name="worker-0", returncode=UNKNOWN_RETURNCODE, note="ended by SLURM after worker-1 had failed")


@pytest.mark.parametrize("content", [b"", b"no number", b"\xff\xfe"])
def test_a_file_without_an_exit_code_tells_nothing(controller: Controller, job: Job, content: bytes) -> None:
    """A node that lost its power may leave one. Its task ends as its job says."""
    says(controller, "RUNNING")
    submitted = SubmittedJob(OPTIONS, job)
    (job.exits / "worker-0").write_bytes(content)
    (job.exits / "worker-1").mkdir()
    assert submitted.poll() == []
    says(controller, "COMPLETED")
    controller.now_s += 1000.0
    submitted.poll()
    controller.now_s += 1000.0
    assert sorted(end.name for end in submitted.poll()) == ["master", "worker-0", "worker-1"]


def test_a_task_that_was_killed_first_is_told_with_its_signal(controller: Controller, job: Job) -> None:
    says(controller, "RUNNING")
    submitted = SubmittedJob(OPTIONS, job)
    left(job, worker_0=128 + signal.SIGSEGV)
    assert submitted.poll() == [Exit(name="worker-0", returncode=-signal.SIGSEGV)]


def test_how_a_job_is_doing_is_asked_again_for_a_task_that_failed(controller: Controller, job: Job) -> None:
    """Unless it is known that the job is about to end."""
    for name, looks in (("RUNNING", 2), ("COMPLETING", 1)):
        says(controller, name)
        submitted = SubmittedJob(OPTIONS, job)
        controller.looks = 0
        left(job, worker_0=3)
        assert submitted.poll() == [Exit(name="worker-0", returncode=3)]
        assert controller.looks == looks
        left(job, worker_0=0)


def test_what_a_start_has_left_that_slurm_follows_up_with_another_counts_no_more(
    controller: Controller, job: Job
) -> None:
    says(controller, "RUNNING")
    submitted = SubmittedJob(OPTIONS, job)
    submitted.poll()
    says(controller, "PENDING", restarts=1)
    left(job, worker_0=5)
    assert submitted.poll() == []
    controller.now_s += 2.0
    assert submitted.poll() == []
    says(controller, "FAILED", restarts=1)
    controller.now_s += 2.0
    submitted.poll()
    controller.now_s += 2.0
    assert [end.name for end in submitted.poll()] == ["master", "worker-0", "worker-1"]


def test_a_job_that_goes_on_later_has_no_good_ends(controller: Controller, job: Job) -> None:
    says(controller, "RUNNING")
    submitted = SubmittedJob(OPTIONS, job)
    left(job, master=0, worker_0=0)
    write_status(job.directory.status, Status(state="requeued", step=1, steps=2))
    assert submitted.poll() == []
    says(controller, "COMPLETED")  # SLURM does not let it start once more
    controller.now_s += 2.0
    assert {(end.name, end.returncode) for end in submitted.poll()} == {("master", 0), ("worker-0", 0)}
    says(controller, "RUNNING")
    for state, told in (("requeued", 0), ("finished", 2)):
        write_status(job.directory.status, Status(state=state, step=2, steps=2))
        assert len(SubmittedJob(OPTIONS, job).poll()) == told
    job.directory.status.unlink()
    assert len(SubmittedJob(OPTIONS, job).poll()) == 2


def test_a_job_that_plans_its_run_begins_its_start_itself(controller: Controller, job: Job) -> None:
    says(controller, "RUNNING")
    planned = replace(job, start_id="", is_made_ready_there=True)
    for made in (planned, replace(planned, is_made_ready_there=False)):
        submitted = SubmittedJob(OPTIONS, made)
        job.directory.start.write_text("third\n")
        (job.directory.exits / "third").mkdir(exist_ok=True)
        (job.directory.exits / "third" / "worker-0").write_text("4\n")
        assert [end.returncode for end in submitted.poll()] == [4] * made.is_made_ready_there


def test_ends_that_were_noted_at_once_are_told_by_name(controller: Controller, job: Job) -> None:
    says(controller, "RUNNING")
    submitted = SubmittedJob(OPTIONS, job)
    left(job, worker_1=3, worker_0=2, master=1)
    for name in ("worker-1", "worker-0", "master"):
        os.utime(job.exits / name, (10, 10))
    assert [end.name for end in submitted.poll()] == ["master", "worker-0", "worker-1"]


def test_a_process_that_ended_well_is_no_first_failure(controller: Controller, job: Job) -> None:
    says(controller, "RUNNING")
    submitted = SubmittedJob(OPTIONS, job)
    left(job, master=0)
    submitted.poll()
    left(job, worker_0=128 + signal.SIGKILL)
    assert submitted.poll() == [Exit(name="worker-0", returncode=-signal.SIGKILL)]


@pytest.mark.parametrize("code", [129, 192, 128, 193])
def test_codes_that_tell_a_signal(controller: Controller, job: Job, code: int) -> None:
    """Of 64 signals: 129 to 192."""
    says(controller, "RUNNING")
    submitted = SubmittedJob(OPTIONS, job)
    left(job, worker_0=code)
    assert submitted.poll()[0].returncode == (128 - code if code in (129, 192) else code)


def test_a_task_killed_because_the_job_ends_leaves_the_word_to_the_job(controller: Controller, job: Job) -> None:
    says(controller, "RUNNING")
    submitted = SubmittedJob(OPTIONS, job)
    submitted.poll()
    says(controller, "TIMEOUT", nodes="n1", exit_code="0:15")
    left(job, worker_0=128 + signal.SIGTERM)
    assert submitted.poll() == []  # it looks at once, though the last look is not two seconds old
    controller.now_s += 1.9
    assert submitted.poll() == []  # files of other nodes may come late
    controller.now_s += 0.2
    ends = submitted.poll()
    assert [end.name for end in ends] == ["master", "worker-0", "worker-1"]
    assert {(end.returncode, end.note) for end in ends} == {
        (UNKNOWN_RETURNCODE, "job 17: TIMEOUT (exit code 0:15) on n1")
    }
    assert submitted.poll() == []


def test_a_job_that_has_completed_ended_well(controller: Controller, job: Job) -> None:
    submitted = SubmittedJob(OPTIONS, job)
    says(controller, "COMPLETED")
    submitted.poll()
    controller.now_s += 2.0
    assert {(end.returncode, end.note) for end in submitted.poll()} == {(0, "")}


def test_a_job_that_never_had_a_node_is_told_without_one(controller: Controller, job: Job) -> None:
    submitted = SubmittedJob(OPTIONS, job)
    says(controller, "CANCELLED")
    submitted.poll()
    controller.now_s += 2.0
    assert {(end.returncode, end.note) for end in submitted.poll()} == {(UNKNOWN_RETURNCODE, "job 17: CANCELLED")}


def test_the_controller_is_asked_at_its_interval(controller: Controller, job: Job) -> None:
    submitted = SubmittedJob(OPTIONS, job)
    for _ in range(10):
        submitted.poll()
        controller.now_s += 0.5
    assert controller.looks == 3  # at 0, 2 and 4 of 5 seconds
    assert submitted.status() == "job 17: PENDING (Resources)"
    assert submitted.is_waiting


def test_a_job_that_runs_may_take_longer_than_it_may_wait(controller: Controller, job: Job) -> None:
    says(controller, "RUNNING", reason="BadConstraints")  # of an earlier wait
    submitted = SubmittedJob(OPTIONS, job)
    controller.now_s += 1000.0
    assert submitted.poll() == []
    says(controller, "PENDING", reason="Resources", restarts=1)
    for _ in range(2):  # it waits for its next start since now
        controller.now_s += 50.0
        assert submitted.poll() == []
    assert controller.commands == []


def test_a_reason_is_judged_once(controller: Controller, job: Job) -> None:
    submitted = SubmittedJob(OPTIONS, job)
    for reason, asked in (("PartitionConfig", 1), ("PartitionConfig", 1), ("Resources", 1), ("PartitionConfig", 2)):
        says(controller, "PENDING", reason=reason)
        controller.now_s += 2.0
        assert submitted.poll() == []
        assert controller.asked == asked


def test_a_controller_is_silent_since_its_last_answer(controller: Controller, job: Job) -> None:
    says(controller, "RUNNING")
    submitted = SubmittedJob(OPTIONS, job)
    for state in (JobState(name="RUNNING"), None, JobState(name="RUNNING"), None):
        controller.state = state
        controller.now_s += 40.0
        assert submitted.poll() == []


def test_a_job_that_does_not_start_is_cancelled(controller: Controller, job: Job) -> None:
    submitted = SubmittedJob(OPTIONS, job)
    controller.now_s += 100.0
    submitted.poll()
    controller.now_s += 2.0
    controller.after = lambda: says(controller, "CANCELLED") if controller.commands else None
    message = r"the job did not start within 100 s and was cancelled; job 17: PENDING \(Resources\)"
    with pytest.raises(RunError, match=message):
        submitted.poll()
    assert controller.commands == [("scancel", "17")]


def test_a_job_may_wait_for_ever(controller: Controller, job: Job) -> None:
    submitted = SubmittedJob(replace(OPTIONS, queue_timeout_s=None), job)
    controller.now_s += 1e7
    assert submitted.poll() == []
    assert controller.commands == []


def test_a_controller_that_is_silent_too_long_is_given_up(controller: Controller, job: Job) -> None:
    says(controller, "RUNNING")
    submitted = SubmittedJob(OPTIONS, job)
    submitted.poll()
    controller.state = None
    controller.now_s += 50.0
    assert submitted.poll() == []
    controller.now_s += 2.0
    with pytest.raises(RunError, match=r"has not answered for 50 s \(no answer\); job 17 may still run"):
        submitted.poll()


NEVER = ["PartitionNodeLimit", "PartitionTimeLimit", "BadConstraints", "InvalidAccount", "InvalidQOS",
         "AccountNotAllowed", "QOSNotAllowed", "QOSMaxCpuPerJobLimit", "AssocMaxNodePerJobLimit"]  # fmt: skip


@pytest.mark.parametrize("reason", NEVER)
def test_a_job_that_can_never_run_is_cancelled_with_the_reason(controller: Controller, job: Job, reason: str) -> None:
    submitted = SubmittedJob(OPTIONS, job)
    says(controller, "PENDING", reason=reason)
    controller.after = lambda: says(controller, "CANCELLED") if controller.commands else None
    with pytest.raises(UserError, match=rf"SLURM refused the job: job 17: PENDING \({reason}\), cancelled"):
        submitted.poll()
    assert controller.commands == [("scancel", "17")]


@pytest.mark.parametrize(
    "reason", ["Resources", "Priority", "QOSMaxJobsPerUserLimit", "PartitionConfig", "JobHeldUser"]
)
def test_a_job_that_may_run_later_waits(controller: Controller, job: Job, reason: str) -> None:
    submitted = SubmittedJob(OPTIONS, job)
    says(controller, "PENDING", reason=reason)
    assert submitted.poll() == []
    assert controller.commands == []


def test_a_partition_that_has_no_such_nodes_is_no_matter_of_time(controller: Controller, job: Job) -> None:
    submitted = SubmittedJob(replace(OPTIONS, mem="900G"), job)
    says(controller, "PENDING", reason="PartitionConfig")
    controller.after = lambda: says(controller, "CANCELLED") if controller.commands else None
    with pytest.raises(UserError, match="--mem 900G: partition main has"):
        submitted.poll()


def test_why_a_job_cannot_run_on_its_nodes(controller: Controller, job: Job) -> None:
    submitted = SubmittedJob(OPTIONS, job)
    says(controller, "FAILED", comment="realhf-directory:bjcK")  # n7
    with pytest.raises(UserError, match=r"job 17 has ended: the run directory .* is not there on n7; all nodes"):
        submitted.poll()


def test_stopping_asks_then_kills_then_gives_up(controller: Controller, job: Job) -> None:
    says(controller, "RUNNING")
    submitted = SubmittedJob(OPTIONS, job)
    began_s = controller.now_s
    with pytest.raises(RunError, match=r"job 17: RUNNING after scancel; end it by hand: scancel 17"):
        submitted.stop(grace_s=5.0)
    assert controller.commands == [("scancel", "17"), ("scancel", "--signal=KILL", "--full", "17")]
    # It looks twice a second, and once more when the time is over.
    assert [time_s - began_s for time_s in (*controller.times_s, controller.now_s)] == [0, 5.5, 306]


def test_nothing_is_left_of_a_job_that_was_stopped(controller: Controller, job: Job) -> None:
    says(controller, "RUNNING")
    submitted = SubmittedJob(replace(OPTIONS, poll_interval_s=0.25), job)
    controller.after = lambda: says(controller, "CANCELLED") if controller.now_s >= 1002 else None
    submitted.stop(grace_s=5.0)
    assert (controller.commands, controller.now_s, controller.looks) == ([("scancel", "17")], 1002, 9)
    left(job, worker_0=5)
    controller.now_s += 10.0
    assert submitted.poll() == []


def test_a_job_that_does_not_come_to_its_own_end_is_ended(controller: Controller, job: Job) -> None:
    says(controller, "RUNNING")
    submitted = SubmittedJob(OPTIONS, job)
    left(job, master=0, worker_0=0, worker_1=0)
    assert len(submitted.poll()) == 3
    looks = controller.looks
    controller.now_s += 10.0
    assert (submitted.poll(), controller.looks) == ([], looks), "there is nothing left to look for"
    controller.after = lambda: says(controller, "CANCELLED") if controller.commands else None
    submitted.stop(grace_s=5.0)
    assert (controller.commands, controller.times_s) == ([("scancel", "17")], [1010 + 60.5])


@pytest.mark.parametrize("reason", ["Resources", "BadConstraints"])
def test_what_is_cancelled_before_it_began_gets_no_grace(controller: Controller, job: Job, reason: str) -> None:
    submitted = SubmittedJob(replace(OPTIONS, queue_timeout_s=1.0), job)
    says(controller, "PENDING", reason=reason)
    controller.now_s += 2.0
    with pytest.raises(RunError, match=r"job 17: PENDING \(.*\) after scancel; end it by hand: scancel 17"):
        submitted.poll()
    assert controller.times_s == [1002, 1002.5]


def test_a_job_whose_processes_have_ended_may_come_to_its_own_end(controller: Controller, job: Job) -> None:
    says(controller, "RUNNING")
    submitted = SubmittedJob(OPTIONS, job)
    submitted.poll()
    left(job, master=0, worker_0=0, worker_1=0)
    assert [end.returncode for end in submitted.poll()] == [0, 0, 0]
    assert submitted.poll() == []
    controller.after = lambda: says(controller, "COMPLETED" if controller.now_s > 1030 else "COMPLETING")
    submitted.stop(grace_s=5.0)
    assert controller.commands == []  # it is not shown as cancelled


def test_a_job_that_slurm_starts_once_more_has_new_ends(controller: Controller, job: Job) -> None:
    says(controller, "RUNNING")
    submitted = SubmittedJob(OPTIONS, job)
    left(job, worker_0=0)
    assert submitted.poll() == []  # it may have ended well to go on later: the master says so
    left(job, worker_1=5)
    assert [end.name for end in submitted.poll()] == ["worker-1"]
    says(controller, "PENDING", restarts=1)
    controller.now_s += 2.0
    assert submitted.poll() == []  # what the first start has left counts no more
    says(controller, "RUNNING", restarts=1)
    (job.directory.exits / "second").mkdir()
    job.directory.start.write_text("second\n")
    (job.directory.exits / "second" / "worker-1").write_text("0\n")
    (job.directory.exits / "second" / "master").write_text("0\n")
    controller.now_s += 2.0
    assert {(end.name, end.returncode) for end in submitted.poll()} == {("worker-1", 0), ("master", 0)}


def test_ends_are_told_in_the_order_in_which_tasks_noted_them(controller: Controller, job: Job) -> None:
    """The first that failed is the likelier cause."""
    says(controller, "RUNNING")
    submitted = SubmittedJob(OPTIONS, job)
    left(job, master=1, worker_0=2, worker_1=3)
    for name, noted_s in (("worker-1", 10), ("master", 20), ("worker-0", 30)):
        os.utime(job.exits / name, (noted_s, noted_s))
    assert [(end.name, end.returncode) for end in submitted.poll()] == [("worker-1", 3), ("master", 1), ("worker-0", 2)]


def test_a_job_that_was_submitted_before_is_taken_up_where_it_is(controller: Controller, job: Job) -> None:
    says(controller, "RUNNING", restarts=1)
    submitted = SubmittedJob(OPTIONS, job, "17")
    assert submitted.status() == "job 17: RUNNING"
    left(job, worker_0=3)
    assert submitted.poll() == [Exit(name="worker-0", returncode=3)]  # of its present start, which is its second
    says(controller, "PENDING", restarts=2)
    waiting = SubmittedJob(OPTIONS, job, "17")
    assert waiting.is_waiting
    assert waiting.poll() == []  # what there is, is of the start before
    controller.state = None
    assert SubmittedJob(OPTIONS, job, "17").is_waiting  # until the controller answers
    says(controller, "PENDING")
    first = SubmittedJob(OPTIONS, job, "17")
    assert first.poll() == [Exit(name="worker-0", returncode=3)]  # of its first start, which has begun meanwhile
    says(controller, "COMPLETED")
    over = SubmittedJob(OPTIONS, job, "17")
    assert len(over.poll()) == 3, "one that has ended before is not waited for"
    assert controller.submitted == 0


# --- submission


class Slurm:
    """Answers to sbatch and squeue; the words of all that was called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, sbatch: tuple[int, str], squeue: str = "") -> None:
        self.called: list[tuple[str, ...]] = []
        self.deadlines_s: dict[str, float] = {}

        def command(*words: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
            self.called.append(words)
            self.deadlines_s[words[0]] = timeout_s
            code, text = sbatch if words[0] == "sbatch" else (0, squeue)
            return subprocess.CompletedProcess(words, code, text if code == 0 else "", text if code else "")

        monkeypatch.setattr(submission, "slurm_command", command)
        monkeypatch.setattr(submission, "ask", lambda: Offer(nodes=(NODES,)))


def test_a_job_is_submitted_with_a_script_of_its_own(monkeypatch: pytest.MonkeyPatch, job: Job) -> None:
    left(job, worker_0=7)  # of an earlier start
    slurm = Slurm(monkeypatch, (0, "17;cluster\n"))
    assert submission.submit(OPTIONS, job) == "17"
    assert slurm.called == [("sbatch", "--parsable", str(job.directory.script))]
    assert job.directory.script.read_text().startswith("#!/bin/bash\n#SBATCH --job-name=realhf\n")
    assert list(job.exits.iterdir()) == []


def test_where_sbatch_does_not_print_a_number_the_queue_tells_it(monkeypatch: pytest.MonkeyPatch, job: Job) -> None:
    slurm = Slurm(monkeypatch, (0, "ok\n"), f"16 /other\n17 {job.directory.script}\n")
    assert submission.submit(OPTIONS, job) == "17"
    assert [words[0] for words in slurm.called] == ["sbatch", "squeue"]
    for queue in ("", f"17 {job.directory.script}\n18 {job.directory.script}\n"):
        slurm = Slurm(monkeypatch, (0, "ok\n"), queue)
        with pytest.raises(UserError, match="sbatch did not print the number of a job: ok") as error:
            submission.submit(OPTIONS, job)
        assert (("scancel", "17", "18") in slurm.called) is bool(queue)  # no job is left
        assert getattr(error.value, "__notes__", []) == (
            ["job 17, 18, submitted nevertheless, was cancelled"] if queue else []
        )
        # A refusal is not waited for.
        assert slurm.deadlines_s == {"sbatch": 60, "squeue": 10} | ({"scancel": 10} if queue else {})


def test_what_slurm_refuses_is_said_with_what_the_cluster_has(monkeypatch: pytest.MonkeyPatch, job: Job) -> None:
    Slurm(monkeypatch, (1, "sbatch: error: no\n"))
    with pytest.raises(UserError, match=r"SLURM refused the job: sbatch: error: no\n--mem 900G: partition main has"):
        submission.submit(replace(OPTIONS, mem="900G"), job)


def test_a_script_that_is_refused_without_a_word(monkeypatch: pytest.MonkeyPatch, job: Job) -> None:
    Slurm(monkeypatch, (1, ""))
    with pytest.raises(UserError, match="SLURM refused the job: no reason given; the job asks for 1 node"):
        submission.submit(OPTIONS, job)


def test_a_queue_that_is_not_shown_has_no_job(monkeypatch: pytest.MonkeyPatch, job: Job) -> None:
    def command(*words: str, **_: Any) -> subprocess.CompletedProcess[str]:
        assert words[0] != "scancel"
        return subprocess.CompletedProcess(words, words[0] == "squeue", f"17 {job.directory.script}\n", "")

    monkeypatch.setattr(submission, "slurm_command", command)
    with pytest.raises(UserError, match="sbatch did not print the number of a job"):
        submission.submit(OPTIONS, job)


def test_without_slurm_it_is_said_and_nothing_is_looked_for(monkeypatch: pytest.MonkeyPatch, job: Job) -> None:
    def command(*words: str, **_: Any) -> None:
        raise UserError(f"{words[0]} was not found")

    monkeypatch.setattr(submission, "slurm_command", command)
    with pytest.raises(UserError, match=r"^sbatch was not found$") as error:
        submission.submit(OPTIONS, job)
    assert not hasattr(error.value, "__notes__")


def test_the_batch_script_is_left_in_the_run_directory(tmp_path: Path, job: Job) -> None:
    text = submission.write_script(OPTIONS, job)
    assert job.directory.script.read_text() == text
    other = replace(job, directory=RunDirectory.create(tmp_path / "other"), start_id="later")
    submission.write_script(OPTIONS, other)
    assert other.exits.is_dir()


@pytest.mark.parametrize(
    ("comment", "says"),
    [
        ("realhf-directory:bjcK", "the run directory /run is not there on n7; all nodes of the job must see it at the "
         "same path: give --run-dir on a file system that they share"),
        ("realhf-interpreter:bjcK", "the program python is not there on n7; all nodes of the job must see it at the "
         "same path: install realhf on a file system that they share, and run it from there"),
        ("realhf-setup:bjcK", "--setup-line 'n7' failed on its first node; try it on a node (srun --pty bash)"),
        ("realhf-setup:/24=", "--setup-line '\ufffdn' failed on its first node; try it on a node (srun --pty bash)"),
        ("of-a-user:bjcK", ""),
        ("realhf-setup:b", ""),
        ("", ""),
    ],
)  # fmt: skip
def test_what_a_batch_script_leaves_in_the_comment(comment: str, says: str) -> None:
    processes = (ProcessSpec(name="master", argv=("m",)), ProcessSpec(name="worker-0", argv=("python", "w")))
    job = Job(directory=RunDirectory(Path("/run")), processes=processes, workers_per_node=1)
    assert cannot_run(comment, job) == says
