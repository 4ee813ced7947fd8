"""Rewards of tokens by hand: advantages, sums in groups and statistics, and the shapes that are refused."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from realhf.algorithms.functional import kl_penalised_rewards, standardised_score
from realhf.algorithms.grpo.config import GRPO
from realhf.algorithms.grpo.functions import group_advantages
from realhf.algorithms.ppo.config import PPOHyperparameters
from realhf.algorithms.ppo.functions import ppo_advantages
from realhf.algorithms.reinforce_pp.config import ReinforcePlusPlus
from realhf.algorithms.reinforce_pp.functions import reinforce_pp_advantages
from realhf.algorithms.remax.config import ReMax
from realhf.algorithms.remax.functions import remax_advantages
from realhf.algorithms.rloo.config import RLOO
from realhf.algorithms.rloo.functions import rloo_advantages
from realhf.algorithms.safe_rlhf.config import SafeRLHF
from realhf.algorithms.safe_rlhf.functions import safe_advantages
from realhf.algorithms.samples import rollout_stats
from realhf.api.script.columns import Columns
from realhf.engine.returned import InterfaceError
from tests.unit.algorithms.conftest import SingleContext
from tests.unit.algorithms.rollouts import assert_columns, f64
from tests.unit.algorithms.test_extremes import ADVANTAGES, columns_of, random_columns, surroundings

# Two responses to one prompt, of three and of two tokens; log(policy / reference) 1, -1, 0.5 in the first one.
TOKENS = f64(1.0, -2.0, 3.0)  # their sum is 2
WHOLE = f64(4.0)


def step(*rewards: Tensor) -> Columns:
    data: dict[str, Any] = {
        "prompt": [torch.tensor([1, 3])] * 2,
        "seq": [torch.tensor([1, 3, 5, 5, 5]), torch.tensor([1, 3, 5, 5])],
        "logprob": [f64(-1.0, -2.0, -0.5), f64(-1.0, -1.0)],
        "ref_logprob": [f64(-2.0, -1.0, -1.0), f64(-1.0, -1.0)],
        "value": [f64(1.0, 2.0, 3.0), f64(0.0, 0.0)],
        "reward": list(rewards) or [TOKENS, WHOLE],
    }
    return Columns((0, 1), data)


def two() -> SingleContext:
    return SingleContext(batch_size=2, samples_per_prompt=2)


def test_ppo() -> None:
    """Scores 1/2, -1 and (3 - 1)/2, penalties -0.1, 0.1 and -0.05; delta_j = r_j + V_{j+1}/2 - V_j, A_j = delta_j +
    A_{j+1}/4."""
    given = step()
    ppo = PPOHyperparameters(gamma=0.5, lam=0.5, kl_coef=0.1, reward_mean=1.0, reward_std=2.0, whiten_advantages=False)
    made, _ = ppo_advantages(given, given, given, given, ppo, context=two())
    # Deltas 0.4 + 1 - 1, -0.9 + 1.5 - 2, 0.95 - 3; the second response: 0 and (4 - 1)/2.
    assert_columns(made["advantage"], [[0.4 - 1.9125 / 4, -1.4 - 2.05 / 4, -2.05], [1.5 / 4, 1.5]])
    assert_columns(made["return"], [[0.921875, 0.0875, 0.95], [0.375, 1.5]])


def test_reinforce_pp() -> None:
    """Scores 1, -2 and 2 (clipped) less the penalty; A_j = r_j + A_{j+1}/2, whitened over all five tokens."""
    given = step()
    options = ReinforcePlusPlus(gamma=0.5, kl_coef=0.1, reward_clip=2.0)
    made, _ = reinforce_pp_advantages(given, given, given, options, context=two())
    raw = [0.9 - 0.925 / 2, -1.9 + 1.95 / 2, 1.95, 1.0, 2.0]
    mean = 4.4625 / 5
    scale = math.sqrt(5.86675 / 5 + 1e-8)  # 0.455^2 + 1.8175^2 + 1.0575^2 + 0.1075^2 + 1.1075^2
    expected = [(x - mean) / scale for x in raw]
    assert_columns(made["advantage"], [expected[:3], expected[3:]])


def test_groups_take_the_sum_over_the_tokens() -> None:
    """Sums 2 and 4."""
    given, context = step(), two()
    half = 1 / (math.sqrt(2) + 1e-4)
    made, stats = group_advantages(given, given, given, GRPO(), context=context)
    assert_columns(made["advantage"], [[-half] * 3, [half] * 2])
    assert stats["informative_groups"] == (1.0, 1.0)
    made, _ = rloo_advantages(given, given, None, RLOO(normalise_advantages=False, reward_clip=3.0), context=context)
    assert_columns(made["advantage"], [[-1.0] * 3, [1.0] * 2])  # 2 and, clipped, 3
    # The sum is clipped, not the tokens, whose sum would then be 3.
    options = ReinforcePlusPlus(samples_per_prompt=2, baseline="group", reward_clip=3.0)
    wide = step(f64(-4.0, 3.0, 3.0), f64(2.5))
    made, _ = reinforce_pp_advantages(wide, wide, wide, options, context=context)
    # -1/4 three times and 1/4 twice: mean -1/20, variance 1/16 - 1/400.
    low, high = (x / math.sqrt(0.06 + 1e-8) for x in (-0.2, 0.3))
    assert_columns(made["advantage"], [[low] * 3, [high] * 2])
    same = step(f64(5.0, -2.0, 1.0), WHOLE)
    assert group_advantages(same, same, same, GRPO(), context=context)[1]["informative_groups"] == (0.0, 1.0)


def test_remax() -> None:
    """Rewards to go, less the sum of the greedy response's tokens, whose number is its own."""
    given, greedy = step(), step(f64(0.25, 0.25, 0.25, 0.25), f64(-1.0))
    made, stats = remax_advantages(given, given, greedy, None, ReMax(kl_coef=0.0))
    assert_columns(made["advantage"], [[2 - 1, 1 - 1, 3 - 1], [5, 5]])
    assert stats["greedy_reward_mean"] == (0.0, 2.0)
    assert made["reward"] == [TOKENS, WHOLE]


def test_costs() -> None:
    """The multiplier's mean cost and the share of unsafe responses are of sums."""
    given = step()
    cost = step(f64(1.0, -3.0, 1.0), f64(3.0))
    _, stats = safe_advantages(given, given, given, cost, SafeRLHF(cost_std=2.0), context=two())
    assert stats["cost_mean"] == (2.0, 2.0)
    assert stats["unsafe"] == (1.0, 2.0)


def test_statistics_take_the_sum() -> None:
    given = step()
    columns = {name: getattr(given, name) for name in ("prompt", "seq", "reward")}
    assert rollout_stats(columns)["reward_mean"] == (6.0, 2.0)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_reward_at_the_last_token_is_that_of_the_response(name: str) -> None:
    data = random_columns(7)
    of_tokens = [torch.cat([torch.zeros(len(x) - 1), r]) for x, r in zip(data["logprob"], data["reward"], strict=True)]
    whole, stats = ADVANTAGES[name](columns_of(data), surroundings())
    made, others = ADVANTAGES[name](columns_of({**data, "reward": of_tokens}), surroundings())
    assert stats == others
    for found, expected in zip(made["advantage"], whole["advantage"], strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("shape", [(3,), (0,), (1, 1), ()])
def test_other_shapes_are_refused(name: str, shape: tuple[int, ...]) -> None:
    """The third response has one token."""
    data = random_columns(0)
    data["reward"][2] = torch.ones(shape)
    told = (
        rf"'reward' of sample 2 has the shape \[{', '.join(map(str, shape))}\], and its response 1 tokens; give \[1\], "
        r"the reward of the whole response, or \[1\], one for each of its tokens"
    )
    with pytest.raises(InterfaceError, match=told):
        ADVANTAGES[name](columns_of(data), surroundings())


def test_other_shapes_of_costs_of_greedy_rewards_and_of_valid_are_refused() -> None:
    data = random_columns(0)
    long = [torch.cat([x, x]) for x in data["logprob"]]
    good, bad = columns_of(data), columns_of({**data, "reward": long})
    with pytest.raises(InterfaceError, match=r"'cost' of sample 0 has the shape \[6\], and its response 3 tokens"):
        safe_advantages(good, good, good, bad, SafeRLHF(), context=surroundings())
    square = columns_of({**data, "reward": [x[:, None] for x in long]})
    with pytest.raises(InterfaceError, match=r"'reward of the greedy response' of sample 0 has the shape \[6, 1\]"):
        remax_advantages(good, good, square, good, ReMax())
    wrong = columns_of({**data, "valid": data["logprob"]})
    with pytest.raises(InterfaceError, match=r"'valid' of sample 0 has the shape \[3\], must be \[1\]: .*add up"):
        group_advantages(good, wrong, good, GRPO(), context=surroundings())


def test_an_empty_response_has_no_token_for_a_reward() -> None:
    empty = f64()
    for score in (f64(4.0), empty):
        assert kl_penalised_rewards(score, empty, empty, 0.1).tolist() == []
    assert standardised_score(empty, 1.0, 2.0, 5.0).tolist() == []
