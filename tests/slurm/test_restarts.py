"""`--recover auto` under a real SLURM: a new job goes on from the checkpoint, on fewer nodes if one is down."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from testbed.cluster import Testbed

from realhf.dataflow.plan import CallPlan, ExecutionPlan, save_plan
from tests.e2e.runs import ROOT, FinishedRun, command, finished
from tests.e2e.test_faults import StartedRun
from tests.e2e.test_resume import JOB, LOSSES, MODELS
from tests.waiting import wait_until

pytestmark = pytest.mark.slurm

STEPS = 6
SLURM = ("--launcher", "slurm", "--nodes", "2", "--gpus-per-node", "1", "--cpu-only", "--network-interface", "lo")
JOB_WORDS = ("--checkpoint-every", "2", "--steps", str(STEPS), "--dtype", "float64", "--evaluations", "1000")
BOTH, FIRST, SECOND = CallPlan(devices=(0, 2), dp=2), CallPlan(devices=(0, 1)), CallPlan(devices=(1, 1))
TWO_NODES = ExecutionPlan(
    num_devices=2,
    devices_per_node=1,
    calls={
        "actor_generate": BOTH,
        "actor_train_step": BOTH,
        "reference_inference": FIRST,
        "reward_inference": SECOND,
        "critic_inference": SECOND,
        "critic_train_step": SECOND,
    },
)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    save_plan(TWO_NODES, path)
    return path


@pytest.fixture(scope="module")
def reference(plan: Path, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    return finished(tmp_path_factory.mktemp("reference") / "run", JOB, *JOB_WORDS, "--plan", plan)


@pytest.fixture
def recovering(slurm_testbed: Testbed, plan: Path, tmp_path: Path) -> Iterator[StartedRun]:
    """A run on two nodes that recovers, after its second checkpoint; nothing of it survives the test.

    The sixth step waits until `fault`, a file beside the run, is gone.
    """
    run_dir, output, fault = tmp_path / "run", tmp_path / "output.txt", tmp_path / "fault"
    fault.write_text("hold 5")
    words = ("--plan", plan, "--recover", "auto", "--min-workers", "1", "--fault-file", fault, *JOB_WORDS, *SLURM)
    with output.open("wb") as file:
        process = subprocess.Popen(
            command("run", f"experiments/{JOB}.py", "--run-dir", run_dir, *words),
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    run = StartedRun(run_dir, process, output)

    def is_saved() -> bool:
        assert process.poll() is None, run.text
        return (run_dir / "checkpoints/step-4").exists()

    wait_until(is_saved, lambda: f"the second checkpoint:\n{run.text}")
    yield run
    process.terminate()
    process.wait()
    assert slurm_testbed.run("squeue", "-h").stdout == ""


def check_end(run: StartedRun, reference: FinishedRun) -> list[dict]:
    """The run has ended well, with the losses and parameters of the reference; the events that say what happened."""
    assert run.end() == 0, run.text
    ended = FinishedRun(run.path)
    for expected, got in zip(reference.metrics, ended.metrics, strict=True):
        for loss in LOSSES:
            assert got[loss] == pytest.approx(expected[loss], rel=1e-7, abs=1e-13), (expected["step"], loss)
    for model, config in MODELS.items():
        if model != "reference":
            difference = ended.parameters(model, config) - reference.parameters(model, config)
            assert torch.linalg.vector_norm(difference) < 1e-9, model
    return [json.loads(line) for line in (run.path / "events.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_killed_worker_is_started_again_in_a_new_job(recovering: StartedRun, reference: FinishedRun) -> None:
    recovering.find("realhf.worker", 1).kill()
    (recovering.path.parent / "fault").unlink()
    found = check_end(recovering, reference)
    kinds = [event["event"] for event in found if event["event"] not in ("checkpoint", "drift")]
    assert kinds == ["started", "failed", "restarted", "ended"]
    (failed,) = [event for event in found if event["event"] == "failed"]
    assert failed["message"].startswith("worker-1 was killed by signal 9 (SIGKILL)")
    (again,) = [event for event in found if event["event"] == "restarted"]
    assert again["step"] >= 4
    assert "2 workers" in again["message"]


@pytest.mark.slow
def test_a_run_goes_on_without_a_node_that_is_down(
    recovering: StartedRun, reference: FinishedRun, slurm_testbed: Testbed
) -> None:
    try:
        slurm_testbed.fail("node2")
        # The controller finds out by itself after half a minute; here it is told.
        slurm_testbed.run("scontrol", "update", "nodename=node2", "state=down", "reason=lost")
        (recovering.path.parent / "fault").unlink()
        found = check_end(recovering, reference)
    finally:
        slurm_testbed.heal("node2")
        slurm_testbed.run("scontrol", "update", "nodename=node2", "state=resume")
    (change,) = [event for event in found if event["event"] == "replanned"]
    assert change["message"].startswith("1 worker instead of 2; without node2; plan ")
    assert FinishedRun(recovering.path).metrics[-1]["num_workers"] == 1
