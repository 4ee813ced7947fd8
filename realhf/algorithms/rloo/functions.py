"""RLOO on the workers: the leave-one-out baseline, and the loss of whole responses."""

import torch
from torch import Tensor

from realhf.algorithms import functional as F
from realhf.algorithms.clipped import clipped_loss
from realhf.algorithms.rloo.config import RLOO
from realhf.algorithms.samples import (
    at_tokens,
    drawn_by,
    filtered_stats,
    importance_columns,
    in_groups,
    informative_share,
    is_whole,
    lengths_of,
    of_ids,
    rewards_of,
    sums_of,
    valid_column,
    validity,
)
from realhf.api.script.columns import Columns
from realhf.engine.batch import Batch
from realhf.engine.interface import Context, Stats


def rloo_advantages(
    rollout: Columns,
    scores: Columns,
    ref: Columns | None,
    rloo: RLOO,
    *,
    old: Columns | None = None,
    context: Context,
) -> tuple[dict[str, list[Tensor]], Stats]:
    """Adds the column `advantage` [response], the same number at each token (`leave_one_out_advantages`); and
    `importance`, `valid`, where options ask for them.

    rollout: `prompt`, `seq`, `logprob`; scores: `reward` [1], or [response], whose sum counts (`valid`); ref:
    `ref_logprob`, None with kl_coef = 0; old: `old_logprob`, the policy's own log-probabilities before training.

    Returns:
        Columns; statistics: those of `filtered_stats`, and of `informative_share`.
    """
    is_valid = validity(scores)
    score = sums_of(rewards_of(scores, rollout))
    if rloo.reward_clip:
        score = score.clamp(-rloo.reward_clip, rloo.reward_clip)
    share = informative_share(*in_groups(context, scores.ids, score, is_valid))
    if ref is not None:
        drawn = rollout.logprob if old is None else old.old_logprob
        kl = torch.stack([F.log_ratios(p, q).sum() for p, q in zip(drawn, ref.ref_logprob, strict=True)])  # [batch]
        score = score - rloo.kl_coef * kl
    rewards, is_counted = in_groups(context, scores.ids, score, is_valid)
    advantages = F.leave_one_out_advantages(rewards, is_counted)
    if rloo.normalise_advantages:
        has_others = is_counted & (is_counted.sum(1, keepdim=True) > 1)
        advantages = F.normalised(advantages, has_others)
    advantage = of_ids(advantages, scores.ids).to(rollout.logprob[0].dtype)
    columns = {"advantage": at_tokens(advantage, lengths_of(rollout.logprob))}
    columns |= importance_columns(rollout, old, rloo)
    if rloo.mask_truncated:
        columns["valid"] = valid_column(is_valid & is_whole(rollout, rloo), rollout.logprob)
    return columns, filtered_stats(columns, rollout, scores, ref) | share


def rloo_policy(logprob: Tensor, batch: Batch, rloo: RLOO) -> tuple[Tensor, Stats]:
    """The clipped surrogate of each response, at each of its tokens: [responses], whose mean over a response it is.

        ratio = exp(sum over the response of (logprob - old_logprob))
        L     = -min(ratio * A, clamp(ratio, 1 - clip_low, 1 + clip_high) * A)

    Statistics: `clip_fraction`.
    """
    lengths = lengths_of(batch.data["logprob"])
    return clipped_loss(F.response_sums(F.log_ratios(logprob, drawn_by(batch)), lengths), batch, rloo)
