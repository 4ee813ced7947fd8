"""Safe-RLHF on the workers: advantages of reward and cost under a Lagrange multiplier, and the cost critic's loss."""

import math

from torch import Tensor

from realhf.algorithms import functional as F
from realhf.algorithms.ppo.functions import ppo_estimates, ppo_value, standardised_rewards, step_kl_coef
from realhf.algorithms.safe_rlhf.config import SafeRLHF
from realhf.algorithms.samples import (
    filtered_stats,
    importance_columns,
    in_groups,
    is_whole,
    penalised_rewards,
    rewards_of,
    sums_of,
    valid_column,
    validity,
)
from realhf.algorithms.statistics import mean_of, prefixed
from realhf.api.script.columns import Columns
from realhf.engine.batch import Batch
from realhf.engine.interface import Context, Stats

LOG_MULTIPLIER = "log_multiplier"


def judged(scores: Columns, values: Columns) -> dict[str, list[Tensor]]:
    """The columns `reward` [1] or [response] and `value` [response] (and `valid`) of one judge and its critic."""
    columns = {"reward": scores.reward, "value": values.value}
    valid = scores.get("valid")
    return columns if valid is None else columns | {"valid": valid}


def safe_advantages(
    rollout: Columns,
    ref: Columns,
    reward: Columns,
    cost: Columns,
    safe: SafeRLHF,
    *,
    old: Columns | None = None,
    context: Context,
) -> tuple[dict[str, list[Tensor]], Stats]:
    """Adds the columns `advantage`, `return`, `cost_return` [response] (and `importance`, `valid`).

        reward of a token: -kl_coef * KL, plus its standardised reward, or that of the response at the last token
        cost of a token:   +kl_coef * KL, plus its cost / cost_std, or that of the response at the last token
        A = (A_reward - lambda * A_cost) / (1 + lambda), each by GAE with its own critic, and whitened

    The multiplier lambda of the next step is left in `context.state` (`updated_multiplier`, by the mean cost of this
    step in the cost model's units).

    rollout: `prompt`, `seq`, `logprob`; ref: `ref_logprob`; reward, cost: what `judged` gives of the reward model and
    its critic, and of the cost model and its critic; old: `old_logprob`.

    Returns:
        Columns, with `reward`, `value`, `cost`, `cost_value` as they were given; statistics: those of `filtered_stats`,
        `cost_mean`, `multiplier`, `unsafe` (the share of responses that cost more than 0), and of both critics the
        explained variance.

    Source: Dai et al., "Safe RLHF" (2024), section 3.3 and appendix B.2.
    """
    is_valid = validity(reward) & validity(cost)
    kl_coef, stats = step_kl_coef(rollout, ref, is_valid, safe, context)
    rewards = standardised_rewards(rewards_of(reward, rollout), safe)
    given = rewards_of(cost, rollout, "cost")
    costs = [F.standardised_score(one, 0.0, safe.cost_std, safe.reward_clip) for one in given]
    rewards_of_tokens = penalised_rewards(rewards, rollout, ref, kl_coef, safe.kl_estimator)
    # The cost is taken away, so its penalty has the other sign.
    costs_of_tokens = penalised_rewards(costs, rollout, ref, -kl_coef, safe.kl_estimator)
    of_reward = ppo_estimates(rewards_of_tokens, reward, is_valid, safe, context)
    of_cost = ppo_estimates(costs_of_tokens, cost, is_valid, safe, context)
    multiplier, of_costs = _multiplier(rollout, sums_of(given), is_valid, safe, context)
    columns = {
        "advantage": [
            F.constrained_advantage(a, c, multiplier)
            for a, c in zip(of_reward.advantages, of_cost.advantages, strict=True)
        ],
        "return": of_reward.returns,
        "cost_return": of_cost.returns,
        "reward": reward.reward,
        "value": reward.value,
        "cost": cost.reward,
        "cost_value": cost.value,
        **importance_columns(rollout, old, safe),
    }
    if safe.mask_truncated:
        is_valid = is_valid & is_whole(rollout, safe)
    if not is_valid.all():
        columns["valid"] = valid_column(is_valid, rollout.logprob)
    stats["explained_variance"] = (of_reward.explained_variance, 1.0)
    stats["cost_explained_variance"] = (of_cost.explained_variance, 1.0)
    return columns, filtered_stats(columns, rollout, reward, ref) | of_costs | stats


def _multiplier(
    rollout: Columns, costs: Tensor, is_valid: Tensor, safe: SafeRLHF, context: Context
) -> tuple[float, Stats]:
    """The multiplier of this step, from `costs` [batch]; that of the next one is left in `context.state`."""
    log_multiplier = context.state.get(LOG_MULTIPLIER, math.log(safe.multiplier))
    grouped, is_counted = in_groups(context, rollout.ids, costs, is_valid)
    if is_counted.any():
        mean_cost = float(grouped.sum()) / int(is_counted.sum())
        context.state[LOG_MULTIPLIER] = F.updated_multiplier(
            log_multiplier, mean_cost, safe.cost_limit, safe.multiplier_lr, safe.max_multiplier
        )
    multiplier, counted = math.exp(log_multiplier), costs[is_valid.to(costs.device)]
    stats = {"cost_mean": mean_of(counted), "unsafe": mean_of(counted > 0), "multiplier": (multiplier, 1.0)}
    return multiplier, stats


def safe_cost_value(value: Tensor, batch: Batch, safe: SafeRLHF) -> tuple[Tensor, Stats]:
    """`ppo_value` of the cost critic: the columns `cost_return` and `cost_value`, the statistics with `cost_`."""
    of_cost = batch.with_data(**{"return": batch.data["cost_return"], "value": batch.data["cost_value"]})
    loss, stats = ppo_value(value, of_cost, safe)
    return loss, prefixed("cost", stats)
