"""The clipped surrogate as a loss of its own, for the algorithms that differ in their advantages alone."""

from torch import Tensor

from realhf.algorithms.functional import clipped_surrogate, log_ratios
from realhf.algorithms.options import ClippedOptions
from realhf.algorithms.samples import drawn_by
from realhf.algorithms.statistics import mean_of
from realhf.engine.batch import Batch
from realhf.engine.interface import Stats


def clipped_policy(logprob: Tensor, batch: Batch, options: ClippedOptions) -> tuple[Tensor, Stats]:
    """The clipped surrogate of each response token, [responses], from the columns `advantage`, `logprob` or
    `old_logprob`, and `importance` where there is one.

    In the first step on a batch the ratio is 1, and the gradient that of REINFORCE, -A * grad logprob.
    Statistics: `clip_fraction`.
    """
    advantage = batch.packed("advantage").values
    loss, is_clipped = clipped_surrogate(
        log_ratios(logprob, drawn_by(batch)), advantage, options.clip_low, options.clip_high
    )
    if "importance" in batch.data:
        loss = loss * batch.packed("importance").values
    return loss, {"clip_fraction": mean_of(is_clipped)}


def clipped_policy_with_entropy(
    logprob: Tensor, batch: Batch, options: ClippedOptions, *, entropy: Tensor
) -> tuple[Tensor, Stats]:
    """As `clipped_policy`, less entropy_coef * `entropy` [responses]. Statistics also: `policy_entropy`."""
    loss, stats = clipped_policy(logprob, batch, options)
    stats["policy_entropy"] = mean_of(entropy)
    return loss - options.entropy_coef * entropy, stats
