"""The tensor functions of the algorithms: numbers worked out by hand, and what counts."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from realhf.algorithms import functional as F
from realhf.algorithms.grpo.config import GRPO
from realhf.algorithms.grpo.functions import group_advantages
from realhf.algorithms.ppo.config import PPOHyperparameters
from realhf.algorithms.ppo.functions import ppo_advantages
from realhf.algorithms.reinforce_pp.config import ReinforcePlusPlus
from realhf.algorithms.reinforce_pp.functions import reinforce_pp_advantages, reinforce_pp_policy
from realhf.algorithms.remax.config import ReMax
from realhf.algorithms.remax.functions import remax_advantages
from realhf.algorithms.rloo.config import RLOO
from realhf.algorithms.rloo.functions import rloo_advantages
from realhf.algorithms.safe_rlhf.config import SafeRLHF
from realhf.algorithms.safe_rlhf.functions import judged, safe_advantages, safe_cost_value
from realhf.api.script.columns import Columns
from realhf.base.errors import UserError
from realhf.engine.batch import Batch
from tests.unit.algorithms.conftest import SingleContext
from tests.unit.algorithms.rollouts import assert_columns, f64

END = 2


def rollout(*responses: list[int], logprob: list[list[float]] | None = None, **others: list[torch.Tensor]) -> Columns:
    """Samples with a prompt of one token, the given responses, and log-probabilities of 0 unless given."""
    columns: dict[str, Any] = {
        "prompt": [torch.tensor([1])] * len(responses),
        "seq": [torch.tensor([1, *response]) for response in responses],
        "logprob": [f64(*row) for row in logprob or [[0.0] * len(response) for response in responses]],
    }
    return Columns(range(len(responses)), columns | others)


def rewards(*values: float, valid: list[float] | None = None) -> Columns:
    data = {"reward": list(f64(*values).split(1))}
    if valid is not None:
        data["valid"] = list(f64(*valid).split(1))
    return Columns(range(len(values)), data)


def context(samples: int, group: int = 1, **settings: Any) -> SingleContext:
    return SingleContext(batch_size=samples, samples_per_prompt=group, **settings)


def test_uniform_groups_are_left_out_and_made_up_for() -> None:
    """Groups of two: uniform, informative, informative, uniform. One group a step, then two because one was owed."""
    samples = rollout(*[[5]] * 8)
    grpo = GRPO(drop_uniform_groups=True, groups_per_step=1, beta=0.0)
    kept = context(8, 2)

    def step(*values: float) -> list[float]:
        made, stats = group_advantages(samples, rewards(*values), None, grpo, context=kept)
        assert stats["reward_mean"] == (sum(values), 8.0), "the mean is that of all responses"
        return torch.cat(made["valid"]).tolist()

    assert step(1, 1, 0, 1, 3, 2, 0, 0) == [0, 0, 1, 1, 0, 0, 0, 0]
    assert step(*[1.0] * 8) == [0] * 8
    assert step(1, 1, 0, 1, 3, 2, 0, 1) == [0, 0, 1, 1, 1, 1, 0, 0]
    assert step(1, 2, 0, 1, 3, 2, 0, 1) == [1, 1, 0, 0, 0, 0, 0, 0]
    all_of_them = replace(grpo, groups_per_step=0)
    made, stats = group_advantages(samples, rewards(1, 1, 0, 1, 3, 2, 0, 0), None, all_of_them, context=context(8, 2))
    assert torch.cat(made["valid"]).tolist() == [0, 0, 1, 1, 1, 1, 0, 0]
    assert stats["informative_groups"] == (2.0, 4.0)


def test_a_step_owes_at_most_its_own_share() -> None:
    """Two groups a step: after any number of steps without one, the next trains on four, and on no more."""
    samples = rollout(*[[5]] * 12)
    grpo = GRPO(drop_uniform_groups=True, groups_per_step=2, beta=0.0)
    kept = context(12, 2)

    def step(informative: int) -> int:
        """How many groups are trained on, of six, the first `informative` of which differ."""
        values = [float(i % 2 if i // 2 < informative else 1) for i in range(12)]
        made, stats = group_advantages(samples, rewards(*values), None, grpo, context=kept)
        assert stats["informative_groups"] == (informative, 6.0)
        return int(sum(made["valid"]).item()) // 2 if "valid" in made else 6

    assert [step(6), step(6)] == [2, 2]
    assert [step(0) for _ in range(3)] == [0, 0, 0]
    assert kept.state == {"groups_owed": 2.0}
    assert [step(6), step(6)] == [4, 2]
    assert [step(1), step(6), step(6)] == [1, 3, 2]  # one is owed, and made up for
    assert [step(0), step(3), step(6)] == [0, 3, 3]
    assert [step(0), step(1), step(6)] == [0, 1, 4]  # owes three, and is let off one


def test_a_member_that_is_not_valid_makes_no_group_count() -> None:
    """Whether its reward is the largest, the smallest or none: the others are equal, and teach nothing."""
    samples = rollout(*[[5]] * 8)
    grpo = GRPO(drop_uniform_groups=True, beta=0.0)
    for odd in (9.0, -9.0, 0.0):
        scores = rewards(3, 3, odd, 3, 1, 2, odd, odd, valid=[1, 1, 0, 1, 1, 1, 0, 0])
        made, stats = group_advantages(samples, scores, None, grpo, context=context(8, 4))
        assert stats["informative_groups"] == (1.0, 2.0)
        assert torch.cat(made["valid"]).tolist() == [0, 0, 0, 0, 1, 1, 0, 0]
        assert torch.cat(made["advantage"])[:4].tolist() == [0, 0, 0, 0]
        # 1 and 2 alone: mean 3/2, deviation sqrt(1/2).
        a = 0.5 / (math.sqrt(0.5) + 1e-4)
        assert torch.cat(made["advantage"])[4:].tolist() == pytest.approx([-a, a, 0, 0])
    nothing = rewards(*[3.0] * 8, valid=[0] * 8)
    made, stats = group_advantages(samples, nothing, None, grpo, context=context(8, 4))
    assert stats == {"informative_groups": (0.0, 2.0)}
    assert (torch.cat(made["advantage"]) == 0).all()


TRUNCATING = {"max_new_tokens": 3, "eos_token": END, "mask_truncated": True}


@pytest.mark.parametrize(
    "make",
    [
        lambda x, s, c: group_advantages(x, s, None, GRPO(**TRUNCATING, beta=0.0), context=c),
        lambda x, s, c: rloo_advantages(x, s, None, RLOO(**TRUNCATING), context=c),
        lambda x, s, c: reinforce_pp_advantages(x, s, None, ReinforcePlusPlus(**TRUNCATING), context=c),
        lambda x, s, c: remax_advantages(x, s, s, None, ReMax(**TRUNCATING)),
        lambda x, s, c: ppo_advantages(x, s, x, x, PPOHyperparameters(**TRUNCATING), context=c),
        lambda x, s, c: safe_advantages(
            x, x, Columns(x.ids, judged(s, x)), Columns(x.ids, judged(s, x)), SafeRLHF(**TRUNCATING), context=c
        ),
    ],
    ids=["grpo", "rloo", "reinforce_pp", "remax", "ppo", "safe_rlhf"],
)
def test_truncated_responses_are_masked_and_weights_are_made_by_every_algorithm(make: Any) -> None:
    """The second was cut off, the last has no score: each is left out, and all that were scored are in statistics."""
    answers = ([5, END], [5, 5, 5], [5, 5, END], [5])
    zeros = [f64(*[0.0] * len(answer)) for answer in answers]
    samples = rollout(*answers, ref_logprob=zeros, value=zeros)
    made, stats = make(samples, rewards(1, 3, 1, 30, valid=[1, 1, 1, 0]), context(4, 4))
    assert torch.cat(made["valid"]).tolist() == [1, 0, 1, 0]
    assert stats["reward_mean"] == (5.0, 3.0)
    assert [len(x) for x in made["advantage"]] == [2, 3, 3, 1]
    assert (made["advantage"][3] == 0).all()
    assert "importance" not in made


@pytest.mark.parametrize(
    "make",
    [
        lambda x, s, old, o, c: group_advantages(x, s, None, GRPO(**o, beta=0.0), old=old, context=c),
        lambda x, s, old, o, c: rloo_advantages(x, s, None, RLOO(**o), old=old, context=c),
        lambda x, s, old, o, c: reinforce_pp_advantages(x, s, None, ReinforcePlusPlus(**o), old=old, context=c),
        lambda x, s, old, o, c: remax_advantages(x, s, s, None, ReMax(**o), old=old),
        lambda x, s, old, o, c: ppo_advantages(x, s, x, x, PPOHyperparameters(**o), old=old, context=c),
        lambda x, s, old, o, c: safe_advantages(
            x, x, Columns(x.ids, judged(s, x)), Columns(x.ids, judged(s, x)), SafeRLHF(**o), old=old, context=c
        ),
    ],
    ids=["grpo", "rloo", "reinforce_pp", "remax", "ppo", "safe_rlhf"],
)
def test_every_algorithm_corrects_importance(make: Any) -> None:
    zeros = [f64(0.0, 0.0), f64(0.0)]
    samples = rollout([5, 5], [5], ref_logprob=zeros, value=zeros)
    old = Columns((0, 1), {"old_logprob": [f64(math.log(1.2), 0.0), f64(math.log(9))]})
    options = {"importance_correction": "token_truncate", "importance_high": 1.5}
    made, _ = make(samples, rewards(0, 1), old, options, context(2, 2))
    assert_columns(made["importance"], [[1.2, 1.0], [1.5]])
    assert "valid" not in made


def test_truncated_responses_teach_nothing_and_still_count_in_their_group() -> None:
    """At most 3 tokens: the second response has 3 and no end, the third ends with its third, the last by a sequence."""
    samples = rollout([5, END], [5, 5, 5], [5, 5, END], [5, 7, 8])
    grpo = GRPO(**{"max_new_tokens": 3, "eos_token": END, "stop_sequences": ((7, 8),)}, mask_truncated=True, beta=0.0)
    made, _ = group_advantages(samples, rewards(1, 3, 1, 3), None, grpo, context=context(4, 4))
    assert torch.cat(made["valid"]).tolist() == [1, 0, 1, 1]
    assert made["advantage"][0][0] == pytest.approx(-1 / (math.sqrt(4 / 3) + 1e-4))


def test_importance_weights_need_the_policys_own_log_probabilities() -> None:
    samples = rollout([5, 5], [5], logprob=[[-1.0, -1.0], [-1.0]])
    grpo = GRPO(importance_correction="token_truncate", importance_high=1.5, beta=0.0)
    old = Columns((0, 1), {"old_logprob": [f64(-1.0, -1 + math.log(1.2)), f64(-1 + math.log(9))]})
    made, _ = group_advantages(samples, rewards(0, 1), None, grpo, old=old, context=context(2, 2))
    assert_columns(made["importance"], [[1.0, 1.2], [1.5]])
    with pytest.raises(UserError, match="old_logprob"):
        group_advantages(samples, rewards(0, 1), None, grpo, context=context(2, 2))


def test_reinforce_plus_plus() -> None:
    """KL of 1 at the first token of the first response, kl_coef 0.5: rewards -0.5, 2 and 0."""
    samples = rollout([5, 5], [5], logprob=[[0.0, 0.0], [0.0]])
    ref = Columns((0, 1), {"ref_logprob": [f64(-1.0, 0.0), f64(0.0)]})
    options = ReinforcePlusPlus(kl_coef=0.5)
    made, _ = reinforce_pp_advantages(samples, rewards(2, 0), ref, options, context=context(2))
    # To go: 1.5, 2, 0: mean 7/6, squares 6.25, variance 6.25/3 - 49/36 = 26/36.
    mean, deviation = 7 / 6, math.sqrt(26 / 36)
    assert_columns(made["advantage"], [[(1.5 - mean) / deviation, (2 - mean) / deviation], [-mean / deviation]], 1e-7)


def test_reinforce_plus_plus_with_its_options() -> None:
    """Discounted rewards to go of a clipped score, with the other estimators of the divergence."""
    samples = rollout([5, 5], [5], [5], logprob=[[0.0, 0.0], [0.0], [0.0]])
    ref = Columns((0, 1, 2), {"ref_logprob": [f64(-2.0, 0.0), f64(0.0), f64(0.0)]})

    def whitened(*values: float) -> list[float]:
        mean = sum(values) / len(values)
        variance = sum((x - mean) ** 2 for x in values) / len(values)
        return [(x - mean) / math.sqrt(variance + 1e-8) for x in values]

    for estimator, kl in (("k1", 2.0), ("k2", 2.0), ("k3", math.exp(-2) + 1)):
        options = ReinforcePlusPlus(kl_coef=0.5, gamma=0.5, reward_clip=4.0, kl_estimator=estimator)
        made, _ = reinforce_pp_advantages(samples, rewards(7, 1, -9), ref, options, context=context(3))
        expected = whitened(-0.5 * kl + 0.5 * 4.0, 4.0, 1.0, -4.0)
        assert torch.cat(made["advantage"]).tolist() == pytest.approx(expected)
    free = ReinforcePlusPlus(kl_coef=0.0, reward_clip=0.0)
    made, _ = reinforce_pp_advantages(samples, rewards(7, 1, -9), None, free, context=context(3))
    assert torch.cat(made["advantage"]).tolist() == pytest.approx(whitened(7.0, 7.0, 1.0, -9.0))
    # A sample that does not count is in no mean; the baseline of groups takes clipped scores.
    made, _ = reinforce_pp_advantages(samples, rewards(7, 1, -9, valid=[1, 1, 0]), None, free, context=context(3))
    assert torch.cat(made["advantage"]).tolist() == pytest.approx([*whitened(7.0, 7.0, 1.0), 0.0])
    group = ReinforcePlusPlus(baseline="group", samples_per_prompt=3, reward_clip=4.0)
    made, _ = reinforce_pp_advantages(samples, rewards(7, 1, -9), ref, group, context=context(3, 3))
    mean = (4.0 + 1.0 - 4.0) / 3
    assert torch.cat(made["advantage"]).tolist() == pytest.approx(whitened(4 - mean, 4 - mean, 1 - mean, -4 - mean))


def test_reinforce_plus_plus_with_the_baseline_of_groups() -> None:
    samples = rollout([5, 5], [5])
    options = ReinforcePlusPlus(baseline="group", samples_per_prompt=2, kl_coef=0.5)
    ref = Columns((0, 1), {"ref_logprob": [f64(-1.0, 0.0), f64(0.0)]})
    made, _ = reinforce_pp_advantages(samples, rewards(3, 0), ref, options, context=context(2, 2))
    # 1.5, 1.5, -1.5: mean 1/2, variance 2.25 - 1/4 = 2.
    assert_columns(made["advantage"], [[1 / math.sqrt(2)] * 2, [-math.sqrt(2)]], 1e-7)
    data = {**vars(samples)["_data"], **made, "ref_logprob": ref.ref_logprob}
    loss, stats = reinforce_pp_policy(f64(0.0, 0.0, 0.0), Batch((0, 1), data), options)
    # At a ratio of 1: -A, plus 0.5 x 1/2 at the first token.
    assert_columns([loss], [[-1 / math.sqrt(2) + 0.25, -1 / math.sqrt(2), math.sqrt(2)]], 1e-7)
    assert stats["ref_kl"] == (0.5, 3.0)


def test_rloo() -> None:
    """Clipped scores, less the divergence of the whole response from what training begins with."""
    samples = rollout([5, 5], [5], logprob=[[-1.0, -1.0], [-1.0]])
    ref = Columns((0, 1), {"ref_logprob": [f64(-2.0, -1.5), f64(-3.0)]})
    rloo = RLOO(samples_per_prompt=2, kl_coef=0.5, reward_clip=4.0)
    made, _ = rloo_advantages(samples, rewards(7, 1), ref, rloo, context=context(2, 2))
    # 4 - 0.5 x 1.5 and 1 - 0.5 x 2, against each other.
    assert_columns(made["advantage"], [[3.25, 3.25], [-3.25]])
    old = Columns((0, 1), {"old_logprob": [f64(-1.0, 0.0), f64(-3.0)]})
    made, _ = rloo_advantages(samples, rewards(7, 1), ref, rloo, old=old, context=context(2, 2))
    assert_columns(made["advantage"], [[1.75, 1.75], [-1.75]])  # 4 - 0.5 x 2.5 and 1
    unbounded = replace(rloo, reward_clip=0.0)
    made, _ = rloo_advantages(samples, rewards(-7, 1), None, unbounded, context=context(2, 2))
    assert_columns(made["advantage"], [[-8.0, -8.0], [8.0]])
    made, stats = rloo_advantages(samples, rewards(-7, 1), None, rloo, context=context(2, 2))
    assert_columns(made["advantage"], [[-5.0, -5.0], [5.0]])
    assert stats["informative_groups"] == (1.0, 1.0)
    _, stats = rloo_advantages(samples, rewards(7, 5), ref, rloo, context=context(2, 2))
    assert stats["informative_groups"] == (0.0, 1.0), "clipped they are equal, however the divergences differ"


def test_rloo_normalises_over_those_that_have_others_in_their_group() -> None:
    """Groups 3, 0 and 1, none: 3 and -3 with the deviation sqrt(18)."""
    samples = rollout([5], [5], [5], [5])
    rloo = RLOO(samples_per_prompt=2, normalise_advantages=True)
    scores = rewards(3, 0, 1, 9, valid=[1, 1, 1, 0])
    made, _ = rloo_advantages(samples, scores, None, rloo, context=context(4, 2))
    a = 3 / (math.sqrt(18) + 1e-4)
    assert torch.cat(made["advantage"]).tolist() == pytest.approx([a, -a, 0, 0])


def test_remax() -> None:
    samples = rollout([5, 5], [5])
    ref = Columns((0, 1), {"ref_logprob": [f64(-1.0, -2.0), f64(0.0)]})
    made, stats = remax_advantages(samples, rewards(2, 1), rewards(0.5, 1.5), ref, ReMax(kl_coef=0.1))
    # Rewards -0.1, -0.2 + 2 and 1; to go 1.7, 1.8, 1; less 0.5 and 1.5.
    assert_columns(made["advantage"], [[1.2, 1.3], [-0.5]])
    assert_columns(made["reward"], [[2.0], [1.0]])
    assert stats["greedy_reward_mean"] == (2.0, 2.0)
    made, _ = remax_advantages(samples, rewards(2, 1), rewards(0.5, 1.5, valid=[1, 0]), ref, ReMax(kl_coef=0.1))
    assert torch.cat(made["valid"]).tolist() == [1, 0]
    assert made["advantage"][1].tolist() == [0]
    assert ReMax(temperature=0.7, top_k=5).greedy.temperature == 0
    assert ReMax(temperature=0.7, top_k=5, max_new_tokens=9).greedy.max_new_tokens == 9


def test_safe_rlhf() -> None:
    """One token a response, values of 0, no whitening: advantages are rewards and costs themselves."""
    samples = rollout([5], [5], logprob=[[0.0], [0.0]])
    ref = Columns((0, 1), {"ref_logprob": [f64(-1.0), f64(0.0)]})
    zeros = Columns((0, 1), {"value": [f64(0.0), f64(0.0)]})
    safe = SafeRLHF(
        **{"kl_coef": 0.1, "whiten_advantages": False, "multiplier": 3.0, "multiplier_lr": 0.5, "cost_limit": 0.5},
        cost_std=2.0,
    )
    kept = context(2)

    def judge(*values: float) -> Columns:
        return Columns((0, 1), judged(rewards(*values), zeros))

    made, stats = safe_advantages(samples, ref, judge(2, 1), judge(4, -2), safe, context=kept)
    # Reward 2 - 0.1 and 1; cost 4/2 + 0.1 and -1; (A_r - 3 A_c) / 4.
    assert_columns(made["advantage"], [[(1.9 - 6.3) / 4], [(1 + 3) / 4]])
    assert_columns(made["return"], [[1.9], [1.0]])
    assert_columns(made["cost_return"], [[2.1], [-1.0]])
    assert stats["cost_mean"] == (2.0, 2.0)
    assert stats["unsafe"] == (1.0, 2.0)
    assert stats["multiplier"] == pytest.approx((3.0, 1.0))
    # The mean cost 1 is above 0.5: log 3 + 0.5 x 3 x 0.5.
    assert kept.state["log_multiplier"] == pytest.approx(math.log(3) + 0.75)
    _, stats = safe_advantages(samples, ref, judge(2, 1), judge(-4, -2), safe, context=kept)
    assert stats["multiplier"][0] == pytest.approx(3 * math.exp(0.75))
    assert kept.state["log_multiplier"] < math.log(3)

    batch = Batch((0, 1), {**vars(samples)["_data"], **made})
    losses, stats = safe_cost_value(f64(0.1, 0.0), batch, replace(safe, value_clip=0.0))
    assert_columns([losses], [[0.5 * 2.0**2, 0.5]])
    assert stats["cost_return_mean"] == pytest.approx((1.1, 2.0))


def test_a_judge_has_a_column_of_validity_only_if_its_scores_have() -> None:
    values = Columns((0, 1), {"value": [f64(0.5, 1.0), f64(2.0)]})
    made = judged(rewards(3, 4), values)
    assert set(made) == {"reward", "value"}
    assert_columns(made["value"], [[0.5, 1.0], [2.0]])
    assert_columns(made["reward"], [[3.0], [4.0]])
    assert_columns(judged(rewards(3, 4, valid=[1, 0]), values)["valid"], [[1.0], [0.0]])


def test_safe_rlhf_s_multiplier_follows_the_costs_that_count() -> None:
    """In the cost model's own units, neither standardised nor clipped; at most the largest multiplier."""
    samples = rollout([5], [5], [5], logprob=[[0.0]] * 3)
    zeros = Columns((0, 1, 2), {"value": [f64(0.0)] * 3, "ref_logprob": [f64(0.0)] * 3})
    safe = SafeRLHF(multiplier=2.0, multiplier_lr=0.5, cost_limit=10.0, cost_std=4.0, reward_clip=1.0)

    def step(costs: list[float], settings: SafeRLHF, kept: Any, valid: tuple[float, ...] = (1, 1, 0)) -> Any:
        reward = Columns((0, 1, 2), judged(rewards(0, 0, 0), zeros))
        cost = Columns((0, 1, 2), judged(rewards(*costs, valid=list(valid)), zeros))
        return safe_advantages(samples, zeros, reward, cost, settings, context=kept)

    kept = context(3)
    _, stats = step([20.0, 4.0, 999.0], safe, kept)  # a mean of 12, 2 above the limit
    assert kept.state["log_multiplier"] == pytest.approx(math.log(2) + 0.5 * 2.0 * 2.0)
    assert stats["cost_mean"] == (24.0, 2.0)
    assert stats["multiplier"] == pytest.approx((2.0, 1.0))
    _, stats = step([-1.0, 0.0, 5.0], safe, context(3))
    assert stats["unsafe"] == (0.0, 2.0)
    kept = context(3)
    step([1e3, 1e3, 0.0], replace(safe, max_multiplier=3.0), kept)
    assert math.exp(kept.state["log_multiplier"]) == pytest.approx(3.0)
    kept = context(3)
    made, stats = step([1.0, 2.0, 3.0], safe, kept, valid=(0, 0, 0))
    assert kept.state == {}
    assert stats["cost_mean"] == (0.0, 0.0)
    assert torch.cat(made["valid"]).tolist() == [0, 0, 0]


def test_safe_rlhf_whitens_both_and_keeps_its_columns() -> None:
    samples = rollout([5], [5], logprob=[[0.0]] * 2)
    zeros = Columns((0, 1), {"value": [f64(0.0), f64(0.0)], "ref_logprob": [f64(0.0)] * 2})
    critic = Columns((0, 1), {"value": [f64(0.5), f64(0.25)]})
    reward = Columns((0, 1), judged(rewards(1, 3), zeros))
    cost = Columns((0, 1), judged(rewards(9, 1), critic))
    safe = SafeRLHF(multiplier=3.0, cost_std=10.0)
    made, stats = safe_advantages(samples, zeros, reward, cost, safe, context=context(2))
    # Both whitened: -1, 1 and 1, -1.
    assert torch.cat(made["advantage"]).tolist() == pytest.approx([(-1 - 3) / 4, (1 + 3) / 4])
    assert torch.cat(made["reward"]).tolist() == [1, 3]
    assert torch.cat(made["cost"]).tolist() == [9, 1]
    assert torch.cat(made["value"]).tolist() == [0, 0]
    assert torch.cat(made["cost_value"]).tolist() == [0.5, 0.25]
    assert_columns(made["cost_return"], [[0.9], [0.1]])
    assert stats["explained_variance"] == (0.0, 1.0)
    # Cost returns 0.9 and 0.1, errors 0.4 and -0.15: 1 - 0.275^2 / 0.4^2.
    assert stats["cost_explained_variance"] == pytest.approx((1 - 0.275**2 / 0.4**2, 1.0))
    assert "valid" not in made
    _, value_stats = safe_cost_value(f64(0.0, 0.0), Batch((0, 1), {**vars(samples)["_data"], **made}), safe)
    assert set(value_stats) == {"cost_value_clip_fraction", "cost_value_mean", "cost_return_mean"}


def test_adaptive_kl() -> None:
    """A divergence of 3 a response with a target of 2: at most 20 % up, times 2 samples of 10."""
    samples = rollout([5, 5], [5, 5], logprob=[[0.0, 0.0], [0.0, 0.0]])
    ref = Columns((0, 1), {"ref_logprob": [f64(-1.0, -3.0), f64(-1.0, -1.0)]})
    values = Columns((0, 1), {"value": [f64(0.0, 0.0)] * 2})
    ppo = PPOHyperparameters(
        **{"kl_controller": "adaptive", "kl_target": 2.0, "kl_horizon": 10, "kl_coef": 0.1, "gamma": 1.0, "lam": 1.0},
        whiten_advantages=False,
    )
    kept = context(2)
    made, stats = ppo_advantages(samples, rewards(1, 1), ref, values, ppo, context=kept)
    assert stats["kl_coef"] == (0.1, 1.0)
    assert_columns(made["return"], [[1 - 0.4, 1 - 0.3], [1 - 0.2, 1 - 0.1]])
    assert kept.state["kl_coef"] == pytest.approx(0.1 * (1 + 0.2 * 0.2))
    made, stats = ppo_advantages(samples, rewards(1, 1), ref, values, ppo, context=kept)
    assert stats["kl_coef"][0] == pytest.approx(0.104)
    assert made["return"][0][0] == pytest.approx(1 - 4 * 0.104)


def test_returns_that_are_all_one_are_divided_by_a_tenth() -> None:
    """The deviation of normalised values is at least 0.1, its variance 0.01."""
    samples, values = rollout([5], [5]), Columns((0, 1), {"value": [f64(0.0), f64(0.0)]})
    ref = Columns((0, 1), {"ref_logprob": [f64(0.0), f64(0.0)]})
    ppo = PPOHyperparameters(normalise_values=True, kl_coef=0.0, whiten_advantages=False)
    for spread, deviation in ((0.0, 0.1), (0.09, 0.1), (0.2, 0.2)):
        made, _ = ppo_advantages(samples, rewards(2 - spread, 2 + spread), ref, values, ppo, context=context(2))
        assert_columns(made["return"], [[-spread / deviation], [spread / deviation]])
    scale = F.ValueScale().updated(3.0, 9.0, 0.5)
    assert (scale.mean, scale.std) == pytest.approx((3.0, 0.1))
    assert_columns([scale.normalise(f64(3.5)), scale.restore(f64(5.0))], [[5.0], [3.5]])


def test_what_does_not_count_is_in_no_scale_and_no_explained_variance() -> None:
    samples, values = rollout([5], [5], [5]), Columns((0, 1, 2), {"value": [f64(3.0), f64(8.0), f64(7.0)]})
    ref = Columns((0, 1, 2), {"ref_logprob": [f64(0.0)] * 3})
    ppo = PPOHyperparameters(kl_coef=0.0, whiten_advantages=False, reward_clip=100)
    scores = rewards(4, 8, 99, valid=[1, 1, 0])
    made, stats = ppo_advantages(samples, scores, ref, values, ppo, context=context(3))
    assert_columns(made["advantage"], [[1.0], [0.0], [0.0]])
    assert_columns(made["return"], [[4.0], [8.0], [0.0]])
    # Returns 4 and 8, errors 1 and 0: 1 - (1/4) / 4.
    assert stats["explained_variance"] == pytest.approx((15 / 16, 1.0))
    none = rewards(4, 8, 99, valid=[0, 0, 0])
    kept = context(3)
    made, stats = ppo_advantages(samples, none, ref, values, replace(ppo, normalise_values=True), context=kept)
    assert stats["explained_variance"] == (0.0, 1.0)
    assert kept.state == {}
    assert_columns(made["advantage"], [[0.0]] * 3)
    equal = rewards(4, 4, 4)
    assert ppo_advantages(samples, equal, ref, values, ppo, context=context(3))[1]["explained_variance"] == (0.0, 1.0)


def test_ppo_s_rewards() -> None:
    """(score - mean) / deviation, clipped, at the last token, and the divergence at each; discounts as GAE has them."""
    samples = rollout([5, 5], [5], logprob=[[0.0, 0.0], [0.0]])
    ref = Columns((0, 1), {"ref_logprob": [f64(-1.0, -3.0), f64(1.0)]})
    values = Columns((0, 1), {"value": [f64(0.5, 0.25), f64(1.0)]})
    ppo = PPOHyperparameters(
        **{"kl_coef": 0.1, "reward_mean": 1.0, "reward_std": 2.0, "reward_clip": 3.0, "gamma": 0.5, "lam": 0.5},
        whiten_advantages=False,
    )
    made, _ = ppo_advantages(samples, rewards(11, -1), ref, values, ppo, context=context(2))
    last = 3.0 - 0.3 - 0.25
    first = -0.1 + 0.5 * 0.25 - 0.5 + 0.25 * last
    assert_columns(made["advantage"], [[first, last], [-1.0 + 0.1 - 1.0]])
    assert_columns(made["return"], [[first + 0.5, last + 0.25], [-0.9]])
    for estimator, kls in (("k2", (0.5, 4.5)), ("k3", (math.exp(-1), math.exp(-3) + 2))):
        made, _ = ppo_advantages(
            samples, rewards(11, -1), ref, values, replace(ppo, kl_estimator=estimator, lam=0.0), context=context(2)
        )
        assert made["advantage"][0].tolist() == pytest.approx(
            [-0.1 * kls[0] + 0.5 * 0.25 - 0.5, 3.0 - 0.1 * kls[1] - 0.25]
        )


def test_normalised_values() -> None:
    """The first step's values are returns themselves; then they are in units of the returns' mean and deviation."""
    samples, values = rollout([5], [5]), Columns((0, 1), {"value": [f64(0.5), f64(-0.5)]})
    ref = Columns((0, 1), {"ref_logprob": [f64(0.0), f64(0.0)]})
    ppo = PPOHyperparameters(normalise_values=True, kl_coef=0.0, whiten_advantages=False, reward_clip=100)
    kept = context(2)
    made, _ = ppo_advantages(samples, rewards(4, 8), ref, values, ppo, context=kept)
    assert_columns(made["advantage"], [[3.5], [8.5]])
    assert_columns(made["return"], [[-1.0], [1.0]])  # mean 6, deviation 2
    made, _ = ppo_advantages(samples, rewards(4, 8), ref, values, ppo, context=kept)
    assert_columns(made["advantage"], [[4 - 7], [8 - 5]])  # 0.5 stands for 7, -0.5 for 5


def test_the_scale_of_returns_follows_them_by_its_decay() -> None:
    """Returns 0 and 2, then 4 and 8: means and squares weighed by the decay, divided by the sum of the weights."""
    samples, values = rollout([5], [5]), Columns((0, 1), {"value": [f64(0.0), f64(0.0)]})
    ref = Columns((0, 1), {"ref_logprob": [f64(0.0), f64(0.0)]})
    ppo = PPOHyperparameters(
        normalise_values=True, value_decay=0.75, kl_coef=0.0, whiten_advantages=False, reward_clip=100
    )
    kept = context(2)
    ppo_advantages(samples, rewards(0, 2), ref, values, ppo, context=kept)
    assert kept.state == pytest.approx({"value_mean_sum": 0.25, "value_square_sum": 0.5, "value_weight": 0.25})
    made, _ = ppo_advantages(samples, rewards(4, 8), ref, values, ppo, context=kept)
    assert torch.cat(made["advantage"]).tolist() == pytest.approx([4.0 - 1.0, 8.0 - 1.0])  # a value of 0 stands for 1
    weight, total, square = 0.4375, 0.75 * 0.25 + 0.25 * 6, 0.75 * 0.5 + 0.25 * 40
    assert kept.state == pytest.approx({"value_mean_sum": total, "value_square_sum": square, "value_weight": weight})
    mean = total / weight
    deviation = math.sqrt(square / weight - mean**2)
    assert torch.cat(made["return"]).tolist() == pytest.approx([(4 - mean) / deviation, (8 - mean) / deviation])


def test_the_adaptive_coefficient_follows_the_samples_that_count() -> None:
    """Divergences 1 and 3 of those that count, 100 of the other; a target of 2 is met, one of 1.9 exceeded by 1/19."""
    samples = rollout([5], [5], [5], logprob=[[0.0]] * 3)
    ref = Columns((0, 1, 2), {"ref_logprob": [f64(-1.0), f64(-3.0), f64(-100.0)]})
    values = Columns((0, 1, 2), {"value": [f64(0.0)] * 3})
    for target, expected in ((2.0, 0.1), (1.9, 0.1 * (1 + 0.1 / 1.9 * 2 / 10)), (9.0, 0.1 * (1 - 0.2 * 2 / 10))):
        ppo = PPOHyperparameters(kl_controller="adaptive", kl_target=target, kl_horizon=10, kl_coef=0.1)
        kept = context(3)
        ppo_advantages(samples, rewards(1, 2, 3, valid=[1, 1, 0]), ref, values, ppo, context=kept)
        assert kept.state["kl_coef"] == pytest.approx(expected)
    kept = context(3)
    ppo_advantages(samples, rewards(1, 2, 3, valid=[0, 0, 0]), ref, values, ppo, context=kept)
    assert kept.state == {}


def test_remax_with_other_estimators() -> None:
    samples = rollout([5, 5], logprob=[[0.0, 0.0]])
    ref = Columns((0,), {"ref_logprob": [f64(-2.0, 1.0)]})
    for estimator, kl in (("k1", (2.0, -1.0)), ("k2", (2.0, 0.5)), ("k3", (math.exp(-2) + 1, math.e - 2))):
        options = ReMax(kl_coef=0.1, kl_estimator=estimator)
        made, _ = remax_advantages(samples, rewards(3), rewards(1), ref, options)
        assert made["advantage"][0].tolist() == pytest.approx([2 - 0.1 * sum(kl), 2 - 0.1 * kl[1]])
    made, _ = remax_advantages(samples, rewards(3), rewards(1), None, ReMax(kl_coef=0.0))
    assert_columns(made["advantage"], [[2.0, 2.0]])


def test_remax_counts_samples_whose_both_rewards_count() -> None:
    samples = rollout([5], [5], [5])
    scores, greedy = rewards(1, 2, 3, valid=[1, 0, 1]), rewards(4, 5, 6, valid=[1, 1, 0])
    made, stats = remax_advantages(samples, scores, greedy, None, ReMax(kl_coef=0.0))
    assert torch.cat(made["valid"]).tolist() == [1, 0, 0]
    assert torch.cat(made["advantage"]).tolist() == [-3, 0, 0]
    assert stats["greedy_reward_mean"] == (9.0, 2.0)
    assert stats["reward_mean"] == (4.0, 2.0)  # of all that were scored
    made, stats = remax_advantages(samples, rewards(1, 2, 3), rewards(4, 5, 6), None, ReMax(kl_coef=0.0))
    assert "valid" not in made
    assert set(stats) == {"greedy_reward_mean"}
    nothing = rewards(4, 5, 6, valid=[0, 0, 0])
    assert "greedy_reward_mean" not in remax_advantages(samples, scores, nothing, None, ReMax())[1]
