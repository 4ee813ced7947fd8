"""Hyperparameters of RLOO."""

from dataclasses import dataclass
from typing import Annotated

from realhf.algorithms.grpo.config import check_groups
from realhf.algorithms.options import COEFFICIENT, ClippedOptions, policy_loss
from realhf.api.script.functions import SEQUENCE_MEAN, Reduction, tensor_function
from realhf.base.options import Common


@dataclass(frozen=True, kw_only=True)
class RLOO(ClippedOptions):
    """The settings that RLOO's calls share, with the options of rollouts.

    The reward of a response is its score less kl_coef * log(policy / reference) of the whole response; its advantage is
    that reward less the mean of the others of its group. A response is one action, and the
    ratio is that of its probability.
    """

    samples_per_prompt: int = 4
    kl_coef: Annotated[
        float, Common("coefficient of the divergence from the reference (0 needs no reference)", range=COEFFICIENT)
    ] = 0.05
    reward_clip: Annotated[float, Common("clip scores to +- this (0: not)", range=COEFFICIENT)] = 0.0
    normalise_advantages: Annotated[
        bool, Common("take the mean of the batch off advantages, and divide by their deviation")
    ] = False

    @property
    def reduction(self) -> Reduction:
        return SEQUENCE_MEAN

    def __post_init__(self) -> None:
        super().__post_init__()
        check_groups(self.samples_per_prompt, "RLOO")


rloo_advantages = tensor_function("realhf.algorithms.rloo.functions:rloo_advantages")

rloo_loss = policy_loss("realhf.algorithms.rloo.functions:rloo_policy")
