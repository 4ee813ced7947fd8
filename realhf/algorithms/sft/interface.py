"""Supervised fine-tuning as a model function call."""

from collections.abc import Sequence

from torch import Tensor

from realhf.algorithms.functional import predicting_positions, token_statistics
from realhf.algorithms.sft.config import SFT
from realhf.algorithms.statistics import add_stats, mean_of
from realhf.engine.batch import Batch
from realhf.engine.interface import CallResult, Context, Model, Stats
from realhf.parallel.vocabulary import Logits


class SFTInterface:
    """See `SFT`."""

    def __init__(self, config: SFT):
        """`config` has no settings."""

    def train_step(self, model: Model, mini_batches: Sequence[Batch], context: Context) -> CallResult:
        stats = add_stats(
            model.train_step(batch, "tokens", _loss, _answer_tokens, context.micro_batches) for batch in mini_batches
        )
        return CallResult(stats=stats) if context.holds_outputs else CallResult()


def _loss(logits: Logits, batch: Batch) -> tuple[Tensor, Stats]:
    """`logits` [tokens, vocab]."""
    tokens = batch.packed("tokens")
    if "loss_mask" in batch.data:  # the first token of a sequence is never in the loss
        places = batch.packed("loss_mask").values.nonzero()[:, 0] - 1
    else:
        prompt_lengths = [int(length) for length in batch.data["prompt_length"]]
        places = predicting_positions(tokens.lengths, prompt_lengths, logits.device)
    answers = token_statistics(logits[places], tokens.values[places + 1])  # [answers]
    return -answers.logprob.sum(), {"token_accuracy": mean_of(answers.is_top)}


def _answer_tokens(batch: Batch) -> float:
    if "loss_mask" in batch.data:
        return float(sum(int(mask.sum()) for mask in batch.data["loss_mask"]))
    pairs = zip(batch.data["tokens"], batch.data["prompt_length"], strict=True)
    return float(sum(len(tokens) - int(prompt_length) for tokens, prompt_length in pairs))
