"""Reward modelling as model function calls: pairwise training and measurement, scoring of rollouts."""

from collections.abc import Sequence

import torch
from torch import Tensor

from realhf.algorithms.functional import at_least_fp32, last_positions, pairwise_loss
from realhf.algorithms.reward.config import PairwiseReward, SequenceReward
from realhf.algorithms.statistics import add_stats, mean_of
from realhf.engine.batch import Batch
from realhf.engine.interface import CallResult, Context, Model, Stats


def last_scores(head: Tensor, batch: Batch, tokens_key: str) -> list[Tensor]:
    """Per sequence [1]: the head's value at the last token; `head` [tokens]."""
    lengths = [len(tokens) for tokens in batch.data[tokens_key]]
    return list(at_least_fp32(head)[last_positions(lengths, head.device)].split(1))


class SequenceRewardInterface:
    """See `SequenceReward`."""

    def __init__(self, config: SequenceReward):
        """`config` has no settings."""

    def inference(self, model: Model, batch: Batch, context: Context) -> CallResult:
        outputs = model.forward(
            batch, "seq", lambda head, part: {"reward": last_scores(head, part, "seq")}, context.micro_batches
        )
        return CallResult(outputs=outputs) if context.holds_outputs else CallResult()


class PairwiseRewardInterface:
    """See `PairwiseReward`.

    A batch of n pairs becomes one of 2n sequences, chosen and rejected in turn, and pairs are kept together.
    """

    def __init__(self, config: PairwiseReward):
        self.config = config

    def train_step(self, model: Model, mini_batches: Sequence[Batch], context: Context) -> CallResult:
        stats = add_stats(
            model.train_step(
                _pairs(batch),
                "seq",
                self._loss,
                lambda pairs: len(pairs) / 2,
                context.micro_batches,
            )
            for batch in mini_batches
        )
        return CallResult(stats=stats) if context.holds_outputs else CallResult()

    def inference(self, model: Model, batch: Batch, context: Context) -> CallResult:
        def score(head: Tensor, part: Batch) -> dict[str, list[Tensor]]:
            return {"score": last_scores(head, part, "seq")}

        keys = [key for key in ("chosen", "rejected", "sample") if key in batch.data]
        scores = {
            key: model.forward(Batch(batch.ids, {"seq": batch.data[key]}), "seq", score, context.micro_batches)
            for key in keys
        }
        if not context.holds_outputs:
            return CallResult()
        stacked = {key: torch.cat(output["score"]) for key, output in scores.items()}  # [batch] each
        stats = {"pair_accuracy": mean_of(stacked["chosen"] > stacked["rejected"])}
        if "sample" in stacked:
            stats |= _sample_stats(stacked["sample"])
        return CallResult(stats=stats)

    def _loss(self, head: Tensor, pairs: Batch) -> tuple[Tensor, Stats]:
        scores = torch.cat(last_scores(head, pairs, "seq"))
        chosen, rejected = scores.view(-1, 2).unbind(1)  # [pairs] each
        loss = pairwise_loss(chosen, rejected, self.config.score_square_coef).sum()
        is_sample = torch.cat(pairs.data["is_sample"])
        return loss, {"pair_accuracy": mean_of(chosen > rejected)} | _sample_stats(scores[is_sample])


def _sample_stats(scores: Tensor) -> Stats:
    """Statistics of the scores [n] of the policy's sequences; {} if there are none."""
    if not len(scores):
        return {}
    return {"sample_score": mean_of(scores), "sample_score_square": mean_of(scores.detach().double().square())}


def _pairs(batch: Batch) -> Batch:
    """2n sequences `seq`: the chosen and the rejected one of each sample, and whether the policy drew it.

    Samples of an even id use the policy's sequence: as the rejected one if it is wrong; if it is right, it equals the
    chosen one. So the flagged sequences are a fair sample of the policy.
    """
    sequences: list[Tensor] = []
    flags: list[list[bool]] = []
    for i, sample_id in enumerate(batch.ids):
        chosen, rejected = batch.data["chosen"][i], batch.data["rejected"][i]
        chosen_is_sample = rejected_is_sample = False
        if "sample" in batch.data and sample_id % 2 == 0:
            sample = batch.data["sample"][i]
            chosen_is_sample = torch.equal(sample, chosen)
            rejected_is_sample = not chosen_is_sample
            rejected = sample if rejected_is_sample else rejected
        sequences += [chosen, rejected]
        flags += [[chosen_is_sample], [rejected_is_sample]]
    ids = tuple(2 * sample_id + k for sample_id in batch.ids for k in (0, 1))
    device = sequences[0].device
    is_sample = [torch.tensor(flag, device=device) for flag in flags]
    return Batch(ids, {"seq": sequences, "is_sample": is_sample}, together=2)
