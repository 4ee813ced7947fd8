"""A run that goes on with fewer devices, or under a better plan, computes what it would have computed."""

import json
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from realhf.api.plan import CallPlan, ExecutionPlan, load_plan, save_plan
from tests.e2e.runs import FinishedRun, finished
from tests.e2e.test_resume import JOB, LOSSES, MODELS

pytestmark = pytest.mark.distributed

STEPS = 6
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


def events(run: FinishedRun) -> list[dict]:
    return [json.loads(line) for line in (run.path / "events.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_run_goes_on_with_fewer_workers(tmp_path: Path) -> None:
    """Device 1 kills its worker from the fourth step on; then two workers go on under a plan that is searched."""
    save_plan(THREE, tmp_path / "plan.json")
    words = ("--checkpoint-every", "2", "--steps", str(STEPS), "--reference-eta", "0.1", "--dtype", "float64")
    words = (*words, "--plan", str(tmp_path / "plan.json"), "--evaluations", "1000")
    whole = finished(tmp_path / "whole", JOB, *words)
    (tmp_path / "fault").write_text("device 1 from step 3")
    recovery = ("--recover", "auto", "--min-workers", "2", "--fault-file", str(tmp_path / "fault"))
    run = finished(tmp_path / "run", JOB, *words, *recovery)

    (change,) = [event for event in events(run) if event["event"] == "replanned"]
    assert change["message"].startswith("2 workers instead of 3; without 1; plan ")
    saved = json.loads((run.path / "experiment.json").read_text())
    assert (saved["num_workers"], saved["avoided"]) == (2, ["1"])
    assert json.loads((run.path / "plan-1.json").read_text())["num_devices"] == 3
    assert [line["num_workers"] for line in run.metrics] == [3, 3, 2, 2, 2, 2]
    first, last = run.metrics[0]["plan"], run.metrics[-1]["plan"]
    assert f"plan {last} instead of {first}" in change["message"]
    assert "2 workers instead of 3" in (run.path / "report.html").read_text()

    check_close(run, whole)


def check_close(run: FinishedRun, whole: FinishedRun) -> None:
    """In float64 within rounding."""
    for expected, got in zip(whole.metrics, run.metrics, strict=True):
        for loss in LOSSES:
            assert got[loss] == pytest.approx(expected[loss], rel=1e-7, abs=1e-13), (expected["step"], loss)
    for model, config in MODELS.items():
        difference = run.parameters(model, config) - whole.parameters(model, config)
        assert torch.linalg.vector_norm(difference) < 1e-9, model


TRAININGS = ("actor_train_step", "critic_train_step")
ONE_OF_TWO = ExecutionPlan(num_devices=2, calls={name: CallPlan(devices=(0, 1)) for name in THREE.calls})


@pytest.mark.slow
def test_a_run_changes_to_a_better_plan(tmp_path: Path) -> None:
    """Actor and critic are trained on one device, one after the other, and take thousands of times what falsified
    predictions say: a plan that trains them side by side is far better. The fifteenth step waits for the search, so
    that it is found in time."""
    steps = 20
    save_plan(ONE_OF_TWO, tmp_path / "plan.json")
    words = ("--checkpoint-every", "2", "--reference-eta", "0.1", "--dtype", "float64")
    words = (*words, "--plan", str(tmp_path / "plan.json"))
    whole = finished(tmp_path / "whole", JOB, *words, "--steps", str(steps))
    fault, run_dir = tmp_path / "fault", tmp_path / "run"
    fault.write_text(f"step 14 waits for proposal in {run_dir}/events.jsonl")
    finished(run_dir, JOB, *words, "--steps", "2", "--fault-file", str(fault))
    plan = load_plan(run_dir / "plan.json")
    falsified = {name: replace(plan.calls[name], predicted_s=1e-5) for name in TRAININGS}
    save_plan(replace(plan, calls=plan.calls | falsified), run_dir / "plan.json")

    run = finished(run_dir, JOB, "--resume", "--steps", str(steps), "--replan", "switch", "--switch-cost-s", "0")
    found = events(run)
    assert {event["event"] for event in found} >= {"drift", "proposal", "replanned"}
    assert "restarted" not in {event["event"] for event in found}
    (change,) = [event for event in found if event["event"] == "replanned"]
    before, after = run.metrics[0]["plan"], run.metrics[-1]["plan"]
    assert f"plan {after} instead of {before}" in change["message"]
    assert [line["plan"] for line in run.metrics].index(after) == change["step"], "which is where it changed"
    assert change["step"] % 2 == 0
    actor, critic = (load_plan(run.path / "plan.json").calls[name].devices for name in TRAININGS)
    assert actor != critic
    assert load_plan(run.path / "plan-1.json").calls["critic_train_step"].devices == (0, 1)
    assert json.loads((run.path / "experiment.json").read_text())["call_factors"]["critic_train_step"] > 10
    check_close(run, whole)

    again = finished(run_dir, JOB, "--resume", "--steps", str(steps + 1))
    assert again.metrics[-1]["plan"] == after, "going on repeats the change"
