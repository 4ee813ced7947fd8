"""Rows of every kind as rollouts: sequences `seq` that begin with a `prompt`."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from realhf.api.script.config import Rows
from realhf.engine.batch import Batch


def as_rollouts(batch: Batch, rows: Rows) -> Batch:
    """The sequences of a batch with the columns `prompt` and `seq` beside its own.

    Examples with a `loss_mask` have it for the tokens behind the prompt as `in_loss`. Of n pairs it has 2n rows, chosen
    and rejected in turn, which stay together; other columns stand in both.
    """
    data = batch.data
    match rows:
        case "rollout":
            return batch
        case "examples":
            lengths = [int(length) for length in data["prompt_length"]]
            # A text that is all response begins with a token that nothing predicts.
            prompts = [tokens[: max(1, length)] for tokens, length in zip(data["tokens"], lengths, strict=True)]
            rollouts = batch.with_data(prompt=prompts, seq=data["tokens"])
            if "loss_mask" not in data:
                return rollouts
            masks = zip(data["loss_mask"], prompts, strict=True)
            return rollouts.with_data(in_loss=[mask[len(prompt) :] for mask, prompt in masks])
        case "pairs":
            ids = tuple(2 * sample + side for sample in batch.ids for side in (0, 1))
            twice = {key: [value for value in column for _ in (0, 1)] for key, column in data.items()}
            sides = zip(data["chosen"], data["rejected"], strict=True)
            return Batch(ids, {**twice, "seq": [sequence for pair in sides for sequence in pair]}, together=2)


def pairs_of(rollouts: Batch) -> Batch:
    """The pairs of a micro-batch that `as_rollouts` made."""
    data = {key: column[::2] for key, column in rollouts.data.items() if key != "seq"}
    return Batch(tuple(sample // 2 for sample in rollouts.ids[::2]), data)


def divided(batch: Batch, sizes: Sequence[int]) -> list[Batch]:
    """The mini-batches of `sizes` samples."""
    ends = [0, *accumulate(sizes)]
    parts = [batch.select(range(start, end)) for start, end in pairwise(ends)]
    return [replace(part, together=batch.together) for part in parts]
