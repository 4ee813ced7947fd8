"""A run that was interrupted goes on as if it had not been: the same metrics and parameters, bit for bit."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from realhf.dataflow.plan import CallCompute, CallPlan, ExecutionPlan, save_plan
from realhf.rundir.run import load_experiment_class
from tests.e2e.runs import ROOT, FinishedRun, command, finished, realhf
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.distributed

JOB = "../benchmarks/jobs/fault_job"  # PPO on a tiny model, with an actor that raises when a file asks it to
STEPS = 6
# The reference follows the actor, so that it is a state as well.
COMMON = ("--checkpoint-every", "2", "--steps", str(STEPS), "--reference-eta", "0.1")
CHANGING = ("actor", "critic", "reference")
MODELS: Any = {
    call.model_name: call.config
    for call in load_experiment_class(ROOT / "benchmarks/jobs/fault_job.py")().rpcs
    if call.model_name in CHANGING
}
FIRST, SECOND = CallPlan(devices=(0, 1)), CallPlan(devices=(1, 1))
MODES = (("*", "sharded"), ("layers.*.up", "3 sharded + 1 zero1"), ("layers.0.gate", "replicated"))
BOTH = CallPlan(devices=(0, 2), dp=2, compute=CallCompute(data_parallel=MODES))
# A reallocation before every generation, from a home whose operators are in all modes, and devices that work on
# different calls of two steps.
TWO = ExecutionPlan(
    num_devices=2,
    calls={
        "actor_generate": CallPlan(devices=(0, 2), tp=2),
        "actor_train_step": BOTH,
        "reference_inference": FIRST,
        "reward_inference": SECOND,
        "critic_inference": SECOND,
        "critic_train_step": SECOND,
    },
)
MEASURED = {"calls", "time_s", "tokens_per_s", "peak_bytes"}


def statistics(run: FinishedRun) -> list[dict]:
    return [{name: value for name, value in line.items() if name not in MEASURED} for line in run.metrics]


def check_equal(run: FinishedRun, reference: FinishedRun) -> None:
    assert statistics(run) == statistics(reference)
    for model, config in MODELS.items():
        assert torch.equal(run.parameters(model, config), reference.parameters(model, config)), model


def events(run_dir: Path) -> list[tuple[str, int]]:
    lines = (run_dir / "events.jsonl").read_text().splitlines()
    return [(line["event"], line["step"]) for line in map(json.loads, lines)]


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    assert TWO.max_steps_in_flight > 1
    save_plan(TWO, tmp_path / "plan.json")
    return tmp_path / "plan.json"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    folder = tmp_path_factory.mktemp("reference")
    save_plan(TWO, folder / "plan.json")
    return finished(folder / "run", JOB, *COMMON, "--plan", folder / "plan.json")


def test_an_interrupted_run_goes_on_bit_for_bit(reference: FinishedRun, plan: Path, tmp_path: Path) -> None:
    fault, run_dir = tmp_path / "fault", tmp_path / "run"
    fault.write_text("step 4")  # the fifth: two checkpoints were begun, the second may not be complete
    words = ("run", f"experiments/{JOB}.py", "--run-dir", run_dir)
    broken = realhf(*words, *COMMON, "--plan", plan, "--fault-file", fault)
    assert broken.returncode == 1
    assert "RuntimeError: broken on purpose" in broken.stderr
    fault.unlink()
    last = max(step for event, step in events(run_dir) if event == "checkpoint")
    assert last in (2, 4)

    # Nothing need be said again, and what is said must be so.
    refused = realhf(*words, "--resume", "--actor-lr", "0.5")
    assert refused.returncode == 2
    assert "has other fields: actor_lr was 0.0001, now 0.5." in refused.stderr

    resumed = finished(run_dir, JOB, "--resume")
    check_equal(resumed, reference)
    assert [found for found in events(run_dir) if found[0] != "checkpoint"] == [
        ("started", 0), ("failed", last_step(broken.stderr, events(run_dir))), ("resumed", last), ("ended", STEPS),
    ]  # fmt: skip

    again = realhf(*words, "--resume")
    assert again.returncode == 2
    assert f"has made all its {STEPS} steps; give a larger --steps to go on" in again.stderr


def last_step(message: str, found: list[tuple[str, int]]) -> int:
    """Three or four steps had ended when the fifth failed: two are in flight."""
    (step,) = [step for event, step in found if event == "failed"]
    assert step in (3, 4), message
    return step


@pytest.mark.slow
def test_a_stopped_run_goes_on_bit_for_bit(reference: FinishedRun, plan: Path, tmp_path: Path) -> None:
    """It ends by `realhf stop` from elsewhere, after the steps that had begun, with a checkpoint that was not due."""
    fault, run_dir, output = tmp_path / "fault", tmp_path / "run", tmp_path / "output.txt"
    fault.write_text("hold 2")  # the third of six; the fourth begins meanwhile, the fifth may not
    words = ("--checkpoint-every", "6", *COMMON[2:], "--plan", plan, "--fault-file", fault)
    with output.open("wb") as file:
        run = subprocess.Popen(
            command("run", f"experiments/{JOB}.py", "--run-dir", run_dir, *words),
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=file,
        )
    log = run_dir / "logs/master.log"
    try:
        wait_until(lambda: (run_dir / "metrics.jsonl").exists(), output.read_text)
        stop = subprocess.Popen(command("stop", run_dir), cwd=ROOT, stdout=subprocess.PIPE, text=True)
        wait_until(lambda: "no further step is begun" in log.read_text(), log.read_text)
        fault.unlink()
        said, _ = stop.communicate(timeout=PATIENCE_S)
    finally:
        fault.unlink(missing_ok=True)
        code = run.wait(PATIENCE_S)
    text = output.read_text()
    assert code == 130, text
    (step,) = [step for event, step in events(run_dir) if event == "stopped"]
    assert step in (3, 4)
    assert f"ended after step {step}, as was asked\nsaved: the checkpoint after step {step}" in text
    assert said == f"stopped after step {step} of {STEPS}; the last checkpoint is that after step {step}\n"
    again = realhf("stop", run_dir)
    assert again.returncode == 2
    assert "does not go on: it is stopped" in again.stderr
    check_equal(finished(run_dir, JOB, "--resume"), reference)


@pytest.mark.slow
def test_a_detached_run_needs_no_terminal(reference: FinishedRun, plan: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    started = realhf("run", f"experiments/{JOB}.py", "--run-dir", run_dir, *COMMON, "--plan", plan, "--detach")
    assert started.returncode == 0, started.stderr
    assert "starting the master and 2 workers" in started.stderr
    attached = realhf("attach", run_dir)
    assert attached.returncode == 0, attached.stderr
    assert f"run directory: {run_dir}" in attached.stdout
    check_equal(FinishedRun(run_dir), reference)
    log = run_dir / "logs/launcher.log"
    wait_until(lambda: "for transformers" in log.read_text(), log.read_text)
    wrong = realhf("run", f"experiments/{JOB}.py", "--run-dir", tmp_path / "other", "--steps", "0", "--detach")
    assert wrong.returncode == 2
    assert "steps" in wrong.stderr
    assert not list(tmp_path.glob("*.log"))


@pytest.mark.slow
def test_a_run_restarts_by_itself(reference: FinishedRun, plan: Path, tmp_path: Path) -> None:
    """And breaks at the same place again, since what broke it is still there."""
    fault = tmp_path / "fault"
    fault.write_text("step 4")
    words = ("--plan", plan, "--fault-file", fault, "--recover", "auto", "--max-restarts", "1")
    run = realhf("run", f"experiments/{JOB}.py", "--run-dir", tmp_path / "run", *COMMON, *words)
    assert run.returncode == 1, run.stderr
    kinds = [event for event, _ in events(tmp_path / "run")]
    assert (kinds.count("restarted"), kinds.count("failed")) == (1, 2)
    fault.unlink()
    check_equal(finished(tmp_path / "run", JOB, "--resume"), reference)


FOUR = ExecutionPlan(
    num_devices=4,
    calls={
        "actor_generate": CallPlan(devices=(0, 4), dp=2, tp=2),
        "actor_train_step": CallPlan(devices=(0, 4), dp=4),
        "reference_inference": CallPlan(devices=(0, 2), dp=2),
        "reward_inference": CallPlan(devices=(2, 2), dp=2),
        "critic_inference": CallPlan(devices=(2, 2), tp=2),
        "critic_train_step": CallPlan(devices=(2, 2), pp=2),
    },
)
THREE = ExecutionPlan(
    num_devices=3,
    calls={
        "actor_generate": CallPlan(devices=(0, 2), tp=2),
        "actor_train_step": CallPlan(devices=(0, 2), pp=2),
        "reference_inference": CallPlan(devices=(2, 1)),
        "reward_inference": CallPlan(devices=(2, 1)),
        "critic_inference": CallPlan(devices=(2, 1)),
        "critic_train_step": CallPlan(devices=(2, 1)),
    },
)
LOSSES = ("actor_loss", "critic_loss", "reward_mean", "actor_grad_norm", "critic_grad_norm", "value_mean", "kl")


@pytest.mark.slow
def test_fewer_workers_go_on_with_the_same_losses(tmp_path: Path) -> None:
    """Seven steps on four workers; then, from the state after two of them, on three and on two: float64, 1e-7."""
    save_plan(FOUR, tmp_path / "four.json")
    words = ("--checkpoint-every", "2", "--steps", "7", "--reference-eta", "0.1", "--dtype", "float64")
    four = finished(tmp_path / "four", JOB, *words, "--plan", tmp_path / "four.json")
    for name, plan in {"three": THREE, "two": TWO}.items():
        as_after_two_steps(four.path, tmp_path / name)
        save_plan(plan, tmp_path / "plan.json")
        run = finished(tmp_path / name, JOB, "--resume", "--plan", tmp_path / "plan.json")
        assert json.loads((run.path / "experiment.json").read_text())["num_workers"] == plan.num_devices
        assert statistics(run)[:2] == statistics(four)[:2]
        for expected, got in zip(statistics(four)[2:], statistics(run)[2:], strict=True):
            for loss in LOSSES:
                assert got[loss] == pytest.approx(expected[loss], rel=1e-7, abs=1e-13), (name, expected["step"], loss)


def as_after_two_steps(source: Path, target: Path) -> None:
    """A copy of a run as if it had been killed before its later checkpoints."""
    shutil.copytree(source, target, symlinks=True)
    for checkpoint in (target / "checkpoints").glob("step-*"):
        if checkpoint.name != "step-2":
            shutil.rmtree(checkpoint)
    events = (target / "events.jsonl").read_text().splitlines(keepends=True)
    (target / "events.jsonl").write_text("".join(line for line in events if json.loads(line)["step"] <= 2))
    status = json.loads((target / "status.json").read_text())
    (target / "status.json").write_text(json.dumps(status | {"state": "running"}))
