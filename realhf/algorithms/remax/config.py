"""Hyperparameters of ReMax."""

from dataclasses import dataclass, fields
from typing import Annotated

from realhf.algorithms.choices import KLEstimator
from realhf.algorithms.options import COEFFICIENT, ClippedOptions, policy_loss
from realhf.api.generation import GenerationOptions
from realhf.api.script.functions import tensor_function
from realhf.base.options import Common, Option


@dataclass(frozen=True, kw_only=True)
class ReMax(ClippedOptions):
    """The settings that ReMax's calls share, with the options of rollouts.

    A response's advantage is its reward less that of the greedy response to the same prompt, a second generation.
    """

    kl_coef: Annotated[
        float, Common("coefficient of the divergence from the reference (0 needs no reference)", range=COEFFICIENT)
    ] = 0.05
    kl_estimator: Annotated[KLEstimator, Option("estimator of the divergence")] = "k1"

    @property
    def greedy(self) -> GenerationOptions:
        """How the baseline's responses are made: as the others, with the most likely token each time."""
        options = {field.name: getattr(self, field.name) for field in fields(GenerationOptions)}
        return GenerationOptions(**options | {"temperature": 0.0})


remax_advantages = tensor_function("realhf.algorithms.remax.functions:remax_advantages")

remax_loss = policy_loss("realhf.algorithms.clipped:clipped_policy")
