"""The optimizer steps of an update, and the statistics that they add up."""

from typing import Any

import pytest
import torch

from realhf.algorithms.script.update import optimizer_steps
from realhf.algorithms.statistics import add_stats, mean_of, prefixed
from tests.unit.algorithms.conftest import SingleContext


def steps(
    kl: list[tuple[float, float]], epochs: int = 1, max_kl: float | None = None, **surroundings: Any
) -> tuple[list[str], Any]:
    """Mini-batches "a" and "b", and the statistic of each step: (the mini-batches in the order of their steps, the
    statistics of the update)."""
    seen: list[str] = []

    def step(batch: str) -> Any:
        seen.append(batch)
        return {"loss": (1.0, 2.0), "kl_from_rollout": kl[len(seen) - 1]}

    context = SingleContext(**surroundings)
    return seen, optimizer_steps(step, ["a", "b"], context, torch.device("cpu"), epochs=epochs, max_kl=max_kl)


def test_epochs_pass_over_the_mini_batches_in_their_order() -> None:
    seen, stats = steps([(0.0, 1.0)] * 6, epochs=3)
    assert seen == ["a", "b"] * 3
    assert stats == {"loss": (6.0, 12.0), "kl_from_rollout": (0.0, 6.0)}


@pytest.mark.parametrize(
    ("kl", "made"),
    [
        # Sums over 10 tokens, and max_kl = 0.25: at most 2.5.
        ([(2.5, 10.0)] * 4, 4),  # as far as allowed
        ([(2.5, 10.0), (2.6, 10.0), (0.0, 10.0), (0.0, 10.0)], 2),
        ([(2.6, 10.0)] * 4, 1),
        ([(3.0, 100.0)] * 4, 4),  # of many tokens, the mean is small
        ([(0.3, 1.0)] * 4, 1),  # of one
        (
            [(2.0, 10.0), (2.0, 10.0), (2.0, 10.0), (9.0, 10.0)],
            4,
        ),  # each step's own; the last ends anyway
    ],
)
def test_the_bound_of_the_divergence_is_one_of_the_mean_over_tokens(kl: list[tuple[float, float]], made: int) -> None:
    seen, stats = steps(kl, epochs=2, max_kl=0.25)
    assert len(seen) == made
    assert stats["loss"] == (made, 2.0 * made)
    assert stats.get("stopped_after") == (None if made == 4 else (made, 1.0))


def test_the_divergence_is_that_of_all_ranks() -> None:
    """This rank's 2.6 over 10 tokens is too far alone, and not with the 0 over 10 of another; and the other way."""
    far, near = torch.tensor([2.6, 10.0]).double(), torch.tensor([0.0, 10.0]).double()
    assert len(steps([(2.6, 10.0)] * 2, max_kl=0.25, peers=[near])[0]) == 2
    assert len(steps([(0.0, 10.0)] * 2, max_kl=0.125, peers=[far])[0]) == 1
    assert len(steps([(0.0, 10.0)] * 2, max_kl=0.135, peers=[far])[0]) == 2


def test_a_step_without_the_statistic_goes_on() -> None:
    """Where a mini-batch is skipped, and on ranks that hold no outputs."""
    context = SingleContext()
    made = optimizer_steps(lambda batch: {}, ["a", "b"], context, torch.device("cpu"), epochs=1, max_kl=0.1)
    assert made == {}


def test_statistics_add_up() -> None:
    parts = [{"loss": (1.0, 2.0), "kl": (5.0, 1.0)}, {"loss": (0.5, 3.0)}]
    assert add_stats(parts) == {"loss": (1.5, 5.0), "kl": (5.0, 1.0)}
    assert add_stats([]) == {}
    assert prefixed("actor", {"loss": (1.0, 2.0)}) == {"actor_loss": (1.0, 2.0)}
    assert mean_of(torch.tensor([1.0, 2.5])) == (3.5, 2.0)
    assert mean_of(torch.tensor([True, False, True])) == (2.0, 3.0)
