"""The responses of packed rollouts: their lengths, and the log-probabilities or values of their tokens.

A batch of rollouts has the columns `prompt` and `seq` (prompt and response). `[responses]` in the shape comments are
the response tokens of all samples end to end.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from realhf.algorithms.functional import at_least_fp32, last_positions, predicting_positions, token_logprobs
from realhf.engine.batch import Batch
from realhf.parallel.vocabulary import Logits, WholeLogits


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
    positions = response_positions(batch, logits.device)
    return token_logprobs(logits[positions], batch.packed("seq").values[positions + 1], temperature)


def response_distributions(logits: Logits | WholeLogits, batch: Batch, temperature: float = 1.0) -> Iterator[Tensor]:
    """By sample log softmax(logits / temperature) where a response token is predicted, [response, vocab] in at least
    float32, from logits [tokens, vocab]; one sample's exist at a time."""
    for positions in response_positions(batch, logits.device).split(response_lengths(batch)):
        yield at_least_fp32(logits[positions].full()).div(temperature).log_softmax(-1)


def response_values(head: Tensor, batch: Batch) -> Tensor:
    """[responses], in at least float32, from a scalar head's output [tokens]."""
    return at_least_fp32(head)[response_positions(batch, head.device)]


def last_scores(head: Tensor, batch: Batch) -> list[Tensor]:
    """Per sequence `seq` [1], in at least float32: the value of a scalar head's output [tokens] at its last token."""
    lengths = [len(tokens) for tokens in batch.data["seq"]]
    return list(at_least_fp32(head)[last_positions(lengths, head.device)].split(1))


def token_scores(head: Tensor, batch: Batch) -> list[Tensor]:
    """Per sequence `seq` [response], in at least float32: the values of a scalar head's output [tokens] at the tokens
    of
    the response themselves. The last one is that of `last_scores`."""
    return by_sample(at_least_fp32(head)[response_positions(batch, head.device) + 1], batch)


def by_sample(of_tokens: Tensor, batch: Batch) -> list[Tensor]:
    """[responses] as one tensor [response] a sample."""
    return list(of_tokens.split(response_lengths(batch)))


def response_positions(batch: Batch, device: torch.device) -> Tensor:
    """[responses]: the places in the packed sequences `seq` of the states that predict response tokens."""
    return predicting_positions([len(s) for s in batch.data["seq"]], [len(p) for p in batch.data["prompt"]], device)
