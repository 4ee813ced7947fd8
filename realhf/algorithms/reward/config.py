"""Settings of reward modelling from preference pairs."""

from dataclasses import dataclass
from typing import ClassVar

from realhf.base.numbers import check_range
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
