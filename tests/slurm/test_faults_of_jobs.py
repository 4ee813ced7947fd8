"""What befalls jobs on a cluster that tells of a preemption by SIGTERM alone: each run ends as an undisturbed one, or
says why it could not."""

import contextlib
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from testbed.cluster import Testbed

from realhf.rundir.events import read_events
from tests.e2e.runs import FinishedRun, realhf
from tests.e2e.test_resume import JOB, statistics
from tests.slurm.new_testbed import new_testbed
from tests.slurm.test_life_of_a_job import JOB_WORDS, UNTIL_DONE, HeldRun, holding, plan, reference
from tests.slurm.test_restarts import SLURM
from tests.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
__all__ = ["plan", "reference"]  # fixtures

NOTICED = "no further step is begun: the run ends at the notice"
LONGEST = 20  # lines of a message


@pytest.fixture(scope="module")
def cluster(slurm_testbed: Testbed) -> Iterator[Testbed]:
    """`slurm_testbed`: says whether there may be one."""
    with new_testbed(tells_of_preemption=False) as made:
        made.run("scontrol", "update", "partitionname=main", "GraceTime=3600")
        yield made


@pytest.fixture
def held(cluster: Testbed, plan: Path, tmp_path: Path) -> Iterator[Callable[..., HeldRun]]:
    with holding(cluster, plan, tmp_path) as start:
        yield start


def test_a_preemption_that_is_told_by_sigterm(held: Callable[..., HeldRun], reference: FinishedRun) -> None:
    one = held(*UNTIL_DONE)
    preempt(one)
    one.wait_for_log(NOTICED)  # SLURM gives it a grace time
    one.go_on()
    one.start_again()
    assert one.run.process.wait(PATIENCE_S) == 0, one.run.text
    assert "SLURM has started the job once more\nthe run goes on after step" in one.run.text
    assert one.events() == ["started", "requeued", "ended"]
    one.check_end(reference)


def test_sigterm_for_the_steps_is_a_notice(held: Callable[..., HeldRun], reference: FinishedRun) -> None:
    one = held()
    one.cluster.run("scancel", "--signal=TERM", one.job)
    one.wait_for_log(NOTICED)
    one.go_on()
    assert one.run.process.wait(PATIENCE_S) == 130, one.run.text
    assert re.search(r"ended after step \d, at the notice that its job was about to end", one.run.text)
    assert one.events() == ["started", "stopped"]


def test_a_preemption_that_cancels(held: Callable[..., HeldRun], reference: FinishedRun) -> None:
    """The job puts itself back into the queue while it has the grace time."""
    one = held(*UNTIL_DONE)
    one.cluster.run("scontrol", "update", "partitionname=main", "PreemptMode=CANCEL")
    try:
        preempt(one)
        one.wait_for_log(NOTICED)
        one.go_on()
        one.start_again()
        assert one.run.process.wait(PATIENCE_S) == 0, one.run.text
    finally:
        one.cluster.run("scontrol", "update", "partitionname=main", "PreemptMode=REQUEUE")
    assert one.events() == ["started", "requeued", "ended"]
    one.check_end(reference)


def test_the_batch_script_is_killed(held: Callable[..., HeldRun], reference: FinishedRun) -> None:
    one = held("--recover", "auto")
    number = one.job
    (script,) = (process for process in psutil.process_iter() if is_batch_script(process, number))
    script.kill()
    check_recovery(one, reference, rf"job {number}: \w+ \(.*exit code 0:9\) on node\[1-2\]: ended master, worker-0, ")


def test_the_master_is_killed(held: Callable[..., HeldRun], reference: FinishedRun) -> None:
    one = held(*UNTIL_DONE, "--recover", "auto")
    (master,) = (process for process in one.run.living() if process.cmdline()[1:4] == ["-P", "-m", "realhf.master"])
    master.kill()  # not the srun that has its command in its own
    check_recovery(one, reference, r"master was killed by signal 9 \(SIGKILL\) on node1; ")


def test_a_worker_is_killed_while_the_controller_is_away(held: Callable[..., HeldRun], reference: FinishedRun) -> None:
    one = held(*UNTIL_DONE, "--recover", "auto")
    one.cluster.crash("slurmctld", signal.SIGTERM)
    try:
        one.run.find("realhf.worker", 1).kill()
        exits = one.run.path / "launcher/exits"
        wait_until(lambda: bool([*exits.glob("*/worker-1")]), one.run.text)
    finally:
        one.cluster.heal("slurmctld")
    check_recovery(one, reference, r"worker-1 was killed by signal 9 \(SIGKILL\) on node2; ")


def test_the_controller_is_away_in_the_middle(
    held: Callable[..., HeldRun], reference: FinishedRun, cluster: Testbed
) -> None:
    one = held()
    cluster.crash("slurmctld", signal.SIGTERM)
    try:
        one.hold(5)
        one.run.wait_for_step(5)
    finally:
        cluster.heal("slurmctld")
    one.go_on()
    assert one.run.process.wait(PATIENCE_S) == 0, one.run.text
    assert one.events() == ["started", "ended"]
    one.check_end(reference)


def test_the_controller_is_away_at_submission(
    cluster: Testbed, plan: Path, reference: FinishedRun, tmp_path: Path
) -> None:
    words = ("run", f"experiments/{JOB}.py", "--run-dir", tmp_path / "run", "--plan", plan, *JOB_WORDS, *SLURM)
    cluster.crash("slurmctld", signal.SIGTERM)
    try:
        refused = realhf(*words)
    finally:
        cluster.heal("slurmctld")
    assert refused.returncode == 2, refused.stderr
    error = refused.stderr[refused.stderr.index("error: ") :]
    assert error.startswith("error: SLURM's controller does not answer, and nothing was submitted (")
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "run").exists()
    done = realhf(*words)  # the same command works when it is back
    assert done.returncode == 0, done.stderr
    assert statistics(FinishedRun(tmp_path / "run")) == statistics(reference)


def preempt(one: HeldRun) -> None:
    one.cluster.run("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")


def is_batch_script(process: psutil.Process, job: str) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(word.endswith(f"/job{int(job):05}/slurm_script") for word in process.cmdline())
    return False


def check_recovery(one: HeldRun, reference: FinishedRun, cause: str) -> None:
    """The run has failed for this cause, goes on in a new job, and ends well."""
    wait_until(lambda: "failed" in one.events() or one.run.process.poll() is not None, lambda: one.run.text)
    one.go_on()
    assert one.run.process.wait(PATIENCE_S) == 0, one.run.text
    assert one.events() == ["started", "failed", "restarted", "ended"]
    (message,) = (event.message for event in read_events(one.run.path / "events.jsonl") if event.event == "failed")
    assert re.match(cause, message), message
    assert len(message.splitlines()) <= LONGEST
    one.check_end(reference)
