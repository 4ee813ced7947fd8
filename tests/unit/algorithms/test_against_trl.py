"""Losses, their gradients and advantages are those of TRL 1.12, computed by its own trainers on the same numbers."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from realhf.algorithms import functional as F
from realhf.algorithms.dpo.config import DPO
from realhf.algorithms.dpo.functions import dpo_pairs
from realhf.algorithms.grpo.config import GRPO
from realhf.algorithms.grpo.functions import group_advantages, grpo_policy
from realhf.algorithms.ppo.config import PPOHyperparameters
from realhf.algorithms.ppo.functions import ppo_advantages, ppo_policy, ppo_value
from realhf.algorithms.rloo.config import RLOO
from realhf.algorithms.rloo.functions import rloo_advantages, rloo_policy
from realhf.engine.batch import Batch
from tests.unit.algorithms import trl_oracle
from tests.unit.algorithms.rollouts import LENGTHS, batch_of, columns_of, random_columns, reduced

TOLERANCE = 1e-9  # float64; the aim is 1e-5
FLOAT32 = 1e-6  # some numbers of TRL's are float32: n / (n - 1) of a deviation, log-probabilities of a sampler


def assert_close(found, expected, tolerance=TOLERANCE):
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=found.dtype), rtol=tolerance, atol=tolerance)


def with_gradient(columns):
    return [column.clone().requires_grad_() for column in columns]


GRPO_CASES = {
    "grpo": ({"loss_type": "grpo"}, {}),
    "bnpo": ({"loss_type": "bnpo"}, {}),
    "dapo": ({"loss_type": "dapo"}, {}),
    "dr_grpo": ({"loss_type": "dr_grpo"}, {}),
    "luspo": ({"loss_type": "luspo"}, {}),
    "luspo_sequence": ({"loss_type": "luspo", "ratio": "sequence"}, {"importance_sampling_level": "sequence"}),
    "cispo": ({"loss_type": "cispo", "ratio_cap": 1.2}, {"epsilon_high": 1.2}),
    "sapo": (
        {"loss_type": "sapo", "sapo_temperature_up": 0.9, "sapo_temperature_down": 1.3},
        {"sapo_temperature_pos": 0.9, "sapo_temperature_neg": 1.3},
    ),
    "vespo": ({"loss_type": "vespo"}, {}),
    "no_reference": ({"beta": 0.0}, {"beta": 0.0}),
    "clip_higher": ({"clip_high": 0.28}, {"epsilon_high": 0.28}),
    "two_sided": ({"delta": 1.3}, {"delta": 1.3}),
    "gspo": ({"ratio": "sequence", "loss_type": "grpo"}, {"importance_sampling_level": "sequence"}),
    "gspo_token": (  # TRL's trainer of it has the plain divergence alone
        {"ratio": "sequence_token", "loss_type": "grpo", "unbiased_kl": False},
        {"importance_sampling_level": "sequence_token"},
    ),
    "plain_kl": ({"unbiased_kl": False}, {"use_bias_correction_kl": False}),
    "plain_kl_gspo": (
        {"unbiased_kl": False, "ratio": "sequence"},
        {"use_bias_correction_kl": False, "importance_sampling_level": "sequence"},
    ),
    "off_policy": ({"off_policy_threshold": 0.05}, {"off_policy_mask_threshold": 0.05}),
}


@pytest.mark.parametrize("case", GRPO_CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_grpo_losses(case, seed):
    ours, theirs = GRPO_CASES[case]
    grpo = GRPO(**{"beta": 0.04, "max_new_tokens": 7} | ours)
    data = random_columns(seed)
    advantages = torch.randn(len(LENGTHS), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    inputs = {
        "advantages": advantages,
        "old_per_token_logps": data["logprob"],
        "ref_per_token_logps": data["ref_logprob"],
    }
    logprob = with_gradient(data["new_logprob"])
    expected = trl_oracle.grpo_loss(
        logprob, inputs, **{"loss_type": grpo.loss_type, "beta": 0.04, "max_completion_length": 7} | theirs
    )
    expected.backward()

    token_advantages = [a.expand(n) for a, n in zip(advantages, LENGTHS, strict=True)]
    packed = torch.cat(data["new_logprob"]).requires_grad_()
    batch = batch_of(data, "logprob", "ref_logprob", advantage=token_advantages)
    loss = reduced(grpo_policy(packed, batch, grpo)[0], LENGTHS, grpo.reduction)
    loss.backward()
    assert_close(loss, expected)
    assert_close(packed.grad, torch.cat([x.grad for x in logprob]))
    assert packed.grad.abs().max() > 1e-3


@pytest.mark.parametrize(
    ("loss_type", "correction"),
    [
        *itertools.product(
            ["grpo", "dapo", "cispo"], ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
        ),
        *itertools.product(["vespo"], ["token_truncate", "token_mask"]),  # TRL too refuses those of sequences
    ],
)
def test_importance_correction_of_grpo(loss_type, correction):
    """TRL's, of a generation by vLLM: `logprob` is the sampler's, `old_logprob` the trainer's."""
    data = random_columns(2)
    grpo = GRPO(
        loss_type=loss_type, beta=0.04, importance_correction=correction, importance_low=0.8, importance_high=1.2
    )
    weights = F.importance_weights(
        torch.cat(data["logprob"]), torch.cat(data["old_logprob"]), torch.tensor(LENGTHS), correction, (0.8, 1.2)
    )
    ratio = trl_oracle.importance_ratio(data["logprob"], data["old_logprob"], correction, 0.8, 1.2)
    advantages = torch.linspace(-1, 1, len(LENGTHS), dtype=torch.float64)
    inputs = {
        "advantages": advantages,
        "old_per_token_logps": data["old_logprob"],
        "ref_per_token_logps": data["ref_logprob"],
        "importance_sampling_ratio": ratio,
    }
    cap = {"epsilon_high": grpo.ratio_cap} if loss_type == "cispo" else {}
    expected = trl_oracle.grpo_loss(
        data["new_logprob"], inputs, loss_type=loss_type, beta=0.04, max_completion_length=7, **cap
    )
    batch = batch_of(
        data,
        *("logprob", "old_logprob", "ref_logprob"),
        advantage=[a.expand(n) for a, n in zip(advantages, LENGTHS, strict=True)],
        importance=list(weights.split(list(LENGTHS))),
    )
    losses, _ = grpo_policy(torch.cat(data["new_logprob"]), batch, grpo)
    assert_close(reduced(losses, LENGTHS, grpo.reduction), expected, FLOAT32)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("missing", [(), (3,), (1, 2, 6)])
def test_grpo_advantages(context, scale, missing):
    """Samples without a reward (None there, `valid` 0 here) count in no mean and no deviation."""
    data = random_columns(3)
    rewards = torch.cat(data["reward"]).tolist()
    expected = trl_oracle.grpo_advantages(
        [None if i in missing else reward for i, reward in enumerate(rewards)], 4, scale_rewards=scale, beta=0.0
    )
    data["valid"] = [torch.tensor([float(i not in missing)]).double() for i in range(len(LENGTHS))]
    made, _ = group_advantages(
        columns_of(data, "prompt", "seq", "logprob"),
        columns_of(data, "reward", "valid"),
        None,
        GRPO(scale_rewards=scale, beta=0.0),
        context=context(batch_size=8, samples_per_prompt=4),
    )
    assert_close(torch.stack([a[0] for a in made["advantage"]]), expected, FLOAT32)
    assert [len(a) for a in made["advantage"]] == list(LENGTHS)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("missing", [(), (0, 5)])
def test_rloo_advantages(context, normalise, beta, missing):
    data = random_columns(4)
    rewards = [None if i in missing else reward for i, reward in enumerate((3 * torch.cat(data["reward"])).tolist())]
    expected = trl_oracle.rloo_advantages(
        rewards,
        4,
        data["logprob"],
        data["ref_logprob"],
        beta=beta,
        normalize_advantages=normalise,
        reward_clip_range=(-4.0, 4.0),
    )
    data["valid"] = [torch.tensor([float(i not in missing)]).double() for i in range(len(LENGTHS))]
    data["reward"] = [3 * reward for reward in data["reward"]]
    made, _ = rloo_advantages(
        columns_of(data, "prompt", "seq", "logprob"),
        columns_of(data, "reward", "valid"),
        columns_of(data, "ref_logprob") if beta else None,
        RLOO(kl_coef=beta, normalise_advantages=normalise, reward_clip=4.0),
        context=context(batch_size=8, samples_per_prompt=4),
    )
    assert_close(torch.stack([a[0] for a in made["advantage"]]), expected, FLOAT32)


def test_rloo_loss():
    data, rloo = random_columns(5), RLOO(clip_low=0.2, clip_high=0.3)
    advantages = torch.linspace(-2, 2, len(LENGTHS), dtype=torch.float64)
    logprob = with_gradient(data["new_logprob"])
    expected = trl_oracle.rloo_loss(logprob, data["logprob"], advantages, epsilon=0.2, epsilon_high=0.3)
    expected.backward()
    packed = torch.cat(data["new_logprob"]).requires_grad_()
    batch = batch_of(data, "logprob", advantage=[a.expand(n) for a, n in zip(advantages, LENGTHS, strict=True)])
    loss = reduced(rloo_policy(packed, batch, rloo)[0], LENGTHS, rloo.reduction)
    loss.backward()
    assert_close(loss, expected)
    assert_close(packed.grad, torch.cat([x.grad for x in logprob]))


@pytest.mark.parametrize(
    ("loss_type", "smoothing"), [("sigmoid", 0.0), ("hinge", 0.0), ("ipo", 0.0), ("robust", 0.1), ("robust", 0.0)]
)
def test_dpo_losses(loss_type, smoothing):
    """Of logits, by TRL's sums over answers of different lengths, and ours; gradients by the logits."""
    generator = torch.Generator().manual_seed(6)
    pairs, length, vocab, prompt = 3, 8, 5, 2
    logits, ref = (torch.randn(2 * pairs, length, vocab, dtype=torch.float64, generator=generator) for _ in range(2))
    tokens = torch.randint(0, vocab, (2 * pairs, length), generator=generator)
    ends = [8, 5, 7, 4, 8, 6]
    is_answer = torch.tensor([[prompt <= place < end for place in range(length)] for end in ends])
    theirs = logits.clone().requires_grad_()
    expected = trl_oracle.dpo_loss(
        theirs, ref, tokens, is_answer, loss_type=loss_type, beta=0.3, label_smoothing=smoothing
    )
    expected.backward()

    ours = logits.clone().requires_grad_()

    def sums(of):
        rows = enumerate(ends)
        return torch.stack(
            [F.token_logprobs(of[i, prompt - 1 : end - 1], tokens[i, prompt:end]).sum() for i, end in rows]
        )

    policy, reference = sums(ours), sums(ref)
    data = {
        "prompt": [tokens[0, :prompt]] * pairs,
        "chosen": [tokens[i, : ends[i]] for i in range(pairs)],
        "rejected": [tokens[i, : ends[i]] for i in range(pairs, 2 * pairs)],
        "chosen_ref_logprob": list(reference[:pairs].split(1)),
        "rejected_ref_logprob": list(reference[pairs:].split(1)),
    }
    dpo = DPO(loss_type=loss_type, beta=0.3, label_smoothing=smoothing)
    losses, _ = dpo_pairs(policy[:pairs], policy[pairs:], Batch((0, 1, 2), data), dpo)
    losses.mean().backward()
    assert_close(losses.mean(), expected)
    assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_ppo(context, estimator):
    """Advantages, and the losses of policy and value model, of responses that use all their tokens.

    TRL whitens with the unbiased variance (n - 1), here it is biased (n): a factor of sqrt((n - 1) / n).
    """
    lengths = (4,) * 6
    data = random_columns(7, lengths)
    rollout = {key: data[key] for key in ("logprob", "ref_logprob", "new_logprob", "value", "new_value")}
    theirs = trl_oracle.ppo_update(
        {**rollout, "score": torch.cat(data["reward"])},
        **{"response_length": 4, "kl_coef": 0.2, "kl_estimator": estimator, "gamma": 0.95, "lam": 0.9},
        **{"cliprange": 0.2, "cliprange_value": 0.2},
    )
    ppo = PPOHyperparameters(kl_coef=0.2, kl_estimator=estimator, gamma=0.95, lam=0.9, reward_clip=100.0)
    everything = columns_of(data)
    made, _ = ppo_advantages(*[everything] * 4, ppo, context=context(batch_size=6))
    tokens = sum(lengths)
    unbiased = math.sqrt((tokens - 1) / tokens)
    assert_close(torch.stack(made["advantage"]) * unbiased, theirs["advantages"], 1e-7)  # of epsilons, 1e-8 beside 1
    raw, _ = ppo_advantages(*[everything] * 4, replace(ppo, whiten_advantages=False), context=context(batch_size=6))
    assert_close(torch.stack(raw["advantage"]), theirs["raw"])

    batch = batch_of(data, "logprob", "value", **{**made, "advantage": list(theirs["advantages"])})
    assert_close(ppo_policy(torch.cat(data["new_logprob"]), batch, ppo)[0].mean(), theirs["pg_loss"])
    assert_close(ppo_value(torch.cat(data["new_value"]), batch, ppo)[0].mean(), theirs["vf_loss"])


def test_ppo_of_a_response_that_ends_early(context):
    """TRL gives the score one step after the end token, and takes the value model's word for that state; here the score
    is given with the end token, and the value behind it is 0."""
    lengths = (2, 4)
    data = random_columns(8, lengths)
    beyond = [0.7, None]
    values = [
        value if extra is None else torch.cat([value, torch.tensor([extra], dtype=torch.float64)])
        for value, extra in zip(data["value"], beyond, strict=True)
    ]
    rollout = {key: data[key] for key in ("logprob", "ref_logprob", "new_logprob")}
    theirs = trl_oracle.ppo_update(
        {**rollout, "value": values, "new_value": values, "score": torch.cat(data["reward"]) + 1.5},
        **{"response_length": 4, "kl_coef": 0.2, "kl_estimator": "k1", "gamma": 0.9, "lam": 0.8},
        **{"cliprange": 0.2, "cliprange_value": 0.2},
    )
    rewards = [
        F.kl_penalised_rewards(torch.zeros(1).double(), p, q, 0.2)
        for p, q in zip(data["logprob"], data["ref_logprob"], strict=True)
    ]
    rewards[0] = torch.cat([rewards[0], data["reward"][0] + 1.5])  # a step more, with a value of its own
    rewards[1][-1] += data["reward"][1][0] + 1.5
    advantages, _ = F.gae(rewards, values, 0.9, 0.8)
    assert_close(advantages[0], theirs["raw"][0, :3])
    assert_close(advantages[1], theirs["raw"][1])
    assert theirs["mask"].sum(1).tolist() == [2, 4]
