"""Estimates of KL divergences from drawn tokens, and the controller of their coefficient."""

from torch import Tensor

from realhf.algorithms.choices import KLEstimator
from realhf.algorithms.functional.exponentials import bounded, log_ratios


def kl_k1(logprob: Tensor, ref_logprob: Tensor) -> Tensor:
    """Per token log p - log q, where the tokens were drawn from p: unbiased for KL(p || q), may be negative."""
    return logprob - ref_logprob


def kl_k2(logprob: Tensor, ref_logprob: Tensor) -> Tensor:
    """Per token 1/2 (log p - log q)^2, tokens drawn from p: biased, never negative.

    As a loss it has the gradient of KL(p || q) in expectation: (log p - log q) * grad log p.

    Source: J. Schulman, "Approximating KL Divergence" (2020).
    """
    return 0.5 * (logprob - ref_logprob).square()


def kl_k3(logprob: Tensor, ref_logprob: Tensor) -> Tensor:
    """Per token r - 1 - log r with r = q / p, tokens drawn from p: unbiased for KL(p || q), never negative.

    In float64: a small divergence is the small difference of numbers near 1.

    Source: J. Schulman, "Approximating KL Divergence" (2020); the estimate that GRPO uses.
    """
    log_ratio = log_ratios(ref_logprob, logprob)
    return (bounded(log_ratio).expm1() - log_ratio).clamp(min=0)


def kl_estimate(estimator: KLEstimator, logprob: Tensor, ref_logprob: Tensor) -> Tensor:
    """The estimate of that name, per token."""
    return {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}[estimator](logprob, ref_logprob)


def adapted_kl_coef(kl_coef: float, kl: float, target: float, samples: int, horizon: float) -> float:
    """The coefficient of the next step: it grows where the divergence is above its target, and shrinks where below.

        e  = clip(kl / target - 1, -0.2, 0.2)
        c' = c * (1 + e * min(samples / horizon, 1))

    Args:
        kl: of a sequence (a sum over its tokens), the mean over this step's samples.
        samples: of the step; horizon: samples after which the coefficient has changed by a factor of about e^0.2. More
            samples than the horizon count as many as it: the coefficient of a large step would become negative.

    Source: Ziegler et al., "Fine-tuning language models from human preferences" (2019), section 2.2.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * min(samples / horizon, 1.0))
