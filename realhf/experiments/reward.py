"""A reward model from preference pairs: it learns to score the chosen answer above the rejected one.

Needs: --model; --data with prompts, chosen and rejected answers
"""

from realhf.algorithms.reward.config import PairLoss, pairwise_loss
from realhf.api import Pairs, RewardModel, auto


@auto(batch_size=64, steps=200)
def reward(
    pairs: Pairs, *, judge: RewardModel = RewardModel(lr=1e-5, warmup_steps=10, weight_decay=0.01), loss: PairLoss
) -> None:
    judge.update(pairs, pairwise_loss(loss))
