"""The calls that evaluate what a script trains, on held-out data."""

from pathlib import Path
from typing import Any

import pytest

from realhf.api import (
    INFERENCE,
    Examples,
    Pairs,
    Policy,
    Prompts,
    RewardModel,
    UserError,
    ValueModel,
)
from tests.unit.api.script.scripts import Hyperparameters, held_out, joined, some_loss


def test_rollouts_are_evaluated_by_their_rewards(experiment: Any, data: Path) -> None:
    def ppo(prompts: Prompts, actor: Policy, critic: ValueModel, reward: RewardModel, hp: Hyperparameters) -> None:
        rollout = actor.generate(prompts, hp)
        batch = joined(rollout, reward.score(rollout), critic.values(rollout))
        actor.update(batch, some_loss)
        critic.update(batch, some_loss)

    hp = Hyperparameters(samples_per_prompt=4)
    found = held_out(experiment, ppo, data, hp=hp, eval_every_steps=5)
    assert [call.name for call in found.rpcs] == ["actor_generate", "reward_inference"]
    generate, score = (call.interface_impl for call in found.rpcs)
    assert (generate.samples_per_prompt, generate.temperature) == (1, 0.0)
    assert score.statistics == ("reward_mean",)
    assert (found.batch_size, found.every_steps) == (8, 5), "that of training"
    drawn = held_out(experiment, ppo, data, hp=hp, eval_temperature=0.7, eval_batch_size=3)
    assert (drawn.rpcs[0].interface_impl.temperature, drawn.batch_size) == (0.7, 3)


def test_an_evaluation_without_rows_or_in_batches_of_none_is_refused(experiment: Any, data: Path) -> None:
    def sft(examples: Examples, policy: Policy) -> None:
        policy.update(examples, some_loss)

    with pytest.raises(UserError, match="--eval-every-steps 5 evaluates held-out rows, and there are none; give --eva"):
        experiment(sft, eval_every_steps=5)
    with pytest.raises(UserError, match="--eval-batch-size -1 is not from 0"):
        held_out(experiment, sft, data, eval_batch_size=-1)


def test_examples_and_pairs_are_evaluated_by_their_losses(experiment: Any, data: Path) -> None:
    def sft(examples: Examples, policy: Policy) -> None:
        policy.update(examples, some_loss)

    (call,) = held_out(experiment, sft, data).rpcs
    assert (call.name, call.interface_type) == ("policy_inference", INFERENCE)

    def dpo(pairs: Pairs, actor: Policy, reference: Policy) -> None:
        actor.update(joined(pairs, reference.logprobs(pairs)), some_loss)

    assert [call.name for call in held_out(experiment, dpo, data).rpcs] == ["reference_inference", "actor_inference"]


def test_what_needs_other_data_is_not_evaluated(experiment: Any, data: Path) -> None:
    def ptx(prompts: Prompts, texts: Examples, actor: Policy, reward: RewardModel, hp: Hyperparameters) -> None:
        rollout = actor.generate(prompts, hp)
        batch = joined(rollout, reward.score(rollout))
        actor.update(batch, some_loss, also=[(texts, some_loss, 0.5)])

    assert [call.name for call in held_out(experiment, ptx, data).rpcs] == ["actor_generate", "reward_inference"]
    (train,) = (call for call in experiment(ptx).rpcs if call.trains)
    assert train.input_data == ("prompt", "seq", "logprob", "reward", "tokens", "prompt_length")
    assert train.interface_impl.sequence_keys == ("seq", "tokens")
