"""What `benchmarks/rl_step.py` computes with: the limit of a step by hand, phases, advantages, the job itself."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "jobs")]
rl_step, job, interface = map(importlib.import_module, ("rl_step", "rl_step_job", "rl_step_job_interface"))


def setting(algorithm: str):
    return next(s for s in rl_step.SETTINGS if str(s) == f"{algorithm} 4M float32")


def test_the_limit_of_a_step_is_its_products_where_reading_takes_no_time() -> None:
    layers, head = 4 * (4 * 256**2 + 3 * 256 * 688), 256 * 2048
    prompts, responses = 8 * 32, 64 * 64
    forward = 2 * layers * (prompts + responses) + 2 * head * responses
    # Generation, the reference, and training for three passes.
    assert rl_step.limit_s(setting("grpo"), 1.0, 1e30) == pytest.approx(5 * forward)
    prompts = 64 * 32
    forward = 2 * layers * (prompts + responses) + 2 * head * responses
    critic = 2 * layers * (prompts + responses)
    assert rl_step.limit_s(setting("ppo"), 1.0, 1e30) == pytest.approx(5 * forward + 4 * critic)


def test_the_limit_of_a_step_is_what_decoding_reads_where_computing_takes_no_time() -> None:
    layers, head = 4 * (4 * 256**2 + 3 * 256 * 688), 256 * 2048
    tokens = sum(32 + step for step in range(64)) * 64
    read = 64 * (layers + head) * 4 + tokens * 2 * 4 * 256 * 4
    assert rl_step.limit_s(setting("grpo"), 1e30, 1.0) == pytest.approx(read)


def test_phases_are_sums_of_calls_and_the_rest() -> None:
    calls = {"actor_generate": 1.0, "reward": 0.25, "reference_inference": 0.5, "critic_inference": 0.75}
    calls |= {"actor_train_step": 2.0, "critic_train_step": 3.0}
    found = rl_step.phases([rl_step.Turn(ours_s=8.0, theirs_s=20.0, calls_s=calls, trl="1.12.0")])
    assert found == {"generate": 1.0, "inference": 1.25, "train": 5.0, "the rest": 0.75}


def test_advantages_are_standardised_within_their_group() -> None:
    rewards = torch.tensor([0.0] * 4 + [1.0] * 4 + [0.5] * 8)
    deviation = (8 * 0.25 / 7) ** 0.5
    expected = torch.tensor([-0.5] * 4 + [0.5] * 4) / (deviation + 1e-4)
    torch.testing.assert_close(interface.group_advantages(rewards), torch.cat([expected, torch.zeros(8)]))


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_the_job_has_the_lengths_that_are_compared(algorithm: str, tmp_path: Path) -> None:
    experiment = job.RLStepJob(algorithm=algorithm, data_dir=str(tmp_path))
    extent = experiment.dataset.check().keys["prompt"]
    assert (extent.mean, extent.longest) == (32, 32)
    generate = experiment.rpcs[0].interface_impl
    assert generate.max_new_tokens == 64
    assert generate.samples_per_prompt == (8 if algorithm == "grpo" else 1)
    trained = [call for call in experiment.rpcs if call.name.endswith("_train_step")]
    assert [call.mini_batches for call in trained] == [4] * (1 if algorithm == "grpo" else 2)
