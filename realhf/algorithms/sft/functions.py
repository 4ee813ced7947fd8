"""The loss of supervised fine-tuning on the workers."""

from torch import Tensor

from realhf.engine.batch import Batch


def sft(logprob: Tensor, batch: Batch) -> Tensor:
    """The cross entropy of each answer token, -logprob: [responses]."""
    return -logprob
