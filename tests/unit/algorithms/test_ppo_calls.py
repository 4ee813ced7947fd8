"""The calls of PPO: shapes, masks, whitening over ranks, replay and learning."""

import dataclasses
import math
from typing import Any

import pytest
import torch

from realhf.algorithms import functional as F
from realhf.algorithms.ppo.config import PPOHyperparameters, ppo_advantages, ppo_policy, ppo_value
from realhf.algorithms.script.evaluate import Evaluation
from realhf.algorithms.script.rollouts import GenerateInterface, LogprobsInterface, ValuesInterface
from realhf.algorithms.script.update import UpdateInterface
from realhf.api import Generate, Logprobs, Update, Values, inputs
from realhf.api.script.views import View
from realhf.base.errors import UserError
from realhf.engine.batch import Batch

PPO = PPOHyperparameters(max_new_tokens=5, eos_token=2, temperature=0.7, reward_mean=0.5, reward_std=2.0)
REFERENCE = LogprobsInterface(Logprobs(temperature=PPO.temperature))
CRITIC = ValuesInterface(Values())


def advantages(ppo: PPOHyperparameters) -> View:
    """The columns of a step and those of its advantages, as an experiment that lists its calls has them."""
    step = inputs()
    found: View = ppo_advantages(step, step, step, step, ppo)
    return found


def actor(ppo: PPOHyperparameters = PPO) -> UpdateInterface:
    return UpdateInterface(Update(ppo_policy(ppo), batch=advantages(ppo), prefix="actor"))


def critic(ppo: PPOHyperparameters = PPO) -> UpdateInterface:
    return UpdateInterface(Update(ppo_value(ppo), batch=advantages(ppo), prefix="critic", reports=(0,)))


def estimated(batch: Batch, ppo: PPOHyperparameters, context: Any) -> tuple[Batch, dict[str, tuple[float, float]]]:
    """The batch with its advantages, and the statistics of these."""
    evaluation = Evaluation(batch, context, None)
    return evaluation.batch(advantages(ppo)), evaluation.stats


@pytest.fixture
def rollout(language_model, scalar_model, context, prompts) -> Batch:
    """A batch after the generate and inference calls of a step; odd tokens are what the reward likes."""
    batch = prompts
    generated = GenerateInterface(Generate.by(PPO)).generate(language_model(0), batch, context())
    assert {*generated.outputs, "logits"} == {*Generate.recordable}, "the model here gives no logits"
    batch = batch.with_data(**generated.outputs)
    reference = REFERENCE.inference(language_model(1), batch, context())
    values = CRITIC.inference(scalar_model(2), batch, context())
    rewards = [(seq % 2).double().mean(0, keepdim=True) * 4 for seq in batch.data["seq"]]
    return batch.with_data(**reference.outputs, **values.outputs, reward=rewards)


def response_lengths(batch: Batch) -> list[int]:
    return [len(s) - len(p) for s, p in zip(batch.data["seq"], batch.data["prompt"], strict=True)]


def test_every_call_gives_one_number_a_response_token(rollout):
    for key in ("logprob", "margin", "ref_logprob", "value"):
        assert [len(x) for x in rollout.data[key]] == response_lengths(rollout), key


def test_inference_sees_what_generation_saw(rollout, language_model, context):
    """The policy's own log-probabilities, computed again from whole sequences under the rollout's temperature."""
    again = REFERENCE.inference(language_model(0), rollout, context(micro_batches=2))
    for logprob, drawn in zip(again.outputs["ref_logprob"], rollout.data["logprob"], strict=True):
        torch.testing.assert_close(logprob, drawn, rtol=1e-12, atol=1e-12)


def test_values_are_those_of_the_states_before_the_tokens(rollout, scalar_model):
    model = scalar_model(2)
    for prompt, seq, value in zip(*(rollout.data[k] for k in ("prompt", "seq", "value")), strict=True):
        with torch.no_grad():
            head = model.module(seq[None])[0, :, 0]
        torch.testing.assert_close(value, head[len(prompt) - 1 : -1], rtol=1e-12, atol=1e-12)


def test_advantages_are_those_of_the_global_batch(rollout, context):
    """Whitened on one rank, and on two ranks: the same numbers."""
    whole, stats = estimated(rollout, PPO, context())
    raw, _ = estimated(rollout, dataclasses.replace(PPO, whiten_advantages=False), context())
    halves = rollout.split(2)
    raw_halves = raw.split(2)
    for rank, half in enumerate(halves):
        other = raw_halves[1 - rank]
        both = [F.sample_spreads(other.data[key], torch.tensor([True, True])) for key in ("advantage", "return")]
        peers = [context().in_order(other.ids, torch.cat(both, 1))]
        part, of_part = estimated(half, PPO, context(peers=peers))
        assert of_part["explained_variance"] == pytest.approx(stats["explained_variance"], rel=1e-9)
        expected = whole.split(2)[rank].data["advantage"]
        for a, b in zip(part.data["advantage"], expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    flat = torch.cat(whole.data["advantage"])
    assert flat.mean().abs() < 1e-9
    assert flat.var(correction=0) == pytest.approx(1, abs=1e-6)


def test_explained_variance(context):
    """gamma = lambda = 1, no KL: returns are the score at every token of a response."""
    # Scores 3 and 1, values [2, 2] and [1]: returns [3, 3, 1], errors [1, 1, 0].
    # var(returns) = 19/3 - (7/3)^2 = 8/9; var(errors) = 2/3 - 4/9 = 2/9; explained 1 - 1/4.
    ppo = PPOHyperparameters(gamma=1, lam=1, kl_coef=0)
    zeros = [torch.zeros(2, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)]
    batch = Batch(
        (0, 1),
        {
            "reward": [torch.tensor([3.0]).double(), torch.tensor([1.0]).double()],
            "value": [torch.tensor([2.0, 2.0]).double(), torch.tensor([1.0]).double()],
            "logprob": zeros,
            "ref_logprob": zeros,
        },
    )
    assert estimated(batch, ppo, context())[1]["explained_variance"][0] == pytest.approx(0.75)


def test_the_first_actor_update_has_ratio_one(rollout, language_model, context):
    """Before any update the loss is -mean(whitened advantage) = 0 and nothing is clipped; the next one differs."""
    model = language_model(0)
    interface = actor()
    first = interface.train_step(model, [rollout], context(micro_batches=2)).stats
    assert first["actor_loss"][0] / first["actor_loss"][1] == pytest.approx(0, abs=1e-9)
    assert first["actor_loss"][1] == sum(response_lengths(rollout))
    assert first["clip_fraction"][0] == 0
    second = interface.train_step(model, [rollout], context(micro_batches=2)).stats
    assert second["actor_loss"][0] < -1e-3


def test_actor_statistics_of_the_rollouts(rollout, language_model, context):
    stats = actor().train_step(language_model(0), rollout.split(2), context()).stats
    logprob, ref = torch.cat(rollout.data["logprob"]), torch.cat(rollout.data["ref_logprob"])
    tokens = sum(response_lengths(rollout))
    assert stats["kl"] == pytest.approx(((logprob - ref).sum().item(), tokens))
    assert stats["kl_per_sequence"] == pytest.approx(((logprob - ref).sum().item(), 4))
    assert stats["reward_mean"] == pytest.approx((sum(r.item() for r in rollout.data["reward"]), 4))
    assert stats["response_length"] == (tokens, 4)
    assert stats["entropy"] == pytest.approx((-logprob.sum().item(), tokens))
    assert stats["actor_lr"] == pytest.approx((0.2, 2))


def test_keys_of_other_names_change_nothing(rollout, language_model, scalar_model, context):
    """Those of ReaL's figure, for one."""
    keys = {"prompt": "prompts", "logprob": "logp", "ref_logprob": "ref_logp", "reward": "r", "value": "v"}
    renamed = Batch(rollout.ids, {keys.get(name, name): column for name, column in rollout.data.items()})
    read, step = inputs("seq", prompt="prompts"), inputs("seq", **keys)
    batch = ppo_advantages(step, step, step, step, PPO)
    update = UpdateInterface(Update(ppo_policy(PPO), batch=batch, prefix="actor"))
    stats = [
        interface.train_step(language_model(0), [given], context()).stats
        for interface, given in ((update, renamed), (actor(), rollout))
    ]
    assert stats[0] == stats[1]
    generate = GenerateInterface(Generate.by(PPO, batch=inputs(prompt="prompts"), outputs=("seq", "logp")))
    made = generate.generate(language_model(0), renamed, context()).outputs
    assert all(torch.equal(a, b) for a, b in zip(made["logp"], rollout.data["logprob"], strict=True))
    logprobs = LogprobsInterface(Logprobs(temperature=PPO.temperature, batch=read, outputs=("ref_logp",)))
    made = logprobs.inference(language_model(1), renamed, context()).outputs
    assert all(torch.equal(a, b) for a, b in zip(made["ref_logp"], rollout.data["ref_logprob"], strict=True))
    made = ValuesInterface(Values(batch=read, outputs=("v",))).inference(scalar_model(2), renamed, context()).outputs
    assert all(torch.equal(a, b) for a, b in zip(made["v"], rollout.data["value"], strict=True))


def test_critic_learns_the_returns(rollout, scalar_model, context):
    model = scalar_model(2)
    interface = critic(dataclasses.replace(PPO, value_clip=100.0))
    losses = [interface.train_step(model, [rollout], context()).stats["critic_loss"] for _ in range(40)]
    returns = torch.cat(estimated(rollout, PPO, context())[0].data["return"])
    expected = 0.5 * (torch.cat(rollout.data["value"]) - returns).square().sum().item()
    assert losses[0] == pytest.approx((expected, len(returns)), rel=1e-9)
    assert losses[-1][0] < 0.5 * losses[0][0]


def test_an_update_ends_where_the_actor_is_too_far_from_the_rollouts(rollout, language_model, scalar_model, context):
    """After the first step in whose pass it was: of new / old - 1 - log(new / old) the mean over tokens. The critic
    goes on."""
    away = [x - 0.5 for x in rollout.data["logprob"]]  # log(new / old) is 1/2 at each token
    batch = rollout.with_data(logprob=away)
    kl, tokens = math.exp(0.5) - 1.5, sum(response_lengths(rollout))
    for max_kl, made in ((1.001 * kl, 4), (0.999 * kl, 1)):
        ppo = dataclasses.replace(PPO, max_kl=max_kl, epochs=4, policy_clip=1e-6, kl_coef=0.0, reward_std=1e9)
        model, steps = language_model(0), []
        model.optimizer.param_groups[0]["lr"] = 0.0
        model.after_step = lambda steps=steps: steps.append(1)
        stats = actor(ppo).train_step(model, [batch], context()).stats
        assert len(steps) == made
        assert stats["actor_kl_from_rollout"] == pytest.approx((made * kl * tokens, made * tokens))
        assert stats.get("actor_stopped_after") == (None if made == 4 else (1.0, 1.0))
        judge, steps = scalar_model(2), []
        judge.after_step = lambda steps=steps: steps.append(1)
        now = context()
        now.sum_over_outputs = lambda values: pytest.fail("the critic asks for no divergence")
        critic(ppo).train_step(judge, [batch], now)
        assert len(steps) == 4


def test_the_actor_s_entropy_and_adaptive_coefficient(rollout, language_model, context):
    plain = actor().train_step(language_model(0), [rollout], context()).stats
    assert not {"policy_entropy", "kl_coef", "actor_stopped_after", "actor_kl_from_rollout"} & set(plain)
    ppo = dataclasses.replace(PPO, entropy_coef=0.1, kl_controller="adaptive")
    model, now = language_model(0), context()
    with torch.no_grad():
        entropies = []
        for prompt, seq in zip(rollout.data["prompt"], rollout.data["seq"], strict=True):
            logits = model.module(seq[None])[0, len(prompt) - 1 : -1] / PPO.temperature
            entropies.append(torch.distributions.Categorical(logits=logits).entropy())
    entropy = torch.cat(entropies).sum().item()
    stats = actor(ppo).train_step(model, [rollout], now).stats
    assert stats["policy_entropy"] == pytest.approx((entropy, sum(response_lengths(rollout))))
    assert stats["actor_loss"][0] == pytest.approx(plain["actor_loss"][0] - 0.1 * entropy)
    assert stats["kl_coef"] == (PPO.kl_coef, 1.0)
    assert set(now.state) == {"kl_coef"}


def test_statistics_of_the_critic(rollout, scalar_model, context):
    stats = critic().train_step(scalar_model(2), rollout.split(2), context()).stats
    assert set(stats) == {
        *("critic_loss", "critic_grad_norm", "critic_lr"),
        *("value_clip_fraction", "value_mean", "return_mean", "explained_variance"),
    }
    whole, of_advantages = estimated(rollout, PPO, context())
    returns = torch.cat(whole.data["return"])
    assert stats["return_mean"] == pytest.approx((returns.sum().item(), len(returns)))
    assert stats["explained_variance"] == of_advantages["explained_variance"]


def test_the_actor_learns_what_the_reward_likes(language_model, scalar_model, context, prompts):
    """Twenty steps of the whole dataflow: tokens of odd numbers pay."""
    ppo = dataclasses.replace(PPO, temperature=1.0, kl_coef=0.01)
    policy, reference, judge = language_model(0), language_model(0), scalar_model(2)
    batch = Batch(tuple(range(64)), {"prompt": prompts.data["prompt"] * 16})
    means = []
    for step in range(20):
        now = context(step=step)
        data = batch.with_data(**GenerateInterface(Generate.by(ppo)).generate(policy, batch, now).outputs)
        rewards = [
            (seq[len(prompt) :] % 2).double().mean(0, keepdim=True) * 4
            for prompt, seq in zip(data.data["prompt"], data.data["seq"], strict=True)
        ]
        ref = LogprobsInterface(Logprobs()).inference(reference, data, now).outputs
        value = CRITIC.inference(judge, data, now).outputs
        data = data.with_data(reward=rewards, **ref, **value)
        means.append(actor(ppo).train_step(policy, data.split(2), now).stats["reward_mean"])
        critic(ppo).train_step(judge, data.split(2), now)
    first, last = (sum(m[0] for m in part) / (64 * 4) for part in (means[:4], means[-4:]))
    assert last > first + 0.5


def test_ranks_without_outputs_take_part_in_the_reduction(rollout, language_model, scalar_model, context):
    silent = context(holds_outputs=False)
    reductions = []
    silent.sum_over_data_parallel = lambda values: reductions.append(1) or values
    assert actor().train_step(language_model(0), [rollout], silent).stats == {}
    assert critic().train_step(scalar_model(2), [rollout], silent).stats == {}
    assert len(reductions) == 4  # of advantages and of weights, twice


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", 0.0), ("gamma", 1.1), ("lam", -0.1), ("kl_coef", -1.0), ("policy_clip", 0.0), ("reward_std", 0.0)],
)
def test_hyperparameters_are_checked(field, value):
    with pytest.raises(UserError, match=field):
        PPOHyperparameters(**{field: value})
