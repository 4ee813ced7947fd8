"""PPO on the workers: advantages by GAE from penalised rewards, and the losses of actor and critic."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from realhf.algorithms import functional as F
from realhf.algorithms.ppo.config import PPOHyperparameters
from realhf.algorithms.samples import (
    counted,
    drawn_by,
    filtered_stats,
    importance_columns,
    in_groups,
    is_whole,
    penalised_rewards,
    rewards_of,
    valid_column,
    validity,
)
from realhf.algorithms.statistics import mean_of
from realhf.api.script.columns import Columns
from realhf.engine.batch import Batch
from realhf.engine.interface import Context, Stats


@dataclass(frozen=True)
class Estimates:
    """Of this rank's samples.

    advantages, returns: per sample [response]; 0 where a sample does not count. Returns are normalised with
        `normalise_values`.
    explained_variance: 1 - var(returns - values) / var(returns) over the global batch.
    """

    advantages: list[Tensor]
    returns: list[Tensor]
    explained_variance: float


def ppo_advantages(
    rollout: Columns,
    scores: Columns,
    ref: Columns,
    values: Columns,
    ppo: PPOHyperparameters,
    *,
    old: Columns | None = None,
    context: Context,
) -> tuple[dict[str, list[Tensor]], Stats]:
    """Adds the columns `advantage` and `return` [response] (and `importance`, `valid`, where options ask for them).

        r = -kl_coef * KL at every token, plus its standardised score, or that of the response at the last one
        A, R = GAE(r, V); A is whitened over the tokens of the global batch

    rollout: `prompt`, `seq`, `logprob`; scores: `reward` [1] or [response] (`valid`); ref: `ref_logprob`; values:
    `value`; old: `old_logprob`, the policy's own log-probabilities before training.

    Returns:
        Columns; statistics: those of `filtered_stats`, `explained_variance`, with an adaptive controller `kl_coef`.
    """
    is_valid = validity(scores)
    kl_coef, stats = step_kl_coef(rollout, ref, is_valid, ppo, context)
    rewards = standardised_rewards(rewards_of(scores, rollout), ppo)
    rewards = penalised_rewards(rewards, rollout, ref, kl_coef, ppo.kl_estimator)
    estimates = ppo_estimates(rewards, values, is_valid, ppo, context)
    columns = {"advantage": estimates.advantages, "return": estimates.returns}
    columns |= importance_columns(rollout, old, ppo)
    if ppo.mask_truncated:
        columns["valid"] = valid_column(is_valid & is_whole(rollout, ppo), rollout.logprob)
    stats["explained_variance"] = (estimates.explained_variance, 1.0)
    return columns, filtered_stats(columns, rollout, scores, ref) | stats


def standardised_rewards(rewards: Sequence[Tensor], ppo: PPOHyperparameters) -> list[Tensor]:
    """Per sample the scaled and clipped rewards, [1] or [response]."""
    return [F.standardised_score(reward, ppo.reward_mean, ppo.reward_std, ppo.reward_clip) for reward in rewards]


def step_kl_coef(
    rollout: Columns, ref: Columns, is_valid: Tensor, ppo: PPOHyperparameters, context: Context
) -> tuple[float, Stats]:
    """The coefficient of this step; an adaptive controller leaves that of the next one in `context.state`."""
    if ppo.kl_controller == "fixed":
        return ppo.kl_coef, {}
    kl_coef = context.state.get("kl_coef", ppo.kl_coef)
    of_samples = torch.stack(
        [F.log_ratios(p, q).sum() for p, q in zip(rollout.logprob, ref.ref_logprob, strict=True)]
    )  # [batch]
    kl, is_counted = in_groups(context, rollout.ids, of_samples, is_valid)
    count = int(is_counted.sum())
    if count:
        mean = float(kl.sum()) / count
        context.state["kl_coef"] = F.adapted_kl_coef(kl_coef, mean, ppo.kl_target, count, ppo.kl_horizon)
    return kl_coef, {"kl_coef": (kl_coef, 1.0)}


def ppo_estimates(
    rewards: list[Tensor],
    values: Columns,
    is_valid: Tensor,
    ppo: PPOHyperparameters,
    context: Context,
) -> Estimates:
    """Estimates advantages once for the whole call, before any of its mini-batches changes the model.

    Whitening uses mean and variance of the global batch, taken over its samples in the order of their ids, so the
    result does not depend on how they lie on the data-parallel ranks. Every rank of the call takes part in the
    reduction.

    Args:
        rewards: per sample [response] float64; values: with the column `value` [response]; is_valid: [batch] bool, the
            samples that count.
    """
    scale = _value_scale(context) if ppo.normalise_values else None
    wide = [value.double() for value in values.value]
    if scale is not None:
        wide = [scale.restore(x) for x in wide]
    advantages, returns = F.gae(rewards, wide, ppo.gamma, ppo.lam)
    spreads = [F.sample_spreads(columns, is_valid) for columns in (advantages, returns)]
    ordered = context.in_order(values.ids, torch.cat(spreads, 1))  # [samples of the step, 6]
    of_advantages, of_returns = F.spread_of(ordered[:, :3]), F.spread_of(ordered[:, 3:])
    if ppo.whiten_advantages and of_advantages.count:
        advantages = [F.standardised(x, of_advantages.mean, of_advantages.variance) for x in advantages]
    if scale is not None and of_returns.count:
        scale = scale.updated(of_returns.mean, of_returns.variance + of_returns.mean**2, ppo.value_decay)
        _keep(scale, context)
        returns = [scale.normalise(x) for x in returns]
    # advantage = return - value, so its variance is the part that the values do not explain.
    explained = 1 - of_advantages.variance / of_returns.variance if of_returns.variance else 0.0
    dtype = values.value[0].dtype
    return Estimates(counted(advantages, is_valid, dtype), counted(returns, is_valid, dtype), explained)


def ppo_policy(logprob: Tensor, batch: Batch, ppo: PPOHyperparameters) -> tuple[Tensor, Stats]:
    """The clipped surrogate of each response token, [responses], from columns `advantage` and `logprob` or
    `old_logprob`; see `realhf.algorithms.functional.ppo_policy_loss`.

    Statistics: `clip_fraction`.
    """
    old = drawn_by(batch)
    advantage = batch.packed("advantage").values
    loss, is_clipped = F.ppo_policy_loss(logprob, old, advantage, ppo.policy_clip, ppo.dual_clip)
    if "importance" in batch.data:
        loss = loss * batch.packed("importance").values
    return loss, {"clip_fraction": mean_of(is_clipped)}


def ppo_value(value: Tensor, batch: Batch, ppo: PPOHyperparameters) -> tuple[Tensor, Stats]:
    """Half the squared error of each response token's value [responses], clipped around the rollout's (`value_clip`).

    Statistics: `value_clip_fraction`, `value_mean`, `return_mean` (with `normalise_values` in the critic's units).
    """
    returns = batch.packed("return").values
    if ppo.value_clip:
        loss, is_clipped = F.clipped_value_loss(value, batch.packed("value").values, returns, ppo.value_clip)
    else:
        loss, is_clipped = F.value_loss(value, returns), torch.zeros_like(returns)
    return loss, {
        "value_clip_fraction": mean_of(is_clipped),
        "value_mean": mean_of(value),
        "return_mean": mean_of(returns),
    }


def _value_scale(context: Context) -> F.ValueScale:
    names = (field.name for field in dataclasses.fields(F.ValueScale))
    return F.ValueScale(**{name: context.state.get(f"value_{name}", 0.0) for name in names})


def _keep(scale: F.ValueScale, context: Context) -> None:
    context.state.update({f"value_{name}": number for name, number in dataclasses.asdict(scale).items()})
