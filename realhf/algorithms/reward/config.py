"""Settings of reward modelling from preference pairs."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from realhf.algorithms.options import COEFFICIENT
from realhf.api.script.functions import BoundLoss, loss_function
from realhf.base.numbers import check_range
from realhf.base.options import ALGORITHM, Common, Settings
from realhf.dataflow.interface import InterfaceConfig


@dataclass(frozen=True, kw_only=True)
class PairwiseReward(InterfaceConfig):
    """A model with a scalar head that learns to score `chosen` above `rejected` at their last token.

    TRAIN_STEP and INFERENCE on whole sequences `chosen`, `rejected` and, if the call lists it,
    `sample`: a sequence that the policy drew for the same prompt. Training then replaces the
    rejected sequence of every second sample by the policy's where that differs from the chosen one
    (on-policy negatives); INFERENCE only measures.

    Statistics: `pair_accuracy` (share of pairs in the right order), `sample_score` and
    `sample_score_square` (mean score and its square over sequences of the policy, right or wrong:
    PPO standardises rewards with them); from training also `loss`, `grad_norm`, `lr`.
    """

    implementation: ClassVar[str] = "realhf.algorithms.reward.interface:PairwiseRewardInterface"
    sequence_keys: ClassVar[tuple[str, ...]] = ("chosen", "rejected")

    score_square_coef: float = 0.001

    def __post_init__(self) -> None:
        check_range("score_square_coef", self.score_square_coef, 0, 1e6)


@dataclass(frozen=True, kw_only=True)
class SequenceReward(InterfaceConfig):
    """INFERENCE: `reward` [1], the score of `seq` at its last token."""

    implementation: ClassVar[str] = "realhf.algorithms.reward.interface:SequenceRewardInterface"


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
_cost = loss_function("realhf.algorithms.reward.functions:safe_pairwise")


def pairwise_loss(pairs: PairLoss) -> BoundLoss:
    """The Bradley-Terry loss of pairs of scores."""
    return _pairwise(pairs)


def cost_loss(pairs: PairLoss) -> BoundLoss:
    """The loss of Safe-RLHF's cost model: `chosen` is the safer response, `chosen_unsafe` and `rejected_unsafe` [1] are
    1 for unsafe responses, 0 for safe ones."""
    return _cost(pairs)
