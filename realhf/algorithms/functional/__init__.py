"""The mathematics of the algorithms: functions of tensors, without side effects and without a model.

Packed tensors hold the response tokens of all samples end to end, `[responses]` in the shape
comments; a response's token j is predicted by the state before it, which is the position of the
token before it in the sequence.
"""

from realhf.algorithms.functional.advantages import discounted_sums as discounted_sums
from realhf.algorithms.functional.advantages import gae as gae
from realhf.algorithms.functional.advantages import kl_penalised_rewards as kl_penalised_rewards
from realhf.algorithms.functional.advantages import rewards_to_go as rewards_to_go
from realhf.algorithms.functional.advantages import standardised_score as standardised_score
from realhf.algorithms.functional.constraint import constrained_advantage as constrained_advantage
from realhf.algorithms.functional.constraint import updated_multiplier as updated_multiplier
from realhf.algorithms.functional.divergence import adapted_kl_coef as adapted_kl_coef
from realhf.algorithms.functional.divergence import kl_estimate as kl_estimate
from realhf.algorithms.functional.divergence import kl_k1 as kl_k1
from realhf.algorithms.functional.divergence import kl_k2 as kl_k2
from realhf.algorithms.functional.divergence import kl_k3 as kl_k3
from realhf.algorithms.functional.exponentials import log_ratios as log_ratios
from realhf.algorithms.functional.exponentials import ratios as ratios
from realhf.algorithms.functional.exponentials import wide as wide
from realhf.algorithms.functional.groups import centred_in_groups as centred_in_groups
from realhf.algorithms.functional.groups import first_groups as first_groups
from realhf.algorithms.functional.groups import group_advantages as group_advantages
from realhf.algorithms.functional.groups import is_informative as is_informative
from realhf.algorithms.functional.groups import leave_one_out_advantages as leave_one_out_advantages
from realhf.algorithms.functional.groups import normalised as normalised
from realhf.algorithms.functional.importance import importance_weights as importance_weights
from realhf.algorithms.functional.importance import is_near_policy as is_near_policy
from realhf.algorithms.functional.importance import response_means as response_means
from realhf.algorithms.functional.importance import response_sums as response_sums
from realhf.algorithms.functional.moments import Spread as Spread
from realhf.algorithms.functional.moments import moments as moments
from realhf.algorithms.functional.moments import sample_spreads as sample_spreads
from realhf.algorithms.functional.moments import spread_of as spread_of
from realhf.algorithms.functional.moments import standardised as standardised
from realhf.algorithms.functional.policy import cispo_loss as cispo_loss
from realhf.algorithms.functional.policy import clipped_surrogate as clipped_surrogate
from realhf.algorithms.functional.policy import ppo_policy_loss as ppo_policy_loss
from realhf.algorithms.functional.policy import sapo_loss as sapo_loss
from realhf.algorithms.functional.policy import sequence_log_ratio as sequence_log_ratio
from realhf.algorithms.functional.policy import sequence_log_weight as sequence_log_weight
from realhf.algorithms.functional.policy import sequence_token_log_ratio as sequence_token_log_ratio
from realhf.algorithms.functional.policy import vespo_loss as vespo_loss
from realhf.algorithms.functional.preferences import dpo_loss as dpo_loss
from realhf.algorithms.functional.preferences import margin_loss as margin_loss
from realhf.algorithms.functional.preferences import safe_pairwise_loss as safe_pairwise_loss
from realhf.algorithms.functional.tokens import at_least_fp32 as at_least_fp32
from realhf.algorithms.functional.tokens import last_positions as last_positions
from realhf.algorithms.functional.tokens import predicting_positions as predicting_positions
from realhf.algorithms.functional.tokens import token_logprobs as token_logprobs
from realhf.algorithms.functional.tokens import token_statistics as token_statistics
from realhf.algorithms.functional.values import ValueScale as ValueScale
from realhf.algorithms.functional.values import clipped_value_loss as clipped_value_loss
from realhf.algorithms.functional.values import value_loss as value_loss
