"""REINFORCE++ on the workers: advantages normalised over the batch, and the loss."""

import math

from torch import Tensor

from realhf.algorithms import functional as F
from realhf.algorithms.clipped import clipped_policy
from realhf.algorithms.reinforce_pp.config import ReinforcePlusPlus
from realhf.algorithms.samples import (
    at_tokens,
    counted,
    filtered_stats,
    importance_columns,
    in_groups,
    is_whole,
    lengths_of,
    of_ids,
    penalised_rewards,
    rewards_of,
    sums_of,
    valid_column,
    validity,
)
from realhf.algorithms.statistics import mean_of
from realhf.api.script.columns import Columns
from realhf.engine.batch import Batch
from realhf.engine.interface import Context, Stats


def reinforce_pp_advantages(
    rollout: Columns,
    scores: Columns,
    ref: Columns | None,
    options: ReinforcePlusPlus,
    *,
    old: Columns | None = None,
    context: Context,
) -> tuple[dict[str, list[Tensor]], Stats]:
    """Adds the column `advantage` [response] (and `importance`, `valid`, where options ask for them).

        baseline "none":   A_j = sum over k >= j of gamma^(k - j) r_k,  r = -kl_coef * KL, plus the token's score, or
                           that of the response at the end
        baseline "group":  A_j = score - mean(group), of sums over the tokens
        A is then whitened over the tokens of the global batch.

    rollout: `prompt`, `seq`, `logprob`; scores: `reward` [1] or [response] (`valid`); ref: `ref_logprob`, None with
    kl_coef = 0; old: `old_logprob`.

    Returns:
        Columns, and the statistics of `filtered_stats`.

    Source: Hu et al., "REINFORCE++" (2025), equations 7 to 10.
    """
    is_valid = validity(scores)
    given, bound = rewards_of(scores, rollout), options.reward_clip or math.inf
    if options.baseline == "group":
        grouped, is_counted = in_groups(context, scores.ids, sums_of(given).clamp(-bound, bound), is_valid)
        centred = of_ids(F.centred_in_groups(grouped, is_counted), scores.ids)
        raw = at_tokens(centred, lengths_of(rollout.logprob))
    else:
        clipped = [score.clamp(-bound, bound) for score in given]
        rewards = penalised_rewards(clipped, rollout, ref, options.kl_coef, options.kl_estimator)
        raw = F.rewards_to_go(rewards, options.gamma)
    spread = F.spread_of(context.in_order(scores.ids, F.sample_spreads(raw, is_valid)))
    advantages = [F.standardised(x, spread.mean, spread.variance) for x in raw]
    columns = {"advantage": counted(advantages, is_valid, rollout.logprob[0].dtype)}
    columns |= importance_columns(rollout, old, options)
    if options.mask_truncated:
        columns["valid"] = valid_column(is_valid & is_whole(rollout, options), rollout.logprob)
    return columns, filtered_stats(columns, rollout, scores, ref)


def reinforce_pp_policy(logprob: Tensor, batch: Batch, options: ReinforcePlusPlus) -> tuple[Tensor, Stats]:
    """As `realhf.algorithms.clipped.clipped_policy`; with the baseline of groups also kl_coef * k2 of `ref_logprob`.
    Statistics also: `ref_kl` (k2) with that baseline."""
    logprob = F.wide(logprob)
    loss, stats = clipped_policy(logprob, batch, options)
    if options.baseline == "group" and options.kl_coef:
        kl = F.kl_k2(logprob, batch.packed("ref_logprob").values)
        loss = loss + options.kl_coef * kl
        stats["ref_kl"] = mean_of(kl)
    return loss, stats
