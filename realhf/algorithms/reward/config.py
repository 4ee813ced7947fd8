"""Reward modelling from preference pairs: its settings and losses."""

from dataclasses import dataclass
from typing import Annotated

from realhf.algorithms.options import COEFFICIENT
from realhf.api.script.functions import BoundLoss, loss_function, tensor_function
from realhf.base.options import ALGORITHM, Common, Settings


@dataclass(frozen=True, kw_only=True)
class PairLoss(Settings):
    """The settings of a reward model's update on preference pairs.

    A column `margin` [1] of the pairs is how much better the chosen response is said to be (0 without it).
    """

    HEADING = ALGORITHM

    score_square_coef: Annotated[float, Common("pull of each score to 0", range=COEFFICIENT)] = 0.001
    centre_coef: Annotated[
        float, Common("pull of the sum of a pair's scores to 0; 0.01 is usual", range=COEFFICIENT)
    ] = 0.0
    epochs: Annotated[int, Common("passes of an update through the mini-batches of a step", range=(1, 1024))] = 1


_pairwise = loss_function("realhf.algorithms.reward.functions:pairwise")
_sampled = loss_function("realhf.algorithms.reward.functions:sampled_pairwise")
_cost = loss_function("realhf.algorithms.reward.functions:safe_pairwise")

with_samples = tensor_function("realhf.algorithms.reward.functions:with_samples")


def pairwise_loss(pairs: PairLoss) -> BoundLoss:
    """The Bradley-Terry loss of pairs of scores."""
    return _pairwise(pairs)


def sampled_pairwise_loss(pairs: PairLoss) -> BoundLoss:
    """The same of pairs `with_samples` of the policy, whose scores are a statistic."""
    return _sampled(pairs)


def cost_loss(pairs: PairLoss) -> BoundLoss:
    """The loss of Safe-RLHF's cost model: `chosen` is the safer response, `chosen_unsafe` and `rejected_unsafe` [1] are
    1 for unsafe responses, 0 for safe ones."""
    return _cost(pairs)
