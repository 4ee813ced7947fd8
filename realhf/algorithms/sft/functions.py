"""The loss of supervised fine-tuning on the workers."""

from torch import Tensor

from realhf.algorithms.statistics import mean_of
from realhf.engine.batch import Batch
from realhf.engine.interface import Stats


def sft(logprob: Tensor, batch: Batch, *, is_top: Tensor) -> tuple[Tensor, Stats]:
    """The cross entropy of each answer token, -logprob: [responses].

    Statistics: `token_accuracy`, the share of the tokens in the loss that are the model's most likely ones.
    """
    counted = is_top[batch.packed("in_loss").values > 0] if "in_loss" in batch.data else is_top
    return -logprob, {"token_accuracy": mean_of(counted)}
