"""That the division of a batch over ranks changes nothing that tensor functions make of it."""

import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.algorithms.grpo.config import GRPO
from realhf.algorithms.grpo.functions import group_advantages
from realhf.algorithms.ppo.config import PPOHyperparameters
from realhf.algorithms.ppo.functions import ppo_advantages
from realhf.algorithms.reinforce_pp.config import ReinforcePlusPlus
from realhf.algorithms.reinforce_pp.functions import reinforce_pp_advantages
from realhf.algorithms.rloo.config import RLOO
from realhf.algorithms.rloo.functions import rloo_advantages
from realhf.algorithms.safe_rlhf.config import SafeRLHF
from realhf.algorithms.safe_rlhf.functions import safe_advantages
from tests.unit.algorithms.conftest import SingleContext
from tests.unit.algorithms.rollouts import LENGTHS, columns_of, f64, random_columns

PPO_OPTIONS = PPOHyperparameters(kl_controller="adaptive", kl_target=0.1, normalise_values=True)


FUNCTIONS = {
    "ppo": lambda x, c: ppo_advantages(x, x, x, x, PPO_OPTIONS, context=c),
    "grpo": lambda x, c: group_advantages(x, x, x, GRPO(scale_rewards="group"), context=c),
    "grpo_batch": lambda x, c: group_advantages(x, x, x, GRPO(scale_rewards="batch"), context=c),
    "grpo_filter": lambda x, c: group_advantages(x, x, x, GRPO(drop_uniform_groups=True, groups_per_step=1), context=c),
    "rloo": lambda x, c: rloo_advantages(x, x, x, RLOO(normalise_advantages=True), context=c),
    "reinforce_pp": lambda x, c: reinforce_pp_advantages(x, x, x, ReinforcePlusPlus(), context=c),
    "reinforce_pp_group": lambda x, c: reinforce_pp_advantages(
        x, x, x, ReinforcePlusPlus(baseline="group", samples_per_prompt=4), context=c
    ),
    "safe": lambda x, c: safe_advantages(x, x, x, x, SafeRLHF(), context=c),
}


def on_ranks(function: Any, data: dict[str, list[torch.Tensor]], ranks: list[list[int]]) -> list[Any]:
    """What a function gives on each rank, with its sums over all of them (one thread a rank)."""

    barrier, values = threading.Barrier(len(ranks), timeout=30), [torch.zeros(())] * len(ranks)

    def sum_of(rank: int) -> Any:
        def total(mine: torch.Tensor) -> torch.Tensor:
            values[rank] = mine
            barrier.wait()
            found = sum(values[1:], values[0].clone())
            barrier.wait()
            return found

        return total

    results: list[Any] = [None] * len(ranks)

    def run(rank: int) -> None:
        surroundings = SingleContext(batch_size=len(LENGTHS), samples_per_prompt=4)
        surroundings.sum_over_data_parallel = sum_of(rank)
        made = function(columns_of(data, places=ranks[rank]), surroundings)[0]
        results[rank] = (made, surroundings.state)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


@pytest.mark.parametrize("name", FUNCTIONS)
@settings(max_examples=8)
@given(order=st.permutations(range(len(LENGTHS))), cut=st.integers(1, len(LENGTHS) - 1), seed=st.integers(0, 3))
def test_the_division_over_ranks_changes_nothing(name: str, order: list[int], cut: int, seed: int) -> None:
    """One rank with all samples in order, and two with any of them in any order: the same columns, the same state."""
    data = random_columns(seed)
    data["valid"] = [f64(float(i != 2)) for i in range(len(LENGTHS))]
    ((whole, state),) = on_ranks(FUNCTIONS[name], data, [list(range(len(LENGTHS)))])
    ranks = [order[:cut], order[cut:]]
    for places, (made, its_state) in zip(ranks, on_ranks(FUNCTIONS[name], data, ranks), strict=True):
        assert its_state == pytest.approx(state, rel=1e-12)
        for key, column in made.items():
            for place, values in zip(places, column, strict=True):
                torch.testing.assert_close(values, whole[key][place], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_samples_that_do_not_count_change_nothing(name: str) -> None:
    data = random_columns(1)
    data["valid"] = [f64(float(i not in (2, 5))) for i in range(len(LENGTHS))]
    ((before, state),) = on_ranks(FUNCTIONS[name], data, [list(range(len(LENGTHS)))])
    for key in ("reward", "logprob", "value"):
        data[key] = [x + 7 if i in (2, 5) else x for i, x in enumerate(data[key])]
    ((after, its_state),) = on_ranks(FUNCTIONS[name], data, [list(range(len(LENGTHS)))])
    assert its_state == state
    for i in set(range(len(LENGTHS))) - {2, 5}:
        assert torch.equal(after["advantage"][i], before["advantage"][i])
    assert all((after["advantage"][i] == 0).all() for i in (2, 5))
