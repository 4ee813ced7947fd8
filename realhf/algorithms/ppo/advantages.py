"""From scores, values and log-probabilities of a batch of rollouts to advantages and returns."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from torch import Tensor

from realhf.algorithms.ppo.config import PPOHyperparameters
from realhf.algorithms.ppo.functions import ppo_advantages
from realhf.api.script.columns import Columns
from realhf.engine.batch import Batch, concatenate
from realhf.engine.interface import Context, Stats


@dataclass(frozen=True)
class Advantages:
    """The mini-batches with the columns `advantage` and `return` [response] added, and the statistics of it."""

    mini_batches: list[Batch]
    stats: Stats


def add_advantages(mini_batches: Sequence[Batch], ppo: PPOHyperparameters, context: Context) -> Advantages:
    """Estimates advantages once for the whole call, before any of its mini-batches changes the model."""
    whole = concatenate(mini_batches)
    columns = Columns(whole.ids, whole.data)
    made, stats = ppo_advantages(columns, columns, columns, columns, ppo, context=context)
    return Advantages(
        [
            batch.with_data(**{"advantage": advantages, "return": returns})
            for batch, advantages, returns in zip(
                mini_batches,
                _divided(made["advantage"], mini_batches),
                _divided(made["return"], mini_batches),
                strict=True,
            )
        ],
        stats,
    )


def _divided(column: list[Tensor], mini_batches: Sequence[Batch]) -> list[list[Tensor]]:
    each = iter(column)
    return [list(islice(each, len(batch))) for batch in mini_batches]
