"""The places of response tokens in packed sequences, and log-probabilities of tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor

from realhf.gpu.host_numbers import on_device
from realhf.parallel.vocabulary import Logits, TokenLogprobs, WholeLogits


def at_least_fp32(x: Tensor) -> Tensor:
    """`x` in float32, or unchanged in float64."""
    return x if x.dtype == torch.float64 else x.float()


def predicting_positions(lengths: Sequence[int], prompt_lengths: Sequence[int], device: torch.device) -> Tensor:
    """The positions in packed sequences of the states that predict response tokens.

    Args:
        lengths: tokens of each sequence, prompt and response.
        prompt_lengths: tokens of each prompt, at least 1.

    Returns:
        [responses] int64: indices p into the packed tokens; `tokens[p + 1]` is the response token
        that the model's output at p predicts.
    """
    positions, start = [], 0
    for length, prompt_length in zip(lengths, prompt_lengths, strict=True):
        assert 1 <= prompt_length <= length, f"a prompt of {prompt_length} tokens in a sequence of {length}"
        positions.append(torch.arange(start + prompt_length - 1, start + length - 1, device=device))
        start += length
    return torch.cat(positions)


def last_positions(lengths: Sequence[int], device: torch.device) -> Tensor:
    """[batch] int64: index of each sequence's last token in the packed tokens."""
    return on_device(torch.tensor(lengths).cumsum(0) - 1, device)


def token_statistics(
    logits: Tensor | Logits | WholeLogits, tokens: Tensor, temperature: float = 1.0, *, with_entropy: bool = False
) -> TokenLogprobs:
    """Log-probability of `tokens` [n], whether each is the most likely one, and on demand the entropy.

    Args:
        logits: [n, vocab]; the logits of a model's head are never all in memory.
    """
    if isinstance(logits, Tensor):
        logits = WholeLogits(logits)
    return logits.of_tokens(tokens, temperature, with_entropy=with_entropy)


def token_logprobs(logits: Tensor | Logits | WholeLogits, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature) at `tokens` [n], in at least float32: [n]; see `token_statistics`."""
    return token_statistics(logits, tokens, temperature).logprob
