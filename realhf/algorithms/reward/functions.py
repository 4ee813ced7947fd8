"""The losses of reward and cost models on the workers."""

import torch
from torch import Tensor

from realhf.algorithms import functional as F
from realhf.algorithms.reward.config import PairLoss
from realhf.algorithms.samples import of_responses
from realhf.algorithms.statistics import mean_of
from realhf.engine.batch import Batch
from realhf.engine.interface import Stats


def pairwise(chosen: Tensor, rejected: Tensor, batch: Batch, pairs: PairLoss) -> tuple[Tensor, Stats]:
    """The loss of each pair of scores, [pairs], from scores [pairs] and, if there is one, the column `margin` [1].

        L = -log sigmoid(chosen - rejected - margin) + centre_coef * (chosen + rejected)^2
            + score_square_coef * (chosen^2 + rejected^2)

    Statistics: `pair_accuracy`, `chosen_score`, `rejected_score`.
    """
    margin = of_responses("margin", batch.data["margin"], batch.ids) if "margin" in batch.data else 0.0
    loss = F.margin_loss(chosen, rejected, margin, pairs.centre_coef)
    return loss + _pull(chosen, rejected, pairs), _stats(chosen, rejected)


def safe_pairwise(chosen: Tensor, rejected: Tensor, batch: Batch, pairs: PairLoss) -> tuple[Tensor, Stats]:
    """The loss of each pair of costs, [pairs]: `chosen` is the safer response; see `safe_pairwise_loss`.

    The columns `chosen_unsafe`, `rejected_unsafe` [1] are 1 (unsafe) or 0 (safe); without them order alone counts.

    Statistics: `pair_accuracy` (the safer one costs less), `unsafe_accuracy` (of the signs), `chosen_score`,
    `rejected_score`.
    """
    signs = [
        2 * of_responses(name, batch.data[name], batch.ids).to(chosen) - 1
        if name in batch.data
        else torch.zeros_like(chosen)
        for name in ("chosen_unsafe", "rejected_unsafe")
    ]
    loss = F.safe_pairwise_loss(chosen, rejected, *signs) + _pull(chosen, rejected, pairs)
    stats = _stats(rejected, chosen) | {"chosen_score": mean_of(chosen), "rejected_score": mean_of(rejected)}
    known = torch.cat([(cost.sign() == sign)[sign != 0] for cost, sign in zip((chosen, rejected), signs, strict=True)])
    return loss, stats | ({"unsafe_accuracy": mean_of(known)} if len(known) else {})


def _pull(chosen: Tensor, rejected: Tensor, pairs: PairLoss) -> Tensor:
    return pairs.score_square_coef * (chosen.square() + rejected.square())


def _stats(above: Tensor, below: Tensor) -> Stats:
    return {
        "pair_accuracy": mean_of(above > below),
        "chosen_score": mean_of(above),
        "rejected_score": mean_of(below),
    }
