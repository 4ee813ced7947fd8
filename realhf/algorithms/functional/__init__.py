"""The mathematics of the algorithms: functions of tensors, without side effects and without a model.

Packed tensors hold the response tokens of all samples end to end, `[responses]` in the shape
comments; a response's token j is predicted by the state before it, which is the position of the
token before it in the sequence.
"""

from realhf.algorithms.functional.advantages import (
    discounted_sums,
    gae,
    kl_penalised_rewards,
    rewards_to_go,
    standardised_score,
)
from realhf.algorithms.functional.constraint import (
    constrained_advantage,
    updated_multiplier,
)
from realhf.algorithms.functional.divergence import (
    adapted_kl_coef,
    kl_estimate,
    kl_k1,
    kl_k2,
    kl_k3,
)
from realhf.algorithms.functional.exponentials import log_ratios, ratios, wide
from realhf.algorithms.functional.groups import (
    centred_in_groups,
    first_groups,
    group_advantages,
    group_means,
    is_informative,
    leave_one_out_advantages,
    normalised,
    standard_deviation,
)
from realhf.algorithms.functional.importance import (
    importance_weights,
    is_near_policy,
    response_means,
    response_sums,
)
from realhf.algorithms.functional.moments import (
    Spread,
    mean_and_variance,
    moments,
    sample_spreads,
    spread_of,
    standardised,
    whiten,
)
from realhf.algorithms.functional.policy import (
    cispo_loss,
    clipped_surrogate,
    ppo_policy_loss,
    sapo_loss,
    sequence_log_ratio,
    sequence_log_weight,
    sequence_token_log_ratio,
    vespo_loss,
)
from realhf.algorithms.functional.preferences import (
    dpo_loss,
    margin_loss,
    safe_pairwise_loss,
)
from realhf.algorithms.functional.tokens import (
    at_least_fp32,
    cross_entropy,
    last_positions,
    predicting_positions,
    token_logprobs,
    token_statistics,
)
from realhf.algorithms.functional.values import (
    ValueScale,
    clipped_value_loss,
    value_loss,
)

__all__ = [
    "Spread",
    "ValueScale",
    "adapted_kl_coef",
    "at_least_fp32",
    "centred_in_groups",
    "cispo_loss",
    "clipped_surrogate",
    "clipped_value_loss",
    "constrained_advantage",
    "cross_entropy",
    "discounted_sums",
    "dpo_loss",
    "first_groups",
    "gae",
    "group_advantages",
    "group_means",
    "importance_weights",
    "is_informative",
    "is_near_policy",
    "kl_estimate",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "kl_penalised_rewards",
    "last_positions",
    "leave_one_out_advantages",
    "log_ratios",
    "margin_loss",
    "mean_and_variance",
    "moments",
    "normalised",
    "ppo_policy_loss",
    "predicting_positions",
    "ratios",
    "response_means",
    "response_sums",
    "rewards_to_go",
    "safe_pairwise_loss",
    "sample_spreads",
    "sapo_loss",
    "sequence_log_ratio",
    "sequence_log_weight",
    "sequence_token_log_ratio",
    "spread_of",
    "standard_deviation",
    "standardised",
    "standardised_score",
    "token_logprobs",
    "token_statistics",
    "updated_multiplier",
    "value_loss",
    "vespo_loss",
    "whiten",
    "wide",
]
