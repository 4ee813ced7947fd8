"""GRPO on the workers: advantages within groups, the filter of groups, and the losses."""

import torch
from torch import Tensor

from realhf.algorithms import functional as F
from realhf.algorithms.grpo.config import GRPO
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
from realhf.algorithms.statistics import mean_of
from realhf.api.script.columns import Columns
from realhf.engine.batch import Batch
from realhf.engine.interface import Context, Stats

OWED = "groups_owed"


def group_advantages(
    rollout: Columns,
    scores: Columns,
    ref: Columns | None,
    grpo: GRPO,
    *,
    old: Columns | None = None,
    context: Context,
) -> tuple[dict[str, list[Tensor]], Stats]:
    """Adds the column `advantage` [response], the same number at each token of a response; see
    `realhf.algorithms.functional.group_advantages` (and `importance`, `valid`, where options ask for them).

    rollout: `prompt`, `seq`, `logprob`; scores: `reward` [1], or [response], whose sum counts (`valid`); ref:
    `ref_logprob`, None with beta = 0; old: `old_logprob`, the policy's own log-probabilities before training.

    Returns:
        Columns; statistics: those of `filtered_stats`, and `informative_groups`, the share of the groups whose rewards
        differ.
    """
    is_valid = validity(scores)
    rewards, is_counted = in_groups(context, scores.ids, sums_of(rewards_of(scores, rollout)), is_valid)
    advantages = of_ids(F.group_advantages(rewards, is_counted, grpo.scale_rewards), scores.ids)
    columns = {"advantage": at_tokens(advantages.to(rollout.logprob[0].dtype), lengths_of(rollout.logprob))}
    columns |= importance_columns(rollout, old, grpo)
    is_trained = is_valid
    if grpo.drop_uniform_groups:
        chosen = _chosen(F.is_informative(rewards, is_counted), grpo, context)
        is_trained = is_trained & of_ids(chosen[:, None].expand_as(rewards), scores.ids).cpu()
    if grpo.mask_truncated:
        is_trained = is_trained & is_whole(rollout, grpo)
    if (is_trained != is_valid).any():
        columns["valid"] = valid_column(is_trained, rollout.logprob)
    return columns, filtered_stats(columns, rollout, scores, ref) | informative_share(rewards, is_counted)


def grpo_policy(logprob: Tensor, batch: Batch, grpo: GRPO) -> tuple[Tensor, Stats]:
    """The loss of each response token [responses], from the columns `advantage`, `logprob` or `old_logprob`, with beta
    `ref_logprob`, and `importance` where there is one; `realhf.algorithms.functional.policy` has the formulas.

    Statistics: `clip_fraction`, and with beta `ref_kl` (k3, of the policy as it is now).
    """
    logprob, advantage, old = F.wide(logprob), batch.packed("advantage").values, drawn_by(batch)
    log_ratio = _log_ratio(logprob, old, batch, grpo)
    importance = batch.packed("importance").values if "importance" in batch.data else None
    loss, is_clipped = _surrogate(log_ratio, logprob, batch, grpo, importance)
    if grpo.off_policy_threshold:
        lengths, drawn = lengths_of(batch.data["logprob"]), batch.packed("logprob").values
        loss = loss * F.is_near_policy(advantage, logprob, drawn, lengths, grpo.off_policy_threshold)
    if importance is not None and grpo.loss_type != "vespo":
        loss = loss * importance
    stats = {"clip_fraction": mean_of(is_clipped)}
    if grpo.beta:
        kl = F.kl_k3(logprob, batch.packed("ref_logprob").values)
        loss = loss + grpo.beta * (kl * F.ratios(log_ratio) if grpo.unbiased_kl else kl)
        stats["ref_kl"] = mean_of(kl)
    return loss, stats


def _log_ratio(logprob: Tensor, old: Tensor, batch: Batch, grpo: GRPO) -> Tensor:
    """[responses], of the level that the options name."""
    log_ratio, lengths = F.log_ratios(logprob, old), lengths_of(batch.data["logprob"])
    match grpo.ratio:
        case "token":
            return log_ratio
        case "sequence":
            return F.sequence_log_ratio(log_ratio, lengths)
        case "sequence_token":
            return F.sequence_token_log_ratio(log_ratio, logprob, lengths)


def _surrogate(
    log_ratio: Tensor, logprob: Tensor, batch: Batch, grpo: GRPO, importance: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(loss, is_clipped) [responses]."""
    advantage = batch.packed("advantage").values
    never = torch.zeros_like(advantage)
    match grpo.loss_type:
        case "cispo":
            return F.cispo_loss(log_ratio, logprob, advantage, grpo.ratio_cap)
        case "sapo":
            return F.sapo_loss(log_ratio, advantage, grpo.sapo_temperature_up, grpo.sapo_temperature_down), never
        case "vespo":
            weight = F.sequence_log_weight(
                F.log_ratios(logprob.detach(), drawn_by(batch)),
                None if importance is None else importance.log(),
                lengths_of(batch.data["logprob"]),
            )
            up, down = (grpo.vespo_k_up, grpo.vespo_lambda_up), (grpo.vespo_k_down, grpo.vespo_lambda_down)
            return F.vespo_loss(weight, logprob, advantage, up, down), never
        case _:
            return F.clipped_surrogate(log_ratio, advantage, grpo.clip_low, grpo.clip_high, grpo.delta)


def _chosen(informative: Tensor, grpo: GRPO, context: Context) -> Tensor:
    """[groups] bool: the groups to train on. What a step lacks, at most its own share, it owes the next."""
    if not grpo.groups_per_step:
        return informative
    wanted = grpo.groups_per_step + int(context.state.get(OWED, 0.0))
    chosen = F.first_groups(informative, wanted)
    context.state[OWED] = float(min(wanted - int(chosen.sum()), grpo.groups_per_step))
    return chosen
