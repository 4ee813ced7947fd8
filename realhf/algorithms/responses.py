"""The responses of packed rollouts: their lengths, and the log-probabilities or values of their tokens.

A batch of rollouts has the columns `prompt` and `seq` (prompt and response). `[responses]` in the shape comments are
the response tokens of all samples end to end.
"""

import torch
from torch import Tensor

from realhf.algorithms.functional import at_least_fp32, predicting_positions, token_statistics
from realhf.engine.batch import Batch
from realhf.parallel.vocabulary import Logits, TokenLogprobs, WholeLogits


def response_lengths(batch: Batch) -> list[int]:
    """Tokens of each response."""
    return [len(seq) - len(prompt) for seq, prompt in zip(batch.data["seq"], batch.data["prompt"], strict=True)]


def response_tokens(batch: Batch) -> float:
    """Tokens of all responses: the weight of a loss that is a mean over them (`Model.train_step`)."""
    return float(sum(response_lengths(batch)))


def responses(batch: Batch) -> list[Tensor]:
    """The tokens of each response."""
    return [seq[len(prompt) :] for seq, prompt in zip(batch.data["seq"], batch.data["prompt"], strict=True)]


def response_logprobs(logits: Logits | WholeLogits, batch: Batch, temperature: float = 1.0) -> Tensor:
    """[responses], of the response tokens, from logits [tokens, vocab]."""
    return response_statistics(logits, batch, temperature).logprob


def response_statistics(
    logits: Logits | WholeLogits, batch: Batch, temperature: float = 1.0, *, with_entropy: bool = False
) -> TokenLogprobs:
    """Of the response tokens, [responses] each, from logits [tokens, vocab]; see `token_statistics`."""
    positions = _positions(batch, logits.device)
    tokens = batch.packed("seq").values[positions + 1]
    return token_statistics(logits[positions], tokens, temperature, with_entropy=with_entropy)


def response_values(head: Tensor, batch: Batch) -> Tensor:
    """[responses], in at least float32, from a scalar head's output [tokens]."""
    return at_least_fp32(head)[_positions(batch, head.device)]


def by_sample(of_tokens: Tensor, batch: Batch) -> list[Tensor]:
    """[responses] as one tensor [response] a sample."""
    return list(of_tokens.split(response_lengths(batch)))


def to_tokens(of_samples: Tensor, batch: Batch) -> Tensor:
    """One number a sample [batch], repeated for each token of its response: [responses]."""
    each = zip(of_samples.unbind(), response_lengths(batch), strict=True)
    return torch.cat([number.expand(length) for number, length in each])


def _positions(batch: Batch, device: torch.device) -> Tensor:
    """[responses]: see `predicting_positions`."""
    return predicting_positions([len(s) for s in batch.data["seq"]], [len(p) for p in batch.data["prompt"]], device)
