"""The pairs and the losses of reward and cost models on the workers."""

import torch
from torch import Tensor

from realhf.algorithms import functional as F
from realhf.algorithms.reward.config import PairLoss
from realhf.algorithms.samples import of_responses
from realhf.algorithms.statistics import mean_of
from realhf.api.script.columns import Columns
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


def with_samples(pairs: Columns) -> dict[str, list[Tensor]]:
    """Pairs of which every second one has for `rejected` the policy's own response to the prompt, `sample`, where that
    differs from `chosen` (on-policy negatives).

    The column `is_sample` [2] says of chosen and rejected whether the policy drew them. They are a fair sample of the
    policy: a response of it that equals the chosen one counts as drawn too.
    """
    rejected, is_sample = [], []
    rows = zip(pairs.ids, pairs.chosen, pairs.rejected, pairs.sample, strict=True)
    for sample_id, chosen, other, sample in rows:
        is_right = sample_id % 2 == 0 and torch.equal(sample, chosen)
        is_wrong = sample_id % 2 == 0 and not is_right
        rejected.append(sample if is_wrong else other)
        is_sample.append(chosen.new_tensor([is_right, is_wrong]))
    return {"rejected": rejected, "is_sample": is_sample}


def sampled_pairwise(chosen: Tensor, rejected: Tensor, batch: Batch, pairs: PairLoss) -> tuple[Tensor, Stats]:
    """As `pairwise`, of the pairs that `with_samples` made.

    Statistics: `pair_accuracy`; `sample_score` and `sample_score_square`, of the policy's responses the mean score and
    its square, with which PPO standardises rewards.
    """
    loss, stats = pairwise(chosen, rejected, batch, pairs)
    is_sample = torch.stack(batch.data["is_sample"]).bool()  # [pairs, 2]
    scores = torch.stack([chosen, rejected], 1)[is_sample].double()
    of_samples = {"sample_score": mean_of(scores), "sample_score_square": mean_of(scores.square())}
    return loss, {"pair_accuracy": stats["pair_accuracy"]} | (of_samples if len(scores) else {})


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
