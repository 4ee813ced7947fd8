"""Reward modelling from preference pairs: its settings and losses."""

from dataclasses import dataclass

from realhf.algorithms.options import coefficients
from realhf.api.script.functions import BoundLoss, loss_function, tensor_function
from realhf.base.numbers import check_range, check_ranges


@dataclass(frozen=True, kw_only=True)
class PairLoss:
    """The settings of a reward model's update on preference pairs.

    A column `margin` [1] of the pairs is how much better the chosen response is said to be (0 without it).
    """

    score_square_coef: float = 0.001
    """A pull of each score to 0."""
    centre_coef: float = 0.0
    """A pull of the sum of a pair's scores to 0; 0.01 is usual."""
    epochs: int = 1

    def __post_init__(self) -> None:
        check_ranges(vars(self), coefficients("score_square_coef", "centre_coef"))
        check_range("epochs", self.epochs, 1, 1024)


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
