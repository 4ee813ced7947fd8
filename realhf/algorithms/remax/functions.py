"""ReMax on the workers: rewards to go against the reward of the greedy response."""

from torch import Tensor

from realhf.algorithms import functional as F
from realhf.algorithms.remax.config import ReMax
from realhf.algorithms.samples import (
    counted,
    filtered_stats,
    importance_columns,
    is_whole,
    penalised_rewards,
    rewards_of,
    sums_of,
    valid_column,
    validity,
)
from realhf.algorithms.statistics import mean_of
from realhf.api.script.columns import Columns
from realhf.engine.interface import Stats


def remax_advantages(
    rollout: Columns,
    scores: Columns,
    greedy_scores: Columns,
    ref: Columns | None,
    options: ReMax,
    *,
    old: Columns | None = None,
) -> tuple[dict[str, list[Tensor]], Stats]:
    """Adds the columns `advantage` [response] (and `importance`, `valid`, where options ask for them).

        A_j = sum over k >= j of r_k - score(greedy),  r = -kl_coef * KL, plus the token's score, or that of
                                                the response at the last token

    rollout: `prompt`, `seq`, `logprob`; scores, greedy_scores: `reward` [1] or [response] (`valid`) of the sample and
    of the greedy response to the same prompt, score(greedy) the sum over the latter's tokens; ref: `ref_logprob`, None
    with kl_coef = 0; old: `old_logprob`. A sample counts if both rewards do.

    Returns:
        Columns; statistics: those of `filtered_stats`, and `greedy_reward_mean`.

    Source: Li et al., "ReMax" (2024), algorithm 1 and equation 8.
    """
    is_valid = validity(scores) & validity(greedy_scores)
    rewards = penalised_rewards(rewards_of(scores, rollout), rollout, ref, options.kl_coef, options.kl_estimator)
    greedy_rewards = sums_of(rewards_of(greedy_scores, None, "reward of the greedy response"))
    advantages = [sums - greedy for sums, greedy in zip(F.rewards_to_go(rewards), greedy_rewards, strict=True)]
    columns = {
        "reward": scores.reward,  # not the greedy one's, which comes after it among the arguments
        "advantage": counted(advantages, is_valid, rollout.logprob[0].dtype),
    }
    columns |= importance_columns(rollout, old, options)
    if options.mask_truncated:
        is_valid = is_valid & is_whole(rollout, options)
    if not is_valid.all():
        columns["valid"] = valid_column(is_valid, rollout.logprob)
    greedy = greedy_rewards[validity(greedy_scores).to(greedy_rewards.device)]
    stats = {"greedy_reward_mean": mean_of(greedy)} if len(greedy) else {}
    return columns, filtered_stats(columns, rollout, scores, ref) | stats
