"""A run outlives its job: notices, preemption, requeues, with and without `realhf run` alive, to the same end."""

import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from testbed.cluster import Testbed

from realhf.dataflow.plan import save_plan
from realhf.rundir.starts import read_launched
from tests.e2e.runs import ROOT, FinishedRun, command, finished, realhf
from tests.e2e.test_faults import StartedRun
from tests.e2e.test_resume import JOB, MODELS, statistics
from tests.slurm.new_testbed import new_testbed
from tests.slurm.test_restarts import SLURM, TWO_NODES
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.slurm

STEPS = 6
JOB_WORDS = ("--checkpoint-every", "2", "--steps", str(STEPS), "--evaluations", "1000", "--reference-eta", "0.1")
UNTIL_DONE = ("--until-done", "--time-limit", "10")


@dataclass
class HeldRun:
    """A run of two nodes that stands in its fourth step until `go_on`, its second checkpoint being behind that."""

    run: StartedRun
    cluster: Testbed
    fault: Path

    @property
    def job(self) -> str:
        launched = read_launched(self.run.path / "launcher/job.json")
        assert launched is not None
        assert launched.launcher == "slurm"
        return launched.job

    def shown(self) -> str:
        return self.cluster.run("scontrol", "show", "job", "-o", self.job).stdout

    def hold(self, step: int) -> None:
        """Goes on, to stand in the step after `step` steps."""
        replacement = self.fault.with_suffix(".new")
        replacement.write_text(f"hold {step}")
        replacement.replace(self.fault)

    def go_on(self) -> None:
        self.fault.unlink(missing_ok=True)

    def notice(self) -> None:
        """What SLURM sends the batch script before the time limit; the master has read it when this returns."""
        self.cluster.run("scancel", "--signal=USR1", "--batch", self.job)
        self.wait_for_log("no further step is begun")

    def wait_for_log(self, text: str) -> None:
        log = self.run.path / "logs/master.log"

        def is_there() -> bool:
            is_over = self.run.process.poll() not in (None, -signal.SIGKILL)
            assert text in log.read_text() or not is_over, self.run.text
            return text in log.read_text()

        wait_until(is_there, lambda: f"{text!r} in {log.read_text()}\n{self.run.text}")

    def start_again(self) -> None:
        """Waits for the job to be in the queue once more, and spares it the two minutes that SLURM makes it wait; but
        a node takes none that it has killed in the same second."""
        wait_until(lambda: "JobState=PENDING" in self.shown(), self.shown)
        self.cluster.run("scontrol", "update", f"JobId={self.job}", "StartTime=now+3")

    def events(self) -> list[str]:
        lines = (self.run.path / "events.jsonl").read_text().splitlines()
        return [kind for line in lines if (kind := json.loads(line)["event"]) not in ("checkpoint", "drift")]

    def check_end(self, reference: FinishedRun) -> None:
        """Its metrics and parameters are those of a run that nobody disturbed, and nothing is left of it."""
        ended = FinishedRun(self.run.path)
        assert statistics(ended) == statistics(reference)
        for model, config in MODELS.items():
            assert torch.equal(ended.parameters(model, config), reference.parameters(model, config)), model
        wait_until(lambda: not self.cluster.run("squeue", "-h").stdout, "the queue is empty")
        wait_until(lambda: not self.run.living(), lambda: f"no process is left of {self.run.living()}")


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    save_plan(TWO_NODES, path)
    return path


@pytest.fixture(scope="module")
def reference(plan: Path, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    return finished(tmp_path_factory.mktemp("reference") / "run", JOB, *JOB_WORDS, "--plan", plan)


@pytest.fixture
def held(slurm_testbed: Testbed, plan: Path, tmp_path: Path) -> Iterator[Callable[..., HeldRun]]:
    with holding(slurm_testbed, plan, tmp_path) as start:
        yield start


@contextlib.contextmanager
def holding(cluster: Testbed, plan: Path, tmp_path: Path) -> Iterator[Callable[..., HeldRun]]:
    """Starts a run; nothing of it survives."""
    made: list[HeldRun] = []

    def start(*words: str | Path) -> HeldRun:
        run_dir, output, fault = tmp_path / "run", tmp_path / "output.txt", tmp_path / "fault"
        fault.write_text("hold 3")
        words = ("--run-dir", run_dir, "--plan", plan, "--fault-file", fault, *JOB_WORDS, *SLURM, *words)
        with output.open("wb") as file:
            process = subprocess.Popen(
                command("run", f"experiments/{JOB}.py", *words),
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        made.append(HeldRun(StartedRun(run_dir, process, output), cluster, fault))
        made[-1].run.wait_for_step(2)
        wait_until((run_dir / "checkpoints/step-2").exists, made[-1].run.text)
        return made[-1]

    yield start
    for one in made:
        one.go_on()
        one.run.process.kill()
        one.run.process.wait()
        launched = read_launched(one.run.path / "launcher/job.json")
        if launched is not None and launched.launcher == "slurm":  # not one that has been resumed elsewhere
            cluster.run("scancel", "--signal=KILL", "--full", launched.job)
            cluster.run("scancel", launched.job)
    wait_until(lambda: not cluster.run("squeue", "-h").stdout, "the queue is empty")


@pytest.mark.slow
def test_at_the_notice_the_run_saves_and_its_job_starts_once_more(
    held: Callable[..., HeldRun], reference: FinishedRun
) -> None:
    one = held(*UNTIL_DONE)
    one.notice()
    one.go_on()
    one.start_again()
    assert one.run.process.wait(PATIENCE_S) == 0, one.run.text
    # The notice may come before the fourth step has begun.
    assert re.search(r"SLURM has started the job once more\nthe run goes on after step [34]", one.run.text)
    assert one.events() == ["started", "requeued", "ended"]
    one.check_end(reference)


@pytest.mark.slow
def test_it_needs_no_launching_process_for_that(held: Callable[..., HeldRun], reference: FinishedRun) -> None:
    one = held(*UNTIL_DONE)
    one.run.process.send_signal(signal.SIGKILL)
    one.run.process.wait()
    one.notice()
    one.go_on()
    one.start_again()
    assert re.search(rf"\njob {one.job}: (CONFIGURING|RUNNING|PENDING)", realhf("status", one.run.path).stdout)
    attached = realhf("attach", one.run.path)  # takes the place of the launching process
    assert attached.returncode == 0, attached.stderr
    assert f"run directory: {one.run.path}" in attached.stdout
    assert one.events() == ["started", "requeued", "ended"]
    one.check_end(reference)
    assert realhf("attach", one.run.path).returncode == 0


@pytest.mark.slow
def test_without_until_done_the_run_ends_at_the_notice_and_can_be_resumed(
    held: Callable[..., HeldRun], reference: FinishedRun
) -> None:
    one = held()
    one.notice()
    one.go_on()
    assert one.run.process.wait(PATIENCE_S) == 130, one.run.text
    assert re.search(r"ended after step [34], at the notice that its job was about to end", one.run.text)
    assert one.events() == ["started", "stopped"]
    finished(one.run.path, JOB, "--resume")
    one.check_end(reference)


def test_a_run_that_is_detached_is_only_submitted(
    held: Callable[..., HeldRun], slurm_testbed: Testbed, tmp_path: Path
) -> None:
    run_dir, words = tmp_path / "run", ("run", f"experiments/{JOB}.py", *JOB_WORDS, *SLURM)
    started = realhf(*words, "--run-dir", run_dir, "--detach", "--sbatch=--begin=now+1hour")
    assert started.returncode == 0, started.stderr
    assert started.stderr.endswith(f"the run goes on by itself: realhf status | attach | stop {run_dir}\n")
    launched = read_launched(run_dir / "launcher/job.json")
    assert launched is not None
    assert f"job {launched.job}: PENDING (BeginTime)" in realhf("status", run_dir).stdout
    stopped = realhf("stop", run_dir)
    assert stopped.stdout == f"stopped after step 0 of {STEPS}; nothing saved\n", stopped.stderr
    assert slurm_testbed.run("squeue", "-h").stdout == ""
    assert realhf("attach", run_dir).returncode == 130


@pytest.mark.slow
def test_a_preempted_run_goes_on_to_the_same_end(held: Callable[..., HeldRun], reference: FinishedRun) -> None:
    one = held(*UNTIL_DONE)
    one.cluster.run("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    one.wait_for_log("no further step is begun")  # SLURM gives it ten seconds
    one.go_on()
    one.start_again()
    assert one.run.process.wait(PATIENCE_S) == 0, one.run.text
    assert one.events() == ["started", "requeued", "ended"]
    one.check_end(reference)


@pytest.mark.slow
def test_who_requeues_the_job_disturbs_nothing(held: Callable[..., HeldRun], reference: FinishedRun) -> None:
    """There is no notice: it goes on from the last checkpoint that was written."""
    one = held(*UNTIL_DONE)
    one.cluster.run("scontrol", "requeue", one.job)
    one.start_again()
    again = "SLURM has started the job once more\nthe run goes on after step 2"
    wait_until(lambda: again in one.run.text, lambda: one.run.text)
    one.go_on()
    assert one.run.process.wait(PATIENCE_S) == 0, one.run.text
    assert one.events() == ["started", "requeued", "ended"]
    one.check_end(reference)


@pytest.mark.slow
def test_a_lost_node_is_waited_for(held: Callable[..., HeldRun], reference: FinishedRun) -> None:
    one = held(*UNTIL_DONE)
    try:
        one.cluster.fail("node2")
        one.cluster.run("scontrol", "update", "nodename=node2", "state=down", "reason=lost")
        one.go_on()
        wait_until(lambda: "JobState=PENDING" in one.shown(), one.shown)
    finally:
        one.cluster.heal("node2")
        one.cluster.run("scontrol", "update", "nodename=node2", "state=resume")
    one.start_again()
    assert one.run.process.wait(PATIENCE_S) == 0, one.run.text
    assert one.events() == ["started", "requeued", "ended"]
    one.check_end(reference)


@pytest.mark.slow
def test_a_controller_that_is_away_at_the_end_is_waited_for(plan: Path, reference: FinishedRun, tmp_path: Path) -> None:
    with new_testbed() as cluster, holding(cluster, plan, tmp_path) as start:
        one = start()
        cluster.crash("slurmctld", signal.SIGTERM)
        try:
            one.go_on()
            wait_until(lambda: '"done"' in (one.run.path / "status.json").read_text(), "the run is done")
        finally:
            cluster.heal("slurmctld")
        assert one.run.process.wait(PATIENCE_S) == 0, one.run.text
        assert one.events() == ["started", "ended"]
        one.check_end(reference)
