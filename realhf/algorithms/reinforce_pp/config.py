"""Hyperparameters of REINFORCE++."""

from dataclasses import dataclass
from typing import Annotated

from realhf.algorithms.choices import Baseline, KLEstimator
from realhf.algorithms.grpo.config import check_groups
from realhf.algorithms.options import COEFFICIENT, ClippedOptions, policy_loss
from realhf.api.script.functions import tensor_function
from realhf.base.options import Common, Option


@dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlus(ClippedOptions):
    """The settings that the calls of REINFORCE++ share, with the options of rollouts.

    Advantages are the rewards to go of each token, normalised over all tokens of the batch; no value model. With the
    `baseline` "none" the divergence from the reference is a part of the tokens' rewards. With "group"
    (REINFORCE++-baseline) it is a part of the loss (k2), and each response's reward is less the mean of its group.
    """

    baseline: Annotated[Baseline, Common("subtracted from each reward: nothing, or the mean reward of its group")] = (
        "none"
    )
    kl_coef: Annotated[
        float, Common("coefficient of the divergence from the reference (0 needs no reference)", range=COEFFICIENT)
    ] = 0.01
    kl_estimator: Annotated[KLEstimator, Option("estimator of the divergence in the rewards")] = "k1"
    gamma: Annotated[float, Option("discount of later rewards", range=(0, 1))] = 1.0
    reward_clip: Annotated[float, Common("clip scores to +- this (0: not)", range=COEFFICIENT)] = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.baseline == "group":
            check_groups(self.samples_per_prompt, "baseline='group'")


reinforce_pp_advantages = tensor_function("realhf.algorithms.reinforce_pp.functions:reinforce_pp_advantages")

reinforce_pp_loss = policy_loss("realhf.algorithms.reinforce_pp.functions:reinforce_pp_policy")
