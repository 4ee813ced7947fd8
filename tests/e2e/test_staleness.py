"""Rollouts by weights one update old: which weights they are, whatever the plan and however steps overlap."""

from pathlib import Path

import pytest
import torch

from realhf.api.plan import CallPlan, ExecutionPlan, save_plan
from tests.e2e.runs import ACTOR, FinishedRun, finished, initial_parameters

pytestmark = pytest.mark.distributed

SEED, STEPS = 7, 4
ONE, FIRST, SECOND = CallPlan(devices=(0, 1)), CallPlan(devices=(0, 1)), CallPlan(devices=(1, 1))
CALLS = (
    "actor_generate",
    "reward_inference",
    "reference_inference",
    "critic_inference",
    "actor_train_step",
    "critic_train_step",
)
SEQUENTIAL = ExecutionPlan(num_devices=1, calls=dict.fromkeys(CALLS, ONE), max_steps_in_flight=1)
# Generation has a worker of its own, and may run while the other one trains.
OVERLAPPING = ExecutionPlan(
    num_devices=2, calls={**dict.fromkeys(CALLS, SECOND), "actor_generate": FIRST}, max_steps_in_flight=2
)


def run(plan: ExecutionPlan, folder: Path) -> FinishedRun:
    folder.mkdir()
    save_plan(plan, folder / "plan.json")
    words = f"--staleness 1 --steps {STEPS} --seed {SEED} --batch-size 8 --dtype float64 --no-evaluate"
    keys = ("--checkpoint-every", "1", "--record", "seq", "logprob", "ref_logprob")
    return finished(folder / "run", "ppo", "--plan", folder / "plan.json", *words.split(), *keys)


def test_rollouts_are_made_by_the_weights_before_the_last_update(tmp_path: Path) -> None:
    sequential, overlapping = run(SEQUENTIAL, tmp_path / "one"), run(OVERLAPPING, tmp_path / "two")
    for made in (sequential, overlapping):
        versions = [line["calls"]["actor_generate"]["weights_version"] for line in made.metrics]
        assert versions == [0, 0, 1, 2]
        assert [line["calls"]["actor_train_step"]["weights_version"] for line in made.metrics] == [0, 1, 2, 3]
        # The copy after a step is the actor before the step's training.
        actors = [initial_parameters(ACTOR, SEED), *(made.parameters_at(s, "actor", ACTOR) for s in range(1, STEPS))]
        for step, actor in enumerate(actors, start=1):
            assert torch.equal(made.parameters_at(step, "rollout", ACTOR), actor)
        assert (actors[2] - actors[1]).norm() > 1e-3, "the actor must have moved"
        # The reference stays as it was at the start, and says the same of two steps' rollouts as who made them.
        assert [is_of_reference(made, step) for step in range(STEPS)] == [True, True, False, False]
    for step in range(STEPS):
        one, other = sequential.recorded(step, "seq"), overlapping.recorded(step, "seq")
        assert one.keys() == other.keys()
        assert all(torch.equal(one[i], other[i]) for i in one)
    difference = sequential.parameters("actor", ACTOR) - overlapping.parameters("actor", ACTOR)
    assert difference.abs().max() < 1e-9


def is_of_reference(made: FinishedRun, step: int) -> bool:
    said, of_reference = made.recorded(step, "logprob"), made.recorded(step, "ref_logprob", "reference_inference")
    return all(torch.allclose(said[i], of_reference[i], atol=1e-9) for i in said)
