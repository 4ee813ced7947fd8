"""Settings that several algorithms share. Without torch: experiments import it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from realhf.algorithms.choices import ImportanceCorrection
from realhf.api.generation import GenerationOptions
from realhf.api.script.functions import TOKEN_MEAN, BoundLoss, Reduction, loss_function
from realhf.base.errors import UserError
from realhf.base.options import ALGORITHM, Common, Option

COEFFICIENT = (0.0, 1e6)


@dataclass(frozen=True, kw_only=True)
class PolicyOptions(GenerationOptions):
    """The options of rollouts, and what all algorithms that learn from them have in common.

    `importance_correction` is for rollouts that another distribution drew than the one that training begins with: an
    engine with other numerics, or older weights. It needs the column `old_logprob`. Weights are those of tokens or of
    whole responses; "truncate" clips them to the bounds, "mask" leaves out what lies outside of them. Entropies are
    computed only if `entropy_coef` is not 0. Statistics of groups count the rewards of truncated responses too.
    """

    max_new_tokens: int = 256
    HEADING = ALGORITHM

    epochs: Annotated[int, Common("passes of an update through the mini-batches of a step", range=(1, 1024))] = 1
    entropy_coef: Annotated[
        float, Option("coefficient of the mean entropy of the tokens' distributions", range=(-1e3, 1e3))
    ] = 0.0
    importance_correction: Annotated[
        ImportanceCorrection, Option("weights for rollouts that older weights or another engine drew")
    ] = "none"
    importance_low: Annotated[float, Option("lower bound of the weights of importance_correction", range=(0, 1))] = 0.0
    importance_high: Annotated[float, Option("upper bound of the weights of importance_correction", range=(1, 1e6))] = (
        2.0
    )
    mask_truncated: Annotated[bool, Option("leave out responses that were cut off at max_new_tokens")] = False

    @property
    def reduction(self) -> Reduction:
        """How the losses of tokens become that of a mini-batch."""
        return TOKEN_MEAN

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature == 0:
            name = type(self).__name__
            raise UserError(f"temperature=0 draws no samples to learn from; {name} needs a temperature above 0")


@dataclass(frozen=True, kw_only=True)
class ClippedOptions(PolicyOptions):
    """Those of algorithms whose loss is the clipped surrogate with a range of its own on either side: the ratio to the
    policy that training begins with stays from 1 - clip_low to 1 + clip_high."""

    clip_low: Annotated[
        float, Common("the ratio to the policy that drew a token stays above 1 minus this", range=(1e-6, 1))
    ] = 0.2
    clip_high: Annotated[
        float, Common("the ratio to the policy that drew a token stays below 1 plus this", range=(1e-6, 1e6))
    ] = 0.2


def policy_loss(function: str) -> Callable[[PolicyOptions], BoundLoss]:
    """Binds options to the loss `function` (MODULE:NAME) of a policy, and to the entropy where that has a coefficient:
    entropies take a pass over the logits."""
    plain, with_entropy = loss_function(function), loss_function("realhf.algorithms.clipped:less_entropy")

    def bind(options: PolicyOptions) -> BoundLoss:
        return with_entropy(options, function) if options.entropy_coef else plain(options)

    return bind
