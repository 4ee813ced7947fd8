"""From rewards and values of tokens to advantages and returns."""

from collections.abc import Sequence

import torch
from torch import Tensor

from realhf.algorithms.choices import KLEstimator
from realhf.algorithms.functional.divergence import kl_estimate


def standardised_score(score: Tensor, mean: float, std: float, clip: float) -> Tensor:
    """The score of one response, (score - mean) / std, or scores of its tokens; each clipped to [-clip, clip].

    `mean` and `std` are those of whole responses: of tokens' scores `mean` is taken from the last one, so that their
    sum is (sum - mean) / std where nothing is clipped.

    Args:
        score: [1], or [response].

    Returns:
        As `score`.
    """
    centred = score.clone()
    centred[-1:] -= mean
    return (centred / std).clamp(-clip, clip)


def kl_penalised_rewards(
    score: Tensor, logprob: Tensor, ref_logprob: Tensor, kl_coef: float, estimator: KLEstimator = "k1"
) -> Tensor:
    """The reward of every token of one response.

        r_j = -kl_coef * KL_j, plus score_j, or plus `score` at the last token

    with the estimate of the divergence from drawn tokens; k1 is logprob_j - ref_logprob_j.

    Args:
        score: [1], of the whole response; an empty response has no token for it. Or [response], of its tokens.
        logprob, ref_logprob: [response], of the drawn tokens under the policy that drew them and under the reference.

    Returns:
        [response], float64.

    Source: Ouyang et al., "Training language models to follow instructions" (2022), section 3.5.
    """
    rewards = -kl_coef * kl_estimate(estimator, logprob.double(), ref_logprob.double())
    if len(rewards):  # an empty response has no token to reward
        rewards[-len(score) :] += score
    return rewards


def gae(
    rewards: Sequence[Tensor], values: Sequence[Tensor], gamma: float, lam: float
) -> tuple[list[Tensor], list[Tensor]]:
    """Generalised advantage estimates of a batch of responses.

        delta_j = r_j + gamma * V_{j+1} - V_j
        A_j     = delta_j + gamma * lam * A_{j+1}

    with V = A = 0 after the last token: a response that was cut off at the maximum length counts as ended.

    Args:
        rewards: per sample [response].
        values: per sample [response]; values[j] is that of the state that predicts token j.

    Returns:
        (advantages, returns), each per sample [response]; returns = advantages + values.

    Source: Schulman et al., "High-dimensional continuous control using GAE" (2016), equation 16.
    """
    lengths = [len(r) for r in rewards]
    # Zeros after the end give delta = A = 0 there, so padding needs no mask.
    r = torch.nn.utils.rnn.pad_sequence(list(rewards), batch_first=True)  # [batch, longest]
    v = torch.nn.utils.rnn.pad_sequence(list(values), batch_first=True)
    v_next = torch.cat([v[:, 1:], torch.zeros_like(v[:, :1])], 1)
    delta = r + gamma * v_next - v
    advantage = discounted_sums(delta, gamma * lam)
    advantages, returns = (
        [row[:n] for row, n in zip(padded, lengths, strict=True)] for padded in (advantage, advantage + v)
    )
    return advantages, returns


def discounted_sums(x: Tensor, discount: float) -> Tensor:
    """y[:, j] = sum over k >= j of discount^(k - j) x[:, k], for `x` [batch, length].

    It doubles the summed span each time (Hillis and Steele, 1986); a loop over columns would launch kernels for each
    token of the longest response. All operations are elementwise, so a row's bits depend neither on other rows nor on
    the zeros after its end.
    """
    sums, span = x.clone(), 1  # each sum has `span` columns
    while span < x.shape[1]:
        sums[:, :-span] = sums[:, :-span] + discount**span * sums[:, span:]
        span *= 2
    return sums


def rewards_to_go(rewards: Sequence[Tensor], gamma: float = 1.0) -> list[Tensor]:
    """The discounted sum of a response's rewards from each token to its end, per sample [response]."""
    padded = torch.nn.utils.rnn.pad_sequence(list(rewards), batch_first=True)  # [batch, longest]
    sums = discounted_sums(padded, gamma)
    return [row[: len(r)] for row, r in zip(sums, rewards, strict=True)]
