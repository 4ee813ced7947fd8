"""The ready experiments: the calls that each becomes, and what their updates are told."""

from pathlib import Path
from typing import Any, Protocol

import pytest

from realhf.algorithms.rloo.config import RLOO, rloo_advantages, rloo_loss
from realhf.api import Policy, Prompts, Reward, auto
from realhf.api.script.functions import SEQUENCE_MEAN, TOKEN_MEAN, sequence_sum_over
from realhf.data import sort_task
from realhf.experiments import ready_file
from realhf.lifecycle.request import experiment_of

REWARDS = Path(__file__).parents[3] / "experiments/sort_rewards.py"
SCORED = ("--reward", f"{REWARDS}:right")


class CallsOf(Protocol):
    def __call__(self, name: str, *words: str) -> dict[str, Any]: ...


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, ...]:
    """Options that name data, which nobody reads here, and a tokenizer."""
    sort_task.make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    return ("--data", str(tmp_path / "rows.jsonl"), "--tokenizer", str(tmp_path / "tokenizer.json"))


@pytest.fixture
def calls_of(files: tuple[str, ...]) -> CallsOf:
    def make(name: str, *words: str) -> dict[str, Any]:
        experiment = experiment_of(str(ready_file(name)), (*files, *words))
        return {call.name: call.interface_impl for call in experiment.graph.calls.values()}

    return make


def test_ppo_has_the_six_calls_of_the_paper(calls_of: CallsOf) -> None:
    calls = calls_of("ppo", *SCORED, "--ppo.epochs", "3", "--ppo.max-kl", "0.1", "--ppo.entropy-coef", "0.01")
    assert set(calls) == {
        "actor_generate",
        "reward_inference",
        "reference_inference",
        "critic_inference",
        "actor_train_step",
        "critic_train_step",
    }
    update = calls["actor_train_step"]
    assert (update.epochs, update.max_kl) == (3, 0.1)
    assert update.terms[0].loss.name == "less_entropy"
    assert calls["critic_train_step"].epochs == 3


def test_ppo_ptx_has_a_second_loss(calls_of: CallsOf) -> None:
    calls = calls_of("ppo-ptx", *SCORED, "--examples.data", "examples.jsonl", "--ppo.ptx-coef", "0.5")
    assert [term.coef for term in calls["actor_train_step"].terms] == [1.0, 0.5]


@pytest.mark.parametrize(
    ("loss_type", "reduction"),
    [("dapo", TOKEN_MEAN), ("grpo", SEQUENCE_MEAN), ("dr_grpo", sequence_sum_over(7)), ("luspo", sequence_sum_over(1))],
)
def test_grpo_and_its_reductions(calls_of: CallsOf, loss_type: str, reduction: Any) -> None:
    words = ("--grpo.loss-type", loss_type, "--grpo.max-new-tokens", "7", "--grpo.samples-per-prompt", "4")
    calls = calls_of("grpo", *SCORED, *words)
    assert calls["actor_generate"].samples_per_prompt == 4
    assert calls["actor_generate"].eos_token == sort_task.EOS_TOKEN
    (term,) = calls["actor_train_step"].terms
    assert term.loss.reduction == reduction
    # The tensor function is told the end token that the generation has, which is the tokenizer's.
    (application,) = term.batch.applications
    assert application.arguments[-1].eos_token == sort_task.EOS_TOKEN


def test_rloo(calls_of: CallsOf) -> None:
    assert calls_of("rloo", *SCORED)["actor_train_step"].terms[0].loss.reduction == SEQUENCE_MEAN


def test_log_probabilities_that_the_policy_computes_again(files: tuple[str, ...]) -> None:
    """No ready experiment has this call; a script adds it in a line."""

    @auto(batch_size=8)
    def script(prompts: Prompts, actor: Policy, reference: Policy, reward: Reward, rloo: RLOO) -> None:
        rollout = actor.generate(prompts, rloo)
        old = actor.logprobs(rollout, key="old_logprob")
        batch = rloo_advantages(rollout, reward.score(rollout), reference.logprobs(rollout), rloo, old=old)
        actor.update(batch, rloo_loss(rloo))

    experiment = script(
        tokenizer=files[3],
        prompts=Prompts(data=files[1]),
        reward=Reward(functions=SCORED[1:]),
        rloo=RLOO(importance_correction="token_mask"),
    )
    calls = {rpc.name: rpc.interface_impl for rpc in experiment.rpcs}
    assert "old_logprob" in calls["actor_train_step"].terms[0].batch.keys


def test_remax_has_a_second_generation(calls_of: CallsOf) -> None:
    calls = calls_of("remax", *SCORED)
    assert [call.temperature for call in calls.values() if hasattr(call, "top_k")] == [1.0, 0.0]
    assert len(calls) == 6


def test_reinforce_plus_plus(calls_of: CallsOf) -> None:
    assert calls_of("reinforce++", *SCORED)["actor_train_step"].terms[0].loss.reduction == TOKEN_MEAN


def test_safe_rlhf(calls_of: CallsOf) -> None:
    calls = calls_of("safe-rlhf", *SCORED, "--cost", f"{REWARDS}:unsafe")
    assert len(calls) == 9
    assert sum(name.endswith("_train_step") for name in calls) == 3


def test_preferences_and_fine_tuning(calls_of: CallsOf) -> None:
    keys = calls_of("dpo")["actor_train_step"].terms[0].batch.keys
    assert {"chosen_ref_logprob", "rejected_ref_logprob"} <= set(keys)
    assert calls_of("reward", "--loss.epochs", "2")["judge_train_step"].epochs == 2
    assert [*calls_of("sft")] == ["actor_train_step"]
