"""What the losses of policies share: the clipped surrogate of a ratio, and the entropy."""

from torch import Tensor

from realhf.algorithms.functional import clipped_surrogate, log_ratios
from realhf.algorithms.options import ClippedOptions, PolicyOptions
from realhf.algorithms.samples import drawn_by
from realhf.algorithms.statistics import mean_of
from realhf.api.script.functions import load_function
from realhf.engine.batch import Batch
from realhf.engine.interface import Stats


def clipped_policy(logprob: Tensor, batch: Batch, options: ClippedOptions) -> tuple[Tensor, Stats]:
    """The clipped surrogate of each response token, [responses], from the columns `advantage`, `logprob` or
    `old_logprob`, and `importance` where there is one.

    In the first step on a batch the ratio is 1, and the gradient that of REINFORCE, -A * grad logprob.
    Statistics: `clip_fraction`.
    """
    return clipped_loss(log_ratios(logprob, drawn_by(batch)), batch, options)


def clipped_loss(log_ratio: Tensor, batch: Batch, options: ClippedOptions) -> tuple[Tensor, Stats]:
    """As `clipped_policy`, from the log-ratios [responses]."""
    advantage = batch.packed("advantage").values
    loss, is_clipped = clipped_surrogate(log_ratio, advantage, options.clip_low, options.clip_high)
    if "importance" in batch.data:
        loss = loss * batch.packed("importance").values
    return loss, {"clip_fraction": mean_of(is_clipped)}


def less_entropy(
    logprob: Tensor, batch: Batch, options: PolicyOptions, policy: str, *, entropy: Tensor
) -> tuple[Tensor, Stats]:
    """The loss `policy` (MODULE:NAME), less entropy_coef * `entropy` [responses] of each token's distribution, at the
    rollout's temperature; reduced as that loss is. Statistics also: `policy_entropy`."""
    loss, stats = load_function(policy)(logprob, batch, options)
    return loss - options.entropy_coef * entropy, stats | {"policy_entropy": mean_of(entropy)}
