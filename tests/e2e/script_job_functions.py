"""PPO's functions for the script of tests, those of `realhf.algorithms.ppo`."""

import torch
from torch import Tensor

from realhf.algorithms.functional import (
    clipped_value_loss,
    gae,
    kl_penalised_rewards,
    mean_and_variance,
    moments,
    ppo_policy_loss,
    standardised_score,
    whiten,
)
from realhf.algorithms.ppo.config import PPOHyperparameters
from realhf.algorithms.statistics import mean_of
from realhf.api import Columns
from realhf.engine.batch import Batch
from realhf.engine.interface import Context, Stats


def advantages(
    rollout: Columns, scores: Columns, reference: Columns, values: Columns, ppo: PPOHyperparameters, context: Context
) -> tuple[dict[str, list[Tensor]], Stats]:
    rewards = [
        kl_penalised_rewards(
            standardised_score(score, ppo.reward_mean, ppo.reward_std, ppo.reward_clip), logprob, ref, ppo.kl_coef
        )
        for score, logprob, ref in zip(scores.reward, rollout.logprob, reference.ref_logprob, strict=True)
    ]
    advantage, returns = gae(rewards, values.value, ppo.gamma, ppo.lam)
    each, of_returns = torch.cat(advantage), torch.cat(returns)
    sums = context.sum_over_data_parallel(torch.cat([moments(each), moments(of_returns)]))
    unexplained, total = mean_and_variance(sums[:3])[1], mean_and_variance(sums[3:])[1]
    whitened = whiten(each, sums[:3]).split([len(a) for a in advantage])
    return {"advantage": list(whitened), "return": returns}, {"explained_variance": (1 - unexplained / total, 1.0)}


def policy_loss(logprob: Tensor, batch: Batch, ppo: PPOHyperparameters) -> tuple[Tensor, Stats]:
    old, advantage = batch.packed("logprob").values, batch.packed("advantage").values
    loss, is_clipped = ppo_policy_loss(logprob, old, advantage, ppo.policy_clip)
    return loss, {"clip_fraction": mean_of(is_clipped)}


def value_loss(value: Tensor, batch: Batch, ppo: PPOHyperparameters) -> tuple[Tensor, Stats]:
    returns = batch.packed("return").values
    loss, is_clipped = clipped_value_loss(value, batch.packed("value").values, returns, ppo.value_clip)
    stats = {"value_clip_fraction": mean_of(is_clipped), "value_mean": mean_of(value), "return_mean": mean_of(returns)}
    return loss, stats


def cross_entropy(logprob: Tensor, batch: Batch) -> Tensor:
    return -logprob
