"""The optimizer steps of an update: epochs over the mini-batches, and an end where the policy has moved far enough."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from realhf.algorithms.statistics import add_stats
from realhf.engine.batch import Batch
from realhf.engine.interface import Context, Stats

KL_STATISTIC = "kl_from_rollout"


def device_of(batches: Sequence[Batch]) -> torch.device:
    """Where their sequences are."""
    return batches[0].data["seq"][0].device


MiniBatch = TypeVar("MiniBatch")


def optimizer_steps(
    step: Callable[[MiniBatch], Stats],
    mini_batches: Sequence[MiniBatch],
    context: Context,
    device: torch.device,
    *,
    epochs: int,
    max_kl: float | None,
) -> Stats:
    """The statistics of `epochs` passes over the mini-batches, in their order, with one optimizer step on each.

    The update ends after a step in whose pass the mean of the statistic `kl_from_rollout` was above `max_kl`, if there
    is one; the statistic `stopped_after` then counts the steps. All ranks of the call end alike: `step` gives
    statistics on the last pipeline stage alone, and their sum, made on `device`, reaches all.
    """
    steps = list(mini_batches) * epochs
    stats: Stats = {}
    for number, batch in enumerate(steps, start=1):
        made = step(batch)
        stats = add_stats([stats, made])
        if max_kl is not None and number < len(steps):
            moved = torch.tensor(made.get(KL_STATISTIC, (0.0, 0.0)), dtype=torch.float64, device=device)
            kl, tokens = context.sum_over_outputs(moved).tolist()
            if kl > max_kl * tokens:
                return stats | {"stopped_after": (float(number), 1.0)}
    return stats
