"""From scores, values and log-probabilities of a batch of rollouts to advantages and returns."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from realhf.algorithms.functional import (
    gae,
    kl_penalised_rewards,
    mean_and_variance,
    moments,
    standardised_score,
    whiten,
)
from realhf.algorithms.ppo.config import PPOHyperparameters
from realhf.engine.batch import Batch
from realhf.engine.interface import Context


@dataclass(frozen=True)
class Advantages:
    """The mini-batches with the columns `advantage` and `return` [response] added.

    `explained_variance` is 1 - var(returns - values) / var(returns) over the global batch.
    """

    mini_batches: list[Batch]
    explained_variance: float


def add_advantages(mini_batches: Sequence[Batch], ppo: PPOHyperparameters, context: Context) -> Advantages:
    """Estimates advantages once for the whole call, before any of its mini-batches changes the model.

    Whitening uses the moments of the global batch, so the result does not depend on how its
    samples lie on the data-parallel ranks. Every rank of the call takes part in the reduction.
    """
    columns = [_advantages_and_returns(batch, ppo) for batch in mini_batches]
    advantages = torch.cat([a for advantage, _ in columns for a in advantage])
    returns = torch.cat([r for _, returns in columns for r in returns])
    # advantage = return - value, so its variance is the part that the values do not explain.
    sums = context.sum_over_data_parallel(torch.cat([moments(advantages), moments(returns)]))
    of_advantages, of_returns = sums[:3], sums[3:]
    unexplained, total = mean_and_variance(of_advantages)[1], mean_and_variance(of_returns)[1]
    if ppo.whiten_advantages:
        advantages = whiten(advantages, of_advantages)
    each = iter(advantages.split([len(a) for advantage, _ in columns for a in advantage]))
    with_columns = [
        batch.with_data(**{"advantage": list(islice(each, len(batch))), "return": return_})
        for batch, (_, return_) in zip(mini_batches, columns, strict=True)
    ]
    return Advantages(with_columns, 1 - unexplained / total if total else 0.0)


def _advantages_and_returns(batch: Batch, ppo: PPOHyperparameters) -> tuple[list[Tensor], list[Tensor]]:
    """Per sample [response] each."""
    data = batch.data
    rewards = [
        kl_penalised_rewards(
            standardised_score(score, ppo.reward_mean, ppo.reward_std, ppo.reward_clip),
            logprob,
            ref_logprob,
            ppo.kl_coef,
        )
        for score, logprob, ref_logprob in zip(data["reward"], data["logprob"], data["ref_logprob"], strict=True)
    ]
    return gae(rewards, data["value"], ppo.gamma, ppo.lam)
