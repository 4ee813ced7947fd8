"""An engine backend is one file: a run whose models another backend computes, and the worker does not know."""

import math
from pathlib import Path

import pytest

from realhf.api.backends import BACKENDS, implementation_of
from realhf.api.experiment import ModelSetup
from realhf.base.errors import UserError
from realhf.dataflow.plan import CallCompute, CallPlan, ExecutionPlan, save_plan
from realhf.engine.batch import Batch
from realhf.engine.interface import GenerationOutput, GenerationRequest
from tests.e2e.bigram_backend import BigramModel
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
AS_PLANNED = "tests.e2e.test_contributed_backend:AsPlanned"


class AsPlanned(BigramModel):
    """Of a run whose plan has graphs of decode steps live for one call."""

    def generate(self, batch: Batch, request: GenerationRequest) -> GenerationOutput:
        assert request.decode_graphs == "call"
        return super().generate(batch, request)


@pytest.mark.distributed
def test_a_run_by_a_backend_from_elsewhere(tmp_path: Path) -> None:
    """The actor generates on the other device than it trains on, so its parameters are moved."""
    generating = CallPlan(devices=(1, 1), compute=CallCompute(decode_graphs="call"))
    calls = {**dict.fromkeys(CALLS, CallPlan(devices=(0, 1))), "actor_generate": generating}
    save_plan(ExecutionPlan(num_devices=2, calls=calls), tmp_path / "plan.json")
    words = ("--plan", tmp_path / "plan.json", *SMALL, "--backend", AS_PLANNED, "--seed", "3", "--no-evaluate")
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
