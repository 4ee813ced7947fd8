"""The losses of the algorithms as updates call them: the entropy's bonus, what weighs and what masks, statistics."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from realhf.algorithms.clipped import clipped_policy, less_entropy
from realhf.algorithms.dpo.config import DPO, dpo_loss
from realhf.algorithms.dpo.functions import dpo_pairs, with_reference
from realhf.algorithms.grpo.config import GRPO, grpo_loss
from realhf.algorithms.grpo.functions import grpo_policy
from realhf.algorithms.ppo.config import PPOHyperparameters, PPOPtx, ppo_policy, ppo_value
from realhf.algorithms.ppo.functions import ppo_policy as policy_of_ppo
from realhf.algorithms.ppo.functions import ppo_value as value_of_ppo
from realhf.algorithms.reinforce_pp.config import ReinforcePlusPlus, reinforce_pp_loss
from realhf.algorithms.reinforce_pp.functions import reinforce_pp_policy
from realhf.algorithms.remax.config import ReMax, remax_loss
from realhf.algorithms.reward.config import PairLoss, cost_loss, pairwise_loss
from realhf.algorithms.reward.functions import pairwise, safe_pairwise
from realhf.algorithms.rloo.config import RLOO, rloo_loss
from realhf.algorithms.rloo.functions import rloo_policy
from realhf.algorithms.safe_rlhf.config import SafeRLHF, safe_cost_value, safe_policy, safe_value
from realhf.algorithms.sft.functions import sft
from realhf.api import SEQUENCE_MEAN, TOKEN_MEAN, sequence_sum_over
from realhf.api.script.columns import Columns
from realhf.engine.batch import Batch
from realhf.engine.returned import InterfaceError
from tests.unit.algorithms.rollouts import LENGTHS, assert_columns, batch_of, f64, random_columns

OPTIONS = {
    "ppo": PPOHyperparameters(),
    "safe-rlhf": SafeRLHF(),
    "grpo": GRPO(beta=0.1),
    "rloo": RLOO(),
    "reinforce++": ReinforcePlusPlus(),
    "reinforce++-group": ReinforcePlusPlus(baseline="group", samples_per_prompt=2),
    "remax": ReMax(),
}


LOSSES: dict[str, tuple[Any, Any]] = {  # the loss, and what binds it
    "ppo": (policy_of_ppo, ppo_policy),
    "safe-rlhf": (policy_of_ppo, safe_policy),
    "grpo": (grpo_policy, grpo_loss),
    "rloo": (rloo_policy, rloo_loss),
    "reinforce++": (reinforce_pp_policy, reinforce_pp_loss),
    "reinforce++-group": (reinforce_pp_policy, reinforce_pp_loss),
    "remax": (clipped_policy, remax_loss),
}


def batch(seed: int = 1, **others: list[Tensor]) -> tuple[Tensor, Batch]:
    data = random_columns(seed)
    return torch.cat(data["new_logprob"]), batch_of(
        data, "logprob", "ref_logprob", **{"advantage": data["value"], **others}
    )


@pytest.mark.parametrize("name", LOSSES)
def test_the_bonus_raises_the_entropy_by_its_coefficient(name: str) -> None:
    """At each token -coefficient x entropy, whatever the advantage: the loss falls where the entropy grows."""
    plain, bind = LOSSES[name]
    logprob, rollouts = batch()
    entropy = torch.linspace(0, 3, len(logprob), dtype=torch.float64).requires_grad_()
    options = replace(OPTIONS[name], entropy_coef=0.25)
    loss, stats = less_entropy(logprob, rollouts, *bind(options).arguments, entropy=entropy)
    without, others = plain(logprob, rollouts, options)
    torch.testing.assert_close(loss, without - 0.25 * entropy)
    loss.sum().backward()
    assert (entropy.grad == -0.25).all()
    assert stats == {**others, "policy_entropy": (pytest.approx(1.5 * len(logprob)), len(logprob))}


@pytest.mark.parametrize("name", LOSSES)
def test_entropies_are_asked_for_only_with_a_coefficient(name: str) -> None:
    plain, bind = LOSSES[name]
    assert (bind(OPTIONS[name]).name, bind(OPTIONS[name]).arguments) == (plain.__name__, (OPTIONS[name],))
    for coefficient in (0.01, -0.01):
        options = replace(OPTIONS[name], entropy_coef=coefficient)
        bound = bind(options)
        assert (bound.name, bound.arguments) == ("less_entropy", (options, bind(OPTIONS[name]).function))


@pytest.mark.parametrize(
    ("bound", "reduction"),
    [
        (ppo_policy(PPOHyperparameters()), TOKEN_MEAN),
        (ppo_policy(PPOPtx()), TOKEN_MEAN),
        (ppo_value(PPOHyperparameters()), TOKEN_MEAN),
        (safe_policy(SafeRLHF()), TOKEN_MEAN),
        (safe_value(SafeRLHF()), TOKEN_MEAN),
        (safe_cost_value(SafeRLHF()), TOKEN_MEAN),
        (reinforce_pp_loss(ReinforcePlusPlus()), TOKEN_MEAN),
        (remax_loss(ReMax()), TOKEN_MEAN),
        (rloo_loss(RLOO()), SEQUENCE_MEAN),
        (grpo_loss(GRPO(loss_type="grpo")), SEQUENCE_MEAN),
        (grpo_loss(GRPO(loss_type="sapo")), SEQUENCE_MEAN),
        (grpo_loss(GRPO(loss_type="dr_grpo", max_new_tokens=70)), sequence_sum_over(70)),
        (grpo_loss(GRPO(loss_type="luspo")), sequence_sum_over(1)),
        *((grpo_loss(GRPO(loss_type=name)), TOKEN_MEAN) for name in ("bnpo", "dapo", "cispo", "vespo")),
    ],
)
def test_reductions(bound: Any, reduction: Any) -> None:
    assert bound.reduction == reduction


def test_losses_of_pairs_are_bound() -> None:
    assert (dpo_loss(DPO()).name, dpo_loss(DPO(beta=0.3)).arguments) == ("dpo_pairs", (DPO(beta=0.3),))
    assert (pairwise_loss(PairLoss()).name, cost_loss(PairLoss()).name) == ("pairwise", "safe_pairwise")


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "grpo"])
def test_each_token_s_loss_is_multiplied_by_its_importance(name: str) -> None:
    """But for the divergence from the reference, which is not weighted."""
    logprob, rollouts = batch()
    weight = torch.linspace(0, 2, len(logprob), dtype=torch.float64)
    weighted = rollouts.with_data(importance=list(weight.split(list(LENGTHS))))
    options = OPTIONS[name]
    penalty = torch.zeros_like(logprob)
    if name == "reinforce++-group":
        penalty = options.kl_coef * 0.5 * (logprob - rollouts.packed("ref_logprob").values).square()
    loss, _ = LOSSES[name][0](logprob, rollouts, options)
    found, _ = LOSSES[name][0](logprob, weighted, options)
    torch.testing.assert_close(found, (loss - penalty) * weight + penalty)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "cispo", "sapo"])
def test_the_divergence_of_grpo_is_not_weighted(loss_type: Any) -> None:
    logprob, rollouts = batch()
    weight = torch.linspace(0, 2, len(logprob), dtype=torch.float64)
    weighted = rollouts.with_data(importance=list(weight.split(list(LENGTHS))))
    grpo = GRPO(loss_type=loss_type, beta=0.3)
    bare, _ = grpo_policy(logprob, rollouts, replace(grpo, beta=0.0))
    loss, _ = grpo_policy(logprob, rollouts, grpo)
    found, _ = grpo_policy(logprob, weighted, grpo)
    torch.testing.assert_close(found, bare * weight + (loss - bare))


@pytest.mark.parametrize("name", LOSSES)
def test_ratios_are_to_the_policy_s_own_log_probabilities_where_a_call_computed_them(name: str) -> None:
    """With `old_logprob` as the policy is now, the ratio is 1: nothing is clipped, and the slope is -A."""
    data = random_columns(1)
    logprob = torch.cat(data["new_logprob"]).requires_grad_()
    rollouts = batch_of(data, "logprob", "ref_logprob", advantage=data["value"], old_logprob=data["new_logprob"])
    options = replace(OPTIONS[name], **({"beta": 0.0} if name == "grpo" else {"kl_coef": 0.0}))
    loss, stats = LOSSES[name][0](logprob, rollouts, options)
    assert stats["clip_fraction"] == (0.0, len(logprob))
    loss.sum().backward()
    slope = -torch.cat(data["value"])
    if name == "rloo":  # the ratio of a response is that of all its tokens
        slope = torch.cat([x.sum().expand(len(x)) for x in slope.split(list(LENGTHS))])
    torch.testing.assert_close(logprob.grad, slope)


# Ratios 1.5, 0.5, 1.1 and 5 with advantages of both signs, in responses of one token.
RATIOS, ADVANTAGES = (1.5, 0.5, 1.1, 5.0, 1.5), (1.0, -1.0, 2.0, -1.0, -1.0)


def single_tokens(**columns: list[Tensor]) -> tuple[Tensor, Batch]:
    count = len(RATIOS)
    data = {
        "prompt": [torch.tensor([1])] * count,
        "seq": [torch.tensor([1, 4])] * count,
        "logprob": [f64(-9.0)] * count,
        "advantage": list(f64(*ADVANTAGES).split(1)),
    }
    return f64(*RATIOS).log() - 9.0, Batch(tuple(range(count)), data | columns)


@pytest.mark.parametrize(
    ("loss", "options", "expected", "clipped"),
    [
        (policy_of_ppo, PPOHyperparameters(policy_clip=0.2), [-1.2, 0.8, -2.2, 5.0, 1.5], 2),
        (policy_of_ppo, PPOHyperparameters(policy_clip=0.2, dual_clip=3.0), [-1.2, 0.8, -2.2, 3.0, 1.5], 3),
        (policy_of_ppo, PPOHyperparameters(policy_clip=0.6, dual_clip=1.2), [-1.5, 0.5, -2.2, 1.2, 1.2], 2),
        (clipped_policy, ReMax(clip_low=0.3, clip_high=0.4), [-1.4, 0.7, -2.2, 5.0, 1.5], 2),
        (clipped_policy, ReMax(clip_low=0.6, clip_high=0.05), [-1.05, 0.5, -2.1, 5.0, 1.5], 2),
        (reinforce_pp_policy, ReinforcePlusPlus(clip_low=0.3, clip_high=0.4), [-1.4, 0.7, -2.2, 5.0, 1.5], 2),
        (rloo_policy, RLOO(clip_low=0.3, clip_high=0.4), [-1.4, 0.7, -2.2, 5.0, 1.5], 2),
        (grpo_policy, GRPO(clip_low=0.3, clip_high=0.4, beta=0.0), [-1.4, 0.7, -2.2, 5.0, 1.5], 2),
        (grpo_policy, GRPO(clip_low=0.3, clip_high=0.4, delta=2.0, beta=0.0), [-1.4, 0.7, -2.2, 2.0, 1.5], 3),
    ],
)
def test_clips(loss: Any, options: Any, expected: list[float], clipped: int) -> None:
    """The lower and the upper bound are each other's, and bad tokens have none above but `dual_clip` and `delta`."""
    found, stats = loss(*single_tokens(), options)
    assert found.tolist() == pytest.approx(expected)
    assert stats["clip_fraction"] == (clipped, 5.0)


def test_grpo_with_its_other_losses() -> None:
    logprob, rollouts = single_tokens()

    def reinforce(weights: list[float]) -> Any:
        return pytest.approx([-w * a * p for w, a, p in zip(weights, ADVANTAGES, logprob.tolist(), strict=True)])

    found, stats = grpo_policy(logprob, rollouts, GRPO(loss_type="cispo", ratio_cap=1.2, beta=0.0))
    assert found.tolist() == reinforce([1.2, 0.5, 1.1, 1.2, 1.2])
    assert stats["clip_fraction"] == (1.0, 5.0), "a bad token's weight is capped, and counts as no clip"
    sapo = GRPO(loss_type="sapo", sapo_temperature_up=2.0, sapo_temperature_down=0.5, beta=0.0)
    found, stats = grpo_policy(logprob, rollouts, sapo)
    gates = [4 / t / (1 + math.exp(-t * (r - 1))) for r, t in zip(RATIOS, (2, 0.5, 2, 0.5, 0.5), strict=True)]
    assert found.tolist() == pytest.approx([-gate * a for gate, a in zip(gates, ADVANTAGES, strict=True)])
    assert stats["clip_fraction"] == (0.0, 5.0)
    vespo = GRPO(
        loss_type="vespo", vespo_k_up=1.0, vespo_lambda_up=0.5, vespo_k_down=2.0, vespo_lambda_down=0.25, beta=0.0
    )
    found, stats = grpo_policy(logprob, rollouts, vespo)
    powers = [(1.0, 0.5), (2.0, 0.25), (1.0, 0.5), (2.0, 0.25), (2.0, 0.25)]
    weights = [r**k * math.exp(lam * (1 - r)) for r, (k, lam) in zip(RATIOS, powers, strict=True)]
    assert found.tolist() == reinforce(weights)
    # The weights of importance are a part of the sequence's weight, and do not multiply the loss.
    weighted = rollouts.with_data(importance=[f64(2.0)] * 5)
    found, _ = grpo_policy(logprob, weighted, vespo)
    weights = [(2 * r) ** k * math.exp(lam * (1 - 2 * r)) for r, (k, lam) in zip(RATIOS, powers, strict=True)]
    assert found.tolist() == reinforce(weights)


def test_the_divergence_in_grpo_s_loss() -> None:
    """k3 of log-ratios ln 2 and 0, times beta, and times the ratio where it is unbiased."""
    logprob, rollouts = single_tokens(ref_logprob=[x + math.log(2) for x in (f64(*RATIOS).log() - 9.0).split(1)])
    kl, bare = 1 - math.log(2), grpo_policy(logprob, rollouts, GRPO(beta=0.0))[0]
    plain, stats = grpo_policy(logprob, rollouts, GRPO(beta=0.5, unbiased_kl=False))
    assert (plain - bare).tolist() == pytest.approx([0.5 * kl] * 5)
    assert stats["ref_kl"] == pytest.approx((5 * kl, 5.0))
    unbiased, stats = grpo_policy(logprob, rollouts, GRPO(beta=0.5))
    assert (unbiased - bare).tolist() == pytest.approx([0.5 * kl * ratio for ratio in RATIOS])
    assert stats["ref_kl"] == pytest.approx((5 * kl, 5.0))
    assert "ref_kl" not in grpo_policy(logprob, rollouts, GRPO(beta=0.0))[1]


def test_the_off_policy_mask_is_of_the_distribution_that_drew_the_tokens() -> None:
    """Bad tokens whose probability fell by more than the threshold from the generation's count no more; what training
    began with does not matter."""
    logprob, rollouts = single_tokens(old_logprob=[f64(-9.0)] * 5)
    rollouts = rollouts.with_data(logprob=[f64(-9.0), f64(-9.0), f64(-9.0), f64(0.0), f64(-9.0)])
    # Drawn less now: -ln 1.5, ln 2, -ln 1.1, 9 - ln 5, -ln 1.5.
    for threshold, kept in ((0.7, [1, 1, 1, 0, 1]), (0.69, [1, 0, 1, 0, 1]), (8.0, [1, 1, 1, 1, 1])):
        loss, _ = grpo_policy(logprob, rollouts, GRPO(beta=0.0, off_policy_threshold=threshold))
        assert (loss != 0).tolist() == [bool(x) for x in kept]


def test_the_divergence_in_the_loss_of_reinforce_plus_plus() -> None:
    logprob, rollouts = single_tokens(ref_logprob=[x + 2.0 for x in (f64(*RATIOS).log() - 9.0).split(1)])
    group = ReinforcePlusPlus(baseline="group", samples_per_prompt=5, kl_coef=0.3)
    bare, _ = clipped_policy(logprob, rollouts, group)
    loss, stats = reinforce_pp_policy(logprob, rollouts, group)
    assert (loss - bare).tolist() == pytest.approx([0.3 * 0.5 * 4.0] * 5)
    assert stats["ref_kl"] == pytest.approx((10.0, 5.0))
    for other in (replace(group, kl_coef=0.0), replace(group, baseline="none")):  # none, or in the rewards
        loss, stats = reinforce_pp_policy(logprob, rollouts, other)
        torch.testing.assert_close(loss, bare)
        assert set(stats) == {"clip_fraction"}


def test_rloo_s_ratio_is_that_of_the_whole_response() -> None:
    """Ratios 1.1 and 1.3 of two tokens make 1.43 for both; 2 and 0.5 make 1."""
    data = {
        "prompt": [torch.tensor([1])] * 2,
        "seq": [torch.tensor([1, 4, 4])] * 2,
        "logprob": [f64(0.0, 0.0)] * 2,
        "advantage": [f64(1.0, 1.0), f64(-2.0, -2.0)],
    }
    logprob = f64(1.1, 1.3, 2.0, 0.5).log().requires_grad_()
    loss, stats = rloo_policy(logprob, Batch((0, 1), data), RLOO(clip_high=0.5))
    assert loss.tolist() == pytest.approx([-1.43, -1.43, 2.0, 2.0])
    assert stats["clip_fraction"] == (0.0, 4.0)
    loss, stats = rloo_policy(logprob, Batch((0, 1), data), RLOO(clip_high=0.4))
    assert loss.tolist() == pytest.approx([-1.4, -1.4, 2.0, 2.0])
    assert stats["clip_fraction"] == (2.0, 4.0)


@pytest.mark.parametrize(
    ("clip", "losses", "clipped"),
    [
        # Values 1.5, 0.5 and -1 from 1, 1 and 0; returns 2, 0 and 1; half the squared error.
        (0.0, [0.125, 0.125, 2.0], 0),
        (0.2, [0.32, 0.32, 2.0], 2),  # held at 1.2, 0.8 and -0.2: errors 0.8, 0.8, and 1.2 below the free one's 2
        (10.0, [0.125, 0.125, 2.0], 0),
    ],
)
def test_the_clip_of_values(clip: float, losses: list[float], clipped: int) -> None:
    data = {
        "prompt": [torch.tensor([1])],
        "seq": [torch.tensor([1, 4, 4, 4])],
        "value": [f64(1, 1, 0)],
        "return": [f64(2, 0, 1)],
    }
    found, stats = value_of_ppo(f64(1.5, 0.5, -1), Batch((0,), data), PPOHyperparameters(value_clip=clip))
    assert found.tolist() == pytest.approx(losses)
    assert stats == {"value_clip_fraction": (clipped, 3.0), "value_mean": (1.0, 3.0), "return_mean": (3.0, 3.0)}


def pairs(**columns: list[Tensor]) -> Batch:
    """Answers of 2 and 1 tokens, and of 1 and 3."""
    data = {
        "prompt": [torch.tensor([1]), torch.tensor([1, 2])],
        "chosen": [torch.tensor([1, 4, 4]), torch.tensor([1, 2, 4])],
        "rejected": [torch.tensor([1, 5]), torch.tensor([1, 2, 5, 5, 5])],
        "chosen_ref_logprob": [f64(-3.0), f64(-1.0)],
        "rejected_ref_logprob": [f64(-2.0), f64(-4.0)],
    }
    return Batch((0, 1), data | columns)


CHOSEN, REJECTED = f64(-2.0, -2.5), f64(-2.5, -3.5)  # log(policy / reference): 1, -1.5 and -0.5, 0.5


MARGINS = (1.5, -2.0)


def test_dpo_is_of_the_margin_over_the_reference() -> None:
    loss, stats = dpo_pairs(CHOSEN, REJECTED, pairs(), DPO(beta=0.2))
    assert loss.tolist() == pytest.approx([math.log1p(math.exp(-0.2 * m)) for m in MARGINS])
    assert stats == {
        "pair_accuracy": (1.0, 2.0),
        "chosen_reward": pytest.approx((0.2 * -0.5, 2.0)),
        "rejected_reward": pytest.approx((0.0, 2.0)),
        "chosen_logprob": pytest.approx((-4.5, 2.0)),
        "rejected_logprob": pytest.approx((-6.0, 2.0)),
    }
    smooth, _ = dpo_pairs(CHOSEN, REJECTED, pairs(), DPO(beta=0.2, label_smoothing=0.1))
    expected = [0.9 * math.log1p(math.exp(-0.2 * m)) + 0.1 * math.log1p(math.exp(0.2 * m)) for m in MARGINS]
    assert smooth.tolist() == pytest.approx(expected)
    free, stats = dpo_pairs(CHOSEN, REJECTED, pairs(), DPO(beta=0.2, reference_free=True))
    assert free.tolist() == pytest.approx([math.log1p(math.exp(-0.2 * m)) for m in (0.5, 1.0)])
    assert (stats["pair_accuracy"], stats["chosen_reward"]) == ((2.0, 2.0), pytest.approx((-0.9, 2.0)))


def test_ipo_is_of_means_over_the_tokens_of_an_answer() -> None:
    # 1 / 2 + 0.5 / 1 and -1.5 / 1 - 0.5 / 3, which should be 1 / (2 beta) = 2.
    loss, stats = dpo_pairs(CHOSEN, REJECTED, pairs(), DPO(loss_type="ipo", beta=0.25))
    assert loss.tolist() == pytest.approx([1.0, (-1.5 - 0.5 / 3 - 2) ** 2])
    assert stats["pair_accuracy"] == (1.0, 2.0)


def test_the_term_of_the_chosen_answers_is_their_mean_log_probability() -> None:
    bare, _ = dpo_pairs(CHOSEN, REJECTED, pairs(), DPO())
    loss, _ = dpo_pairs(CHOSEN, REJECTED, pairs(), DPO(sft_coef=0.3))
    assert (loss - bare).tolist() == pytest.approx([0.3 * 2.0 / 2, 0.3 * 2.5 / 1])


def test_answers_without_a_token_count_as_one() -> None:
    """Their sum is zero, and so is their mean."""
    empty = pairs(rejected=[torch.tensor([1]), torch.tensor([1, 2])], rejected_ref_logprob=[f64(0.0), f64(0.0)])
    loss, _ = dpo_pairs(CHOSEN, f64(0.0, 0.0), empty, DPO(loss_type="ipo", beta=0.25))
    assert loss.tolist() == pytest.approx([(0.5 - 2) ** 2, (-1.5 - 2) ** 2])


@pytest.mark.parametrize("loss_type", ["sigmoid", "robust", "hinge", "ipo"])
def test_references_per_token_are_refused(loss_type: Any) -> None:
    wrong = pairs(rejected_ref_logprob=[f64(-1.0, -1.0), f64(-4.0)])
    with pytest.raises(InterfaceError, match=r"'rejected_ref_logprob' of sample 0 has the shape \[2\], must be \[1\]"):
        dpo_pairs(CHOSEN, REJECTED, wrong, DPO(loss_type=loss_type))


def test_statistics_and_pulls_of_reward_models() -> None:
    scores, others = f64(2.0, -1.0, 0.5), f64(1.0, 0.0, 0.5)
    batch = Batch((0, 1, 2), {})
    loss, stats = pairwise(scores, others, batch, PairLoss(score_square_coef=0.0))
    assert loss.tolist() == pytest.approx([math.log1p(math.exp(-d)) for d in (1.0, -1.0, 0.0)])
    assert stats == {"pair_accuracy": (1.0, 3.0), "chosen_score": (1.5, 3.0), "rejected_score": (1.5, 3.0)}
    pulled, _ = pairwise(scores, others, batch, PairLoss(score_square_coef=0.1, centre_coef=0.0))
    assert (pulled - loss).tolist() == pytest.approx([0.5, 0.1, 0.05])
    centred, _ = pairwise(scores, others, batch, PairLoss(score_square_coef=0.0, centre_coef=0.1))
    assert (centred - loss).tolist() == pytest.approx([0.9, 0.1, 0.1])


def test_statistics_of_cost_models() -> None:
    """The first, the safer one, should cost less, and unsafe ones more than 0."""
    signs = {"chosen_unsafe": [f64(0.0), f64(0.0), f64(1.0)], "rejected_unsafe": [f64(1.0), f64(0.0), f64(1.0)]}
    safer, other = f64(-1.0, 2.0, 0.5), f64(1.0, 1.0, 1.5)
    loss, stats = safe_pairwise(safer, other, Batch((0, 1, 2), signs), PairLoss(score_square_coef=0.0))

    def soft(x: float) -> float:
        return math.log1p(math.exp(-x))

    assert loss.tolist() == pytest.approx(
        [soft(2) + soft(1) + soft(1), soft(-1) + soft(-2) + soft(-1), soft(1) + soft(0.5) + soft(1.5)]
    )
    assert stats["pair_accuracy"] == (2.0, 3.0)
    assert stats["unsafe_accuracy"] == (4.0, 6.0)
    assert (stats["chosen_score"], stats["rejected_score"]) == ((1.5, 3.0), (3.5, 3.0))
    unknown, stats = safe_pairwise(safer, other, Batch((0, 1, 2), {}), PairLoss(score_square_coef=0.1))
    assert unknown.tolist() == pytest.approx([soft(2) + 0.2, soft(-1) + 0.5, soft(1) + 0.25])
    assert "unsafe_accuracy" not in stats


def test_ppo_losses_with_their_options() -> None:
    data = {
        "prompt": [torch.tensor([1])],
        "seq": [torch.tensor([1, 5, 5])],
        "logprob": [f64(0.0, 0.0)],
        "advantage": [f64(1.0, -1.0)],
        "return": [f64(1.0, 1.0)],
        "value": [f64(0.0, 0.0)],
        "importance": [f64(0.5, 2.0)],
    }
    batch, ppo = Batch((0,), data), PPOHyperparameters(dual_clip=3.0, entropy_coef=0.1, value_clip=0.0)
    logprob = f64(0.0, math.log(5))
    loss, stats = policy_of_ppo(logprob, batch, ppo)
    assert_columns([loss], [[-0.5, 6.0]])
    assert stats["clip_fraction"] == (1.0, 2.0)
    loss, stats = less_entropy(logprob, batch, *ppo_policy(ppo).arguments, entropy=f64(1.0, 2.0))
    assert_columns([loss], [[-0.6, 5.8]])
    assert stats["policy_entropy"] == (3.0, 2.0)
    loss, _ = value_of_ppo(f64(3.0, 1.0), batch, ppo)
    assert_columns([loss], [[2.0, 0.0]])
    # Where a call computed the policy's log-probabilities again, ratios are of these.
    loss, _ = policy_of_ppo(
        logprob, batch.with_data(old_logprob=[f64(0.0, math.log(5))]), replace(ppo, entropy_coef=0.0)
    )
    assert_columns([loss], [[-0.5, 2.0]])


def test_dpo_without_a_reference_and_with_a_term_of_the_chosen() -> None:
    whole = {"prompt": [torch.tensor([1])], "chosen": [torch.tensor([1, 4, 4])], "rejected": [torch.tensor([1, 4])]}
    dpo = DPO(beta=1.0, reference_free=True, sft_coef=0.5)
    loss, stats = dpo_pairs(f64(-1.0), f64(-1 - math.log(3)), Batch((0,), whole), dpo)
    assert_columns([loss], [[math.log(4 / 3) + 0.5 * 1.0 / 2]])
    assert stats["pair_accuracy"] == (1.0, 1.0)


def test_pairs_that_differ_by_rounding_alone_are_half_right() -> None:
    """The policy is the reference before its first step, and plans round sums of log-probabilities differently."""
    chosen, rejected, reference = f64(-7.1, -7.1, -7.1), f64(-7.3, -7.3, -7.3), f64(-7.1, -7.1 + 1e-14, -7.2)
    sides = {name: [torch.tensor([1, 4, 4])] * 3 for name in ("chosen", "rejected")}
    references = {"chosen_ref_logprob": list(reference.split(1)), "rejected_ref_logprob": list(rejected.split(1))}
    batch = Batch((0, 1, 2), {"prompt": [torch.tensor([1])] * 3, **sides, **references})
    assert dpo_pairs(chosen, rejected, batch, DPO())[1]["pair_accuracy"] == (0.5 + 0.5 + 1.0, 3.0)


def test_losses_of_reward_and_cost_models() -> None:
    pairs = PairLoss(score_square_coef=0.1, centre_coef=0.01)
    loss, stats = pairwise(f64(2.0), f64(1.0), Batch((0,), {"margin": [f64(1 - math.log(3))]}), pairs)
    assert_columns([loss], [[math.log(4 / 3) + 0.1 * 5 + 0.01 * 9]])
    assert stats["pair_accuracy"] == (1.0, 1.0)
    signs = {"chosen_unsafe": [f64(0.0)], "rejected_unsafe": [f64(1.0)]}
    loss, stats = safe_pairwise(f64(0.0), f64(math.log(3)), Batch((0,), signs), PairLoss(score_square_coef=0.0))
    assert_columns([loss], [[2 * math.log(4 / 3) + math.log(2)]])
    assert stats["unsafe_accuracy"] == (1.0, 2.0)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"])
@pytest.mark.parametrize("ratio", ["token", "sequence", "sequence_token"])
def test_good_responses_become_likelier_and_bad_ones_less(loss_type: str, ratio: str) -> None:
    """Of the policy that drew them; and each response's gradient is its own, whatever else is in the micro-batch."""
    data = random_columns(0)
    advantage = [torch.full_like(x, 1.0 if i % 2 else -1.0) for i, x in enumerate(data["logprob"])]
    grpo = GRPO(loss_type=loss_type, ratio=ratio, beta=0.0)

    def gradient(places: list[int]) -> list[torch.Tensor]:
        chosen = {key: [column[i] for i in places] for key, column in data.items()}
        batch = batch_of(chosen, "logprob", advantage=[advantage[i] for i in places])
        logprob = torch.cat(chosen["logprob"]).requires_grad_()
        grpo_policy(logprob, batch, grpo)[0].sum().backward()
        return list(logprob.grad.split([LENGTHS[i] for i in places]))

    everything = gradient(list(range(len(LENGTHS))))
    for i, of_response in enumerate(everything):
        assert (of_response * (1 if i % 2 else -1) < 0).all()
    for i, alone in zip((3, 1), gradient([3, 1]), strict=True):
        torch.testing.assert_close(alone, everything[i], rtol=1e-12, atol=1e-12)


def test_fine_tuning_is_cross_entropy() -> None:
    logprob, is_top = f64(-1.0, 0.0, -2.5), torch.tensor([False, True, True])
    loss, stats = sft(logprob, Batch((), {}), is_top=is_top)
    assert (loss.tolist(), stats) == ([1.0, 0.0, 2.5], {"token_accuracy": (2.0, 3.0)})
    masked = Batch((0, 1), {"in_loss": [torch.tensor([1, 0]), torch.tensor([1])]})
    assert sft(logprob, masked, is_top=is_top)[1] == {"token_accuracy": (1.0, 2.0)}


def test_references_of_pairs_are_those_that_were_computed() -> None:
    chosen, rejected = [f64(-1.0), f64(-2.0)], [f64(-3.0), f64(-4.0)]
    ref = Columns((0, 1), {"chosen_ref_logprob": chosen, "rejected_ref_logprob": rejected, "prompt": chosen})
    made = with_reference(Columns((0, 1), {"chosen_ref_logprob": rejected}), ref)
    assert made == {"chosen_ref_logprob": chosen, "rejected_ref_logprob": rejected}
