"""A run that loses a device for good goes on with fewer, and computes what it would have computed."""

import json
from pathlib import Path

import pytest
import torch

from realhf.api.plan import CallPlan, ExecutionPlan, save_plan
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

    for expected, got in zip(whole.metrics, run.metrics, strict=True):
        for loss in LOSSES:
            assert got[loss] == pytest.approx(expected[loss], rel=1e-7, abs=1e-13), (expected["step"], loss)
    for model, config in MODELS.items():
        difference = run.parameters(model, config) - whole.parameters(model, config)
        assert torch.linalg.vector_norm(difference) < 1e-9, model
