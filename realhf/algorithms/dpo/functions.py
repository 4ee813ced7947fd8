"""The loss of direct preference optimisation on the workers."""

import torch
from torch import Tensor

from realhf.algorithms import functional as F
from realhf.algorithms.dpo.config import DPO
from realhf.algorithms.samples import of_responses
from realhf.algorithms.statistics import mean_of
from realhf.api.script.columns import Columns
from realhf.engine.batch import Batch
from realhf.engine.interface import Stats

_ROUNDINGS = 64  # a log-probability is the end of some thirty sums behind one another, and here are four of them


def with_reference(pairs: Columns, ref: Columns) -> dict[str, list[Tensor]]:
    """The pairs with the columns `chosen_ref_logprob`, `rejected_ref_logprob` [1] of `ref`: sums over each answer."""
    return {key: getattr(ref, key) for key in ("chosen_ref_logprob", "rejected_ref_logprob")}


def dpo_pairs(chosen: Tensor, rejected: Tensor, batch: Batch, dpo: DPO) -> tuple[Tensor, Stats]:
    """The loss of each pair, [pairs]; see `realhf.algorithms.functional.dpo_loss`.

    Args:
        chosen, rejected: sums of the log-probabilities of each answer's tokens, [pairs] with gradient.
        batch: `prompt`, `chosen`, `rejected` (whole sequences) and, unless `reference_free`, `chosen_ref_logprob`,
            `rejected_ref_logprob` [1].

    Statistics: `pair_accuracy` (the share of pairs whose chosen response has the larger implicit reward; equal ones,
    up to rounding, count half, as all pairs do while the policy is the reference),
    `chosen_reward`, `rejected_reward` (beta * log(policy / reference)), `chosen_logprob`, `rejected_logprob`.
    """
    good, bad = (
        (chosen, rejected)
        if dpo.reference_free
        else (
            chosen - of_responses("chosen_ref_logprob", batch.data["chosen_ref_logprob"], batch.ids),
            rejected - of_responses("rejected_ref_logprob", batch.data["rejected_ref_logprob"], batch.ids),
        )
    )
    good_tokens, bad_tokens = _answer_tokens(batch, "chosen", chosen), _answer_tokens(batch, "rejected", rejected)
    by_token = dpo.loss_type == "ipo"
    margin = good / good_tokens - bad / bad_tokens if by_token else good - bad
    loss = F.dpo_loss(dpo.loss_type, margin, dpo.beta, dpo.label_smoothing) - dpo.sft_coef * chosen / good_tokens
    return loss, {
        "pair_accuracy": mean_of(_share_right(good - bad, chosen.abs() + rejected.abs())),
        "chosen_reward": mean_of(dpo.beta * good),
        "rejected_reward": mean_of(dpo.beta * bad),
        "chosen_logprob": mean_of(chosen),
        "rejected_logprob": mean_of(rejected),
    }


def _share_right(margin: Tensor, terms: Tensor) -> Tensor:
    """[pairs]: 1, 0, or 1/2 for a margin that is no more than the rounding of the `terms` it is a difference of: its
    sign would depend on the order in which a plan adds them."""
    is_equal = margin.abs() <= _ROUNDINGS * torch.finfo(margin.dtype).eps * terms
    return torch.where(is_equal, 0.5, (margin > 0).to(margin.dtype))


def _answer_tokens(batch: Batch, side: str, like: Tensor) -> Tensor:
    """[pairs]: tokens of the answers, at least 1."""
    pairs = zip(batch.data[side], batch.data["prompt"], strict=True)
    return like.new_tensor([max(len(whole) - len(prompt), 1) for whole, prompt in pairs])
