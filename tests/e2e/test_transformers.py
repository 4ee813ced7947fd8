"""PPO on a family that transformers alone knows: one worker and two, replicated and fully sharded, interrupted, and out
as a directory that transformers opens."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Olmo2Config
from transformers.utils.logging import disable_progress_bar

from realhf.architecture.transformers_config import TransformersConfig, transformers_model
from realhf.data.sort_task import SORT_MODEL
from realhf.dataflow.plan import CallPlan, ExecutionPlan, save_plan
from realhf.geometry.parameters import decoder_parameters
from tests.e2e.forked import quickly_finished
from tests.e2e.runs import FinishedRun, realhf
from tests.unit.models.transformers_families import SIZES

pytestmark = pytest.mark.distributed

JOB = "../benchmarks/jobs/fault_job"  # PPO, with an actor that raises when a file asks it to
CALLS = (
    "actor_generate",
    "reward_inference",
    "reference_inference",
    "critic_inference",
    "actor_train_step",
    "critic_train_step",
)
STEPS = 3
COMMON = (
    f"--steps {STEPS} --dtype float64 --backend transformers --new-value-head --checkpoint-every 1 --record seq logprob"
).split()
# Norms and rotary tables of transformers are float32, whatever the dtype.
CLOSE = 1e-6


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random OLMo 2 with the vocabulary of the sorting task."""
    disable_progress_bar()
    folder = tmp_path_factory.mktemp("olmo2")
    torch.manual_seed(0)
    config = Olmo2Config(**SIZES | {"vocab_size": SORT_MODEL.vocab_size})
    AutoModelForCausalLM.from_config(config, dtype=torch.float64).save_pretrained(folder)
    return folder


def words(directory: Path, folder: Path, dp: int, kind: str) -> list[Any]:
    plan = ExecutionPlan(num_devices=dp, calls=dict.fromkeys(CALLS, CallPlan(devices=(0, dp), dp=dp)))
    save_plan(plan, folder / "plan.json")
    checkpoints = ("--model", directory, "--reward-model", directory)
    return [*COMMON, *checkpoints, "--compute.data-parallel", kind, "--plan", folder / "plan.json"]


@pytest.fixture(scope="module")
def alone(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    folder = tmp_path_factory.mktemp("alone")
    return quickly_finished(folder / "run", JOB, *words(directory, folder, 1, "zero1"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp", "zero1"])
def test_two_workers_make_the_steps_of_one(kind: str, alone: FinishedRun, directory: Path, tmp_path: Path) -> None:
    made = quickly_finished(tmp_path / "run", JOB, *words(directory, tmp_path, 2, kind))
    config = transformers_model(directory)
    for step in range(STEPS):
        ours, theirs = made.recorded(step, "seq"), alone.recorded(step, "seq")
        assert {i: x.tolist() for i, x in ours.items()} == {i: x.tolist() for i, x in theirs.items()}
        for i, logprobs in made.recorded(step, "logprob").items():
            torch.testing.assert_close(logprobs, alone.recorded(step, "logprob")[i], atol=CLOSE, rtol=0)
        assert made.metrics[step]["reward_mean"] == pytest.approx(alone.metrics[step]["reward_mean"], abs=CLOSE)
    for model, its in (("actor", config), ("critic", config.with_head("scalar"))):
        torch.testing.assert_close(made.parameters(model, its), alone.parameters(model, its), atol=CLOSE, rtol=0)
    assert (made.parameters("actor", config) - initial(directory, config)).norm() > 1e-3, "the actor must have moved"


def initial(directory: Path, config: TransformersConfig) -> torch.Tensor:
    found = dict(AutoModelForCausalLM.from_pretrained(directory, dtype="auto").named_parameters())
    return torch.cat([found[spec.name].detach().flatten() for spec in decoder_parameters(config)])


@pytest.mark.slow
def test_the_actor_goes_out_to_transformers(alone: FinishedRun, directory: Path, tmp_path: Path) -> None:
    config = transformers_model(directory)
    done = realhf("convert", alone.path / "checkpoints/latest/actor", tmp_path / "actor", "--like", directory)
    assert done.returncode == 0, done.stderr
    assert torch.equal(initial(tmp_path / "actor", config), alone.parameters("actor", config))


@pytest.mark.slow
def test_an_interrupted_run_goes_on_bit_for_bit(directory: Path, tmp_path: Path) -> None:
    given = words(directory, tmp_path, 2, "fsdp")
    whole = quickly_finished(tmp_path / "whole", JOB, *given)
    fault = tmp_path / "fault"
    fault.write_text("step 2")  # the last
    broken = realhf("run", f"experiments/{JOB}.py", "--run-dir", tmp_path / "run", *given, "--fault-file", fault)
    assert broken.returncode == 1
    fault.unlink()
    resumed = quickly_finished(tmp_path / "run", JOB, "--resume")
    config = transformers_model(directory)
    for model, its in (("actor", config), ("critic", config.with_head("scalar"))):
        assert torch.equal(resumed.parameters(model, its), whole.parameters(model, its))
    for i, sequence in whole.recorded(STEPS - 1, "seq").items():
        assert torch.equal(resumed.recorded(STEPS - 1, "seq")[i], sequence)
