"""Hyperparameters of REINFORCE++."""

from dataclasses import dataclass

from realhf.algorithms.choices import Baseline, KLEstimator, check_choice
from realhf.algorithms.grpo.config import check_groups
from realhf.algorithms.options import ClippedOptions, coefficients
from realhf.api.script.functions import BoundLoss, loss_function, tensor_function
from realhf.base.numbers import Range, check_ranges

_RANGES = {"gamma": Range("gamma", 0, 1), **coefficients("kl_coef", "reward_clip")}


@dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlus(ClippedOptions):
    """The settings that the calls of REINFORCE++ share, with the options of rollouts.

    Advantages are the rewards to go of each token, normalised over all tokens of the batch; no value model.
    """

    baseline: Baseline = "none"
    """"none": the divergence from the reference is a part of the tokens' rewards. "group" (REINFORCE++-baseline): the
    mean reward of its group is taken from each response's reward, and the divergence is a part of the loss (k2)."""
    kl_coef: float = 0.01
    """0 needs no reference."""
    kl_estimator: KLEstimator = "k1"
    """Of the divergence in the rewards."""
    gamma: float = 1.0
    reward_clip: float = 10.0
    """Scores are clipped to +-reward_clip; 0: not."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(vars(self), _RANGES)
        check_choice("baseline", self.baseline, Baseline)
        check_choice("kl_estimator", self.kl_estimator, KLEstimator)
        if self.baseline == "group":
            check_groups(self.samples_per_prompt, "baseline='group'")


reinforce_pp_advantages = tensor_function("realhf.algorithms.reinforce_pp.functions:reinforce_pp_advantages")

_policy = loss_function("realhf.algorithms.reinforce_pp.functions:reinforce_pp_policy")
_policy_with_entropy = loss_function("realhf.algorithms.reinforce_pp.functions:reinforce_pp_policy_with_entropy")


def reinforce_pp_loss(options: ReinforcePlusPlus) -> BoundLoss:
    """The clipped surrogate, with the entropy where it has a coefficient."""
    return (_policy_with_entropy if options.entropy_coef else _policy)(options)
