"""A reference that follows the actor: against an average made by hand in one process, under several plans."""

import json
from pathlib import Path

import pytest
import torch

from realhf.models.checkpoint import CheckpointReader
from tests.e2e.forked import quickly_finished
from tests.e2e.runs import ACTOR, ROOT, FinishedRun, initial_parameters

pytestmark = pytest.mark.distributed

SEED, STEPS, ETA = 7, 3, 0.25
COMMON = f"--steps {STEPS} --seed {SEED} --no-evaluate --batch-size 16 --record logprob ref_logprob".split()
PLANS = [
    "mixed_disjoint",
    *(pytest.param(plan, marks=pytest.mark.slow) for plan in ("single", "generate_dp4_train_tp2_pp2", "sharded")),
]


def plan_file(name: str, folder: Path) -> Path:
    """`sharded`: the actor's training and the reference have dp 2, of which fsdp then keeps shards."""
    path = ROOT / f"tests/plans/{name}.json"
    if name != "sharded":
        return path
    plan = json.loads((ROOT / "tests/plans/dp4.json").read_text())
    plan["calls"]["actor_train_step"] |= {"dp": 2, "tp": 2}
    plan["calls"]["reference_inference"] |= {"dp": 2, "pp": 2}
    (folder / "plan.json").write_text(json.dumps(plan))
    return folder / "plan.json"


@pytest.mark.parametrize("plan", PLANS)
def test_the_reference_is_the_average_of_the_actors(plan: str, tmp_path: Path) -> None:
    """Every second step. What it says in a step is of the average of the steps before: recorded, and in float64."""
    words = ("--reference-eta", ETA, "--reference-every-steps", 2, "--checkpoint-every", 1, "--dtype", "float64")
    compute = ("--compute.data-parallel", "fsdp") if plan == "sharded" else ()
    run = quickly_finished(
        tmp_path / "run", "ppo", "--plan", plan_file(plan, tmp_path), *COMMON, *map(str, words), *compute
    )
    average = initial_parameters(ACTOR, SEED)
    for step in range(1, STEPS + 1):
        saved = run.parameters_at(step, "actor", ACTOR)
        assert (saved - average).norm() > 1e-3, "the actor must have moved"
        if step % 2 == 0:
            average = ETA * saved + (1 - ETA) * average
        reference = run.parameters_at(step, "reference", ACTOR)
        assert (reference - average).abs().max() < 1e-14
    names = CheckpointReader(run.path / "checkpoints/latest/reference").names()
    assert not any("@" in name for name in names), "it has no optimizer's states"
    equal = [is_equal(run, step) for step in range(STEPS)]
    assert equal == [True, False, False], "actor and reference are the same before anything moved"


@pytest.mark.slow
def test_with_eta_one_the_reference_is_the_actor_of_the_last_step(tmp_path: Path) -> None:
    """It says of every rollout what the actor says that made it, to the rounding of another layout."""
    plan = ("--plan", ROOT / "tests/plans/mixed_disjoint.json", "--dtype", "float64", "--reference-eta", 1)
    run = quickly_finished(tmp_path / "run", "ppo", *map(str, plan), *COMMON)
    assert all(is_equal(run, step) for step in range(STEPS))


def is_equal(run: FinishedRun, step: int) -> bool:
    said, of_reference = run.recorded(step, "logprob"), run.recorded(step, "ref_logprob", "reference_inference")
    assert said.keys() == of_reference.keys()
    return all(torch.allclose(said[i], of_reference[i], atol=1e-6) for i in said)
