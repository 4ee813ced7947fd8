"""Calls under transfer protocols of their own, on workers of a real run: the same scores, bit for bit."""

import sys
from pathlib import Path

import pytest
import torch

from realhf.dataflow.plan import CallPlan, ExecutionPlan, save_plan
from realhf.rundir.run import load_experiment_class
from tests.e2e.forked import quickly_finished
from tests.e2e.runs import ROOT

pytestmark = pytest.mark.distributed

JOB = "../tests/e2e/protocol_job"


def test_scores_are_the_same_under_every_protocol(tmp_path: Path) -> None:
    job = sys.modules[load_experiment_class(ROOT / "tests/e2e/protocol_job.py").__module__]
    judging = CallPlan(devices=(0, 4), tp=2, pp=2)
    calls = dict.fromkeys([*job.SCORING, "everybody"], judging)
    calls["actor_generate"] = CallPlan(devices=(0, 4), dp=2, tp=2)
    save_plan(ExecutionPlan(num_devices=4, calls=calls, devices_per_node=2), tmp_path / "plan.json")
    scores = [f"score_{name}" for name in job.SCORING]
    run = quickly_finished(tmp_path / "run", JOB, "--plan", tmp_path / "plan.json", "--record", "seq", *scores)

    seq = run.recorded(0, "seq")
    mean_sum = sum(int(tokens.sum()) for tokens in seq.values()) / len(seq)
    expected = {sample: tokens.double().sin().mean()[None] - mean_sum for sample, tokens in seq.items()}
    for name in job.SCORING:
        found = run.recorded(0, f"score_{name}", name)
        assert found.keys() == expected.keys() == set(range(8)), name
        assert all(torch.equal(found[sample], expected[sample]) for sample in expected), name
        assert abs(run.metrics[0][f"score_{name}_tokens"] - mean_sum) < 1e-9, name
    assert run.metrics[0]["disagreements"] == 0.0
