"""Each algorithm as a script: the calls that it becomes, and what their updates are told."""

from pathlib import Path
from typing import Any

import pytest

from realhf.algorithms.dpo.config import DPO, dpo_loss, with_reference
from realhf.algorithms.grpo.config import GRPO, group_advantages, grpo_loss
from realhf.algorithms.ppo.config import PPOHyperparameters, ppo_advantages, ppo_policy, ppo_value
from realhf.algorithms.reinforce_pp.config import ReinforcePlusPlus, reinforce_pp_advantages, reinforce_pp_loss
from realhf.algorithms.remax.config import ReMax, remax_advantages, remax_loss
from realhf.algorithms.reward.config import PairLoss, pairwise_loss
from realhf.algorithms.rloo.config import RLOO, rloo_advantages, rloo_loss
from realhf.algorithms.safe_rlhf.config import (
    SafeRLHF,
    judged,
    safe_advantages,
    safe_cost_value,
    safe_policy,
    safe_value,
)
from realhf.algorithms.sft.config import sft_loss
from realhf.api import Examples, Pairs, Policy, Prompts, RewardModel, ValueModel, auto
from realhf.api.script.functions import SEQUENCE_MEAN, TOKEN_MEAN, sequence_sum_over
from realhf.data import sort_task
from realhf.dataflow.graph import DataflowGraph


@pytest.fixture
def graph(tmp_path: Path) -> Any:
    """The graph of a script, with a tokenizer, and its calls by name."""
    sort_task.make_tokenizer().save(str(tmp_path / "tokenizer.json"))

    def make(script: Any, **fields: Any) -> Any:
        made = auto(batch_size=8)(script)
        kinds = {name: value for name, value in vars(made()).items() if hasattr(value, "DATASET")}
        files = {name: type(value)(data=str(tmp_path / "rows.jsonl")) for name, value in kinds.items()}
        rpcs = made(tokenizer=str(tmp_path / "tokenizer.json"), **files, **fields).rpcs
        keys = {"prompt", "tokens", "prompt_length", "chosen", "rejected"}
        data = [key for key in keys if any(key in rpc.input_data for rpc in rpcs)]
        DataflowGraph(rpcs, data)
        return {rpc.name: rpc.interface_impl for rpc in rpcs}

    return make


def test_ppo_and_ppo_ptx(graph: Any) -> None:
    def ptx(
        prompts: Prompts,
        texts: Examples,
        actor: Policy,
        critic: ValueModel,
        reference: Policy,
        reward: RewardModel,
        ppo: PPOHyperparameters,
    ) -> None:
        rollout = actor.generate(prompts, ppo)
        scores, ref, values = reward.score(rollout), reference.logprobs(rollout), critic.values(rollout)
        batch = ppo_advantages(rollout, scores, ref, values, ppo)
        actor.update(batch, ppo_policy(ppo), also=[(texts, sft_loss(), 0.5)])
        critic.update(batch, ppo_value(ppo))

    calls = graph(ptx, ppo=PPOHyperparameters(epochs=3, max_kl=0.1, entropy_coef=0.01))
    update = calls["actor_train_step"]
    assert (update.epochs, update.max_kl) == (3, 0.1)
    assert [term.coef for term in update.terms] == [1.0, 0.5]
    assert update.terms[0].loss.name == "ppo_policy_with_entropy"
    assert calls["critic_train_step"].epochs == 3


@pytest.mark.parametrize(
    ("loss_type", "reduction"),
    [("dapo", TOKEN_MEAN), ("grpo", SEQUENCE_MEAN), ("dr_grpo", sequence_sum_over(7)), ("luspo", sequence_sum_over(1))],
)
def test_grpo_and_its_reductions(graph: Any, loss_type: Any, reduction: Any) -> None:
    def script(prompts: Prompts, actor: Policy, reference: Policy, reward: RewardModel, grpo: GRPO) -> None:
        rollout = actor.generate(prompts, grpo)
        ref = reference.logprobs(rollout)
        batch = group_advantages(rollout, reward.score(rollout), ref, grpo)
        actor.update(batch, grpo_loss(grpo))

    grpo = GRPO(loss_type=loss_type, max_new_tokens=7, samples_per_prompt=4)
    calls = graph(script, grpo=grpo)
    assert calls["actor_generate"].samples_per_prompt == 4
    assert calls["actor_generate"].eos_token == sort_task.EOS_TOKEN
    (term,) = calls["actor_train_step"].terms
    assert term.loss.reduction == reduction
    # The tensor function is told the end token that the generation has, which is the tokenizer's.
    (application,) = term.view.applications
    assert application.arguments[-1].eos_token == sort_task.EOS_TOKEN


def test_rloo_with_recomputed_log_probabilities(graph: Any) -> None:
    def script(prompts: Prompts, actor: Policy, reference: Policy, reward: RewardModel, rloo: RLOO) -> None:
        rollout = actor.generate(prompts, rloo)
        old = actor.logprobs(rollout, key="old_logprob")
        batch = rloo_advantages(rollout, reward.score(rollout), reference.logprobs(rollout), rloo, old=old)
        actor.update(batch, rloo_loss(rloo))

    calls = graph(script, rloo=RLOO(importance_correction="token_mask"))
    assert "old_logprob" in calls["actor_train_step"].terms[0].view.keys
    assert calls["actor_train_step"].terms[0].loss.reduction == SEQUENCE_MEAN


def test_remax_has_a_second_generation(graph: Any) -> None:
    def script(prompts: Prompts, actor: Policy, reference: Policy, reward: RewardModel, remax: ReMax) -> None:
        rollout, greedy = actor.generate(prompts, remax), actor.generate(prompts, remax.greedy, name="greedy")
        scores, baseline = reward.score(rollout), reward.score(greedy, name="greedy")
        batch = remax_advantages(rollout, scores, baseline, reference.logprobs(rollout), remax)
        actor.update(batch, remax_loss(remax))

    calls = graph(script)
    assert [call.temperature for call in calls.values() if hasattr(call, "top_k")] == [1.0, 0.0]
    assert len(calls) == 6


def test_reinforce_plus_plus(graph: Any) -> None:
    def script(
        prompts: Prompts, actor: Policy, reference: Policy, reward: RewardModel, options: ReinforcePlusPlus
    ) -> None:
        rollout = actor.generate(prompts, options)
        batch = reinforce_pp_advantages(rollout, reward.score(rollout), reference.logprobs(rollout), options)
        actor.update(batch, reinforce_pp_loss(options))

    assert graph(script)["actor_train_step"].terms[0].loss.reduction == TOKEN_MEAN


def test_safe_rlhf(graph: Any) -> None:
    def script(
        prompts: Prompts,
        actor: Policy,
        reference: Policy,
        reward: RewardModel,
        cost: RewardModel,
        critic: ValueModel,
        cost_critic: ValueModel,
        safe: SafeRLHF,
    ) -> None:
        rollout = actor.generate(prompts, safe)
        ref = reference.logprobs(rollout)
        good = judged(reward.score(rollout), critic.values(rollout))
        bad = judged(cost.score(rollout), cost_critic.values(rollout))
        batch = safe_advantages(rollout, ref, good, bad, safe)
        actor.update(batch, safe_policy(safe))
        critic.update(batch, safe_value(safe))
        cost_critic.update(batch, safe_cost_value(safe))

    calls = graph(script)
    assert len(calls) == 9


def test_preferences_and_fine_tuning(graph: Any) -> None:
    def preferences(pairs: Pairs, actor: Policy, reference: Policy, dpo: DPO) -> None:
        actor.update(with_reference(pairs, reference.logprobs(pairs)), dpo_loss(dpo))

    def reference_free(pairs: Pairs, actor: Policy, dpo: DPO) -> None:
        actor.update(pairs, dpo_loss(dpo))

    def scores(pairs: Pairs, reward: RewardModel, loss: PairLoss) -> None:
        reward.update(pairs, pairwise_loss(loss))

    def fine_tuning(texts: Examples, learner: Policy) -> None:
        learner.update(texts, sft_loss())

    keys = graph(preferences)["actor_train_step"].terms[0].view.keys
    assert {"chosen_ref_logprob", "rejected_ref_logprob"} <= set(keys)
    assert len(graph(reference_free, dpo=DPO(reference_free=True))) == 1
    assert graph(scores, loss=PairLoss(epochs=2))["reward_train_step"].epochs == 2
    assert [*graph(fine_tuning)] == ["learner_train_step"]
