"""Corrections for tokens that another distribution drew: an engine with other numerics, or older weights."""

import torch
from torch import Tensor

from realhf.algorithms.choices import ImportanceCorrection
from realhf.algorithms.functional.exponentials import log_ratios, ratios


def importance_weights(
    drawn: Tensor, old: Tensor, lengths: Tensor, correction: ImportanceCorrection, bounds: tuple[float, float]
) -> Tensor:
    """How much each token counts in the loss, where `drawn` are log-probabilities at generation and `old` those of the
    policy that training begins with.

        w = exp(old - drawn), of a token, or of a whole response (the sum of its tokens)

    "truncate" clips w to the bounds (TIS); "mask" puts 0 where w lies outside them (MIS).

    Args:
        drawn, old: [responses]; lengths: [batch] tokens of each response; bounds: the least and the largest weight.

    Returns:
        [responses], without gradient, in the dtype of `old`.

    Sources: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training" (2025) (TIS); Liu et
    al., "When speed kills stability" (2025) (MIS, and weights of sequences).
    """
    if correction == "none":
        return torch.ones_like(old)
    log_weight = log_ratios(old.detach(), drawn.detach())
    if correction.startswith("sequence"):
        log_weight = response_sums(log_weight, lengths)
    weight = ratios(log_weight)
    low, high = bounds
    if correction.endswith("truncate"):
        return weight.clamp(low, high).to(old.dtype)
    return torch.where((weight >= low) & (weight <= high), weight, 0.0).to(old.dtype)


def is_near_policy(advantage: Tensor, logprob: Tensor, drawn: Tensor, lengths: Tensor, threshold: float) -> Tensor:
    """[responses] bool: False in responses with a negative advantage from which the policy has moved away too far.

    Far means that the mean over the response of (drawn - logprob) is above `threshold`.

    Source: DeepSeek-AI, "DeepSeek-V3.2" (2025), equation 9 (off-policy sequence masking).
    """
    divergence = response_means(log_ratios(drawn, logprob.detach()), lengths)
    return (advantage >= 0) | (divergence <= threshold)


def response_sums(x: Tensor, lengths: Tensor) -> Tensor:
    """The sum over each response, at each of its tokens: [responses] from `x` [responses], `lengths` [batch]."""
    index = torch.arange(len(lengths), device=x.device).repeat_interleave(lengths, output_size=len(x))
    return x.new_zeros(len(lengths)).index_add(0, index, x)[index]


def response_means(x: Tensor, lengths: Tensor) -> Tensor:
    """As `response_sums`, the mean."""
    return response_sums(x, lengths) / lengths.repeat_interleave(lengths, output_size=len(x)).to(x.dtype)
