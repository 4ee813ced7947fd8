"""Losses of a policy: surrogates of the advantage, per response token and not reduced.

`log_ratio` is log(policy / old policy) with gradient, of a token or of a sequence (`sequence_log_ratio`), repeated for
each of its tokens. `[responses]` are the response tokens of all samples end to end. Losses are float64, see
`realhf.algorithms.functional.exponentials`.
"""

import math

import torch
from torch import Tensor

from realhf.algorithms.functional.exponentials import log_ratios, ratios, wide
from realhf.algorithms.functional.importance import response_means, response_sums


def ppo_policy_loss(
    logprob: Tensor, old_logprob: Tensor, advantage: Tensor, clip: float, dual_clip: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The clipped surrogate, per token and not reduced.

        ratio = exp(logprob - old_logprob)
        L     = max(-ratio * A, -clamp(ratio, 1 - clip, 1 + clip) * A)

    With `dual_clip` c (above 1; 0: none), L = min(L, -c * A) where A < 0: a bad token whose ratio is very large has no
    gradient.

    Args:
        logprob: [responses] with gradient; old_logprob, advantage: [responses].

    Returns:
        (L [responses], is_clipped [responses]: True if clipping removed the gradient).

    Sources: Schulman et al., "Proximal policy optimization algorithms" (2017), equation 7; Ye et al., "Mastering
    complex control in MOBA games" (2020), section "Dual-clip PPO".
    """
    ratio = ratios(log_ratios(logprob, old_logprob))
    free = -ratio * advantage
    clipped = -ratio.clamp(1 - clip, 1 + clip) * advantage
    loss, is_clipped = torch.maximum(free, clipped), clipped > free
    if dual_clip:
        limit = -dual_clip * advantage
        is_over = (advantage < 0) & (loss > limit)
        loss, is_clipped = torch.where(is_over, limit, loss), is_clipped | is_over
    return loss, is_clipped


def clipped_surrogate(
    log_ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float, delta: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The surrogate with a range of its own on either side, and on demand with a bound of the free ratio.

        L = -min(min(ratio, delta) * A, clamp(ratio, 1 - clip_low, 1 + clip_high) * A)

    Args:
        delta: 0 is no bound; else above 1 + clip_high. It limits the loss of bad tokens that became likely.

    Returns:
        (L [responses], is_clipped [responses]: True if a bound removed the gradient of an advantage that is more than
        rounding: the sign of another differs between plans).

    Sources: Yu et al., "DAPO" (2025), equation 10 (clip-higher); Prime Intellect, "INTELLECT-2" (2025), section 3.4
    (two-sided clipping).
    """
    ratio = ratios(log_ratio)
    free = ratio.clamp(max=delta) if delta else ratio
    loss = -torch.minimum(free * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)
    rounding = 16 * torch.finfo(advantage.dtype).eps
    is_good, is_bad = advantage > rounding, advantage < -rounding
    is_clipped = (ratio > 1 + clip_high) & is_good | (ratio < 1 - clip_low) & is_bad
    if delta:
        is_clipped = is_clipped | ((ratio > delta) & is_bad)
    return loss, is_clipped


def cispo_loss(log_ratio: Tensor, logprob: Tensor, advantage: Tensor, ratio_cap: float) -> tuple[Tensor, Tensor]:
    """REINFORCE with an importance weight that is capped and has no gradient; no token loses its gradient.

        L = -min(ratio, ratio_cap).detach() * A * logprob

    Returns:
        (L [responses], is_capped [responses]).

    Source: MiniMax, "MiniMax-M1" (2025), equation 4.
    """
    ratio = ratios(log_ratio.detach())
    return -ratio.clamp(max=ratio_cap) * advantage * wide(logprob), (ratio > ratio_cap) & (advantage > 0)


def sapo_loss(log_ratio: Tensor, advantage: Tensor, temperature_up: float, temperature_down: float) -> Tensor:
    """A smooth gate in place of the clip: its gradient falls off on both sides of a ratio of 1.

        L = -4 / t * sigmoid(t * (ratio - 1)) * A,  t = temperature_up where A > 0, else temperature_down

    Returns:
        [responses].

    Source: Gao et al., "Soft adaptive policy optimization" (2025), equations 5 and 6.
    """
    t = torch.where(advantage > 0, temperature_up, temperature_down).double()
    return -torch.sigmoid(t * (ratios(log_ratio) - 1)) * 4 / t * advantage


def vespo_loss(
    log_weight: Tensor, logprob: Tensor, advantage: Tensor, up: tuple[float, float], down: tuple[float, float]
) -> Tensor:
    """REINFORCE with a smooth weight of the whole sequence, which has no gradient.

        L = -phi(w) * A * logprob,  phi(w) = w^k * exp(lambda * (1 - w))

    Args:
        log_weight: log w, of the sequence, at each of its tokens (see `sequence_log_weight`).
        up, down: (k, lambda) where A >= 0, and where A < 0.

    Returns:
        [responses].

    Source: "VESPO: Variational sequence-level soft policy optimization" (2026), as TRL 1.12 computes it.
    """
    log_w = log_weight.detach().double().clamp(math.log(1e-8), 20.0)
    is_good = advantage >= 0
    k = torch.where(is_good, up[0], down[0]).to(log_w.dtype)
    lam = torch.where(is_good, up[1], down[1]).to(log_w.dtype)
    phi = (lam + k * log_w - lam * log_w.exp()).exp()
    return -phi * advantage * wide(logprob)


def sequence_log_ratio(log_ratio: Tensor, lengths: Tensor) -> Tensor:
    """The mean of a response's log-ratios, at each of its tokens: [responses] from [responses], `lengths` [batch].

    Source: Zheng et al., "Group sequence policy optimization" (2025), equation 7.
    """
    return response_means(wide(log_ratio), lengths)


def sequence_token_log_ratio(log_ratio: Tensor, logprob: Tensor, lengths: Tensor) -> Tensor:
    """The value of `sequence_log_ratio` with the gradient of the token's own log-probability: [responses].

    Source: Zheng et al. (2025), equation 14 (GSPO-token).
    """
    return response_means(log_ratio.detach().double(), lengths) + (wide(logprob) - logprob.detach())


def sequence_log_weight(log_ratio: Tensor, log_importance: Tensor | None, lengths: Tensor) -> Tensor:
    """The sum of a response's log-ratios, with those of an importance correction, at each of its tokens: [responses].

    Each term is kept within +-20, so that one token cannot overflow the sum.
    """
    total = response_sums(log_ratio.detach().double().clamp(-20, 20), lengths)
    if log_importance is not None:
        total = total + response_sums(log_importance.double().clamp(math.log(1e-8), 20), lengths)
    return total
