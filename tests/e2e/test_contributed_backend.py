"""An engine backend is one file: a run whose models another backend computes, and the worker does not know."""

import math
from pathlib import Path

import pytest

from realhf.api.backends import BACKENDS, implementation_of
from realhf.api.experiment import ModelSetup
from realhf.base.errors import UserError
from realhf.dataflow.plan import CallPlan, ExecutionPlan, save_plan
from tests.e2e.runs import SMALL, SMALL_ACTOR, finished, initial_parameters

CALLS = (
    "actor_generate",
    "reward_inference",
    "reference_inference",
    "critic_inference",
    "actor_train_step",
    "critic_train_step",
)
BIGRAM = "tests.e2e.bigram_backend:BigramModel"


@pytest.mark.distributed
def test_a_run_by_a_backend_from_elsewhere(tmp_path: Path) -> None:
    """The actor generates on the other device than it trains on, so its parameters are moved."""
    calls = {**dict.fromkeys(CALLS, CallPlan(devices=(0, 1))), "actor_generate": CallPlan(devices=(1, 1))}
    save_plan(ExecutionPlan(num_devices=2, calls=calls), tmp_path / "plan.json")
    words = ("--plan", tmp_path / "plan.json", *SMALL, "--backend", BIGRAM, "--seed", "3", "--no-evaluate")
    done = finished(tmp_path / "run", "ppo", *words, "--steps", "3")
    losses = [line[name] for line in done.metrics for name in ("actor_loss", "critic_loss")]
    assert len(losses) == 6
    assert all(map(math.isfinite, losses))
    moved = done.parameters("actor", SMALL_ACTOR) != initial_parameters(SMALL_ACTOR, 3)
    assert moved.any(), "the actor must have trained"
    assert not moved.all(), "a bigram model has no layers"


def test_an_entry_names_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "bigram", BIGRAM)
    assert implementation_of(ModelSetup(backend="bigram").backend) == BIGRAM
    assert ModelSetup(backend=BIGRAM).backend == BIGRAM
    with pytest.raises(UserError, match=r"choose one of native, .*bigram, or give MODULE:CLASS"):
        ModelSetup(backend="trigram")
