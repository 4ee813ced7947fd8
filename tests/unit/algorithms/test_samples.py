"""What functions of rollouts share, by hand: samples that count, groups, corrections, statistics."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from realhf.algorithms.grpo.config import GRPO
from realhf.algorithms.samples import (
    at_tokens,
    drawn_by,
    filtered_stats,
    importance_columns,
    in_groups,
    is_whole,
    lengths_of,
    of_ids,
    of_responses,
    responses,
    rewards_of,
    rollout_stats,
    sums_of,
    valid_column,
    validity,
)
from realhf.api.script.columns import Columns
from realhf.base.errors import UserError
from realhf.engine.batch import Batch
from realhf.engine.returned import InterfaceError
from tests.unit.algorithms.conftest import SingleContext
from tests.unit.algorithms.rollouts import f64


def rollout(*answers: list[int], **others: list[Tensor]) -> Columns:
    data: dict[str, Any] = {
        "prompt": [torch.tensor([1, 3])] * len(answers),
        "seq": [torch.tensor([1, 3, *answer]) for answer in answers],
        "logprob": [torch.zeros(len(answer), dtype=torch.float64) for answer in answers],
    }
    return Columns(range(len(answers)), data | others)


def test_responses_and_their_lengths() -> None:
    given = rollout([5, 6], [], [7])
    assert [x.tolist() for x in responses(given)] == [[5, 6], [], [7]]
    assert lengths_of(given.logprob).tolist() == [2, 0, 1]
    each = at_tokens(f64(0.5, 1.0, -2.0), torch.tensor([2, 0, 1]))
    assert [x.tolist() for x in each] == [[0.5, 0.5], [], [-2.0]]


def test_samples_count_where_valid_is_above_zero() -> None:
    assert validity(rollout([5], [5])).tolist() == [True, True]
    assert validity(rollout([5], [5], [5], valid=[f64(1), f64(0), f64(0.5)])).tolist() == [True, False, True]
    assert [x.tolist() for x in valid_column(torch.tensor([True, False]), [torch.zeros(1)] * 2)] == [[1.0], [0.0]]


def test_one_number_a_response() -> None:
    given = Columns((4, 7), {"reward": [torch.tensor([1.5]), torch.tensor([-2.0, 0.5])]})
    rewards = rewards_of(given, rollout([5, 5], [5, 5]))
    assert [(x.tolist(), x.dtype) for x in rewards] == [([1.5], torch.float64), ([-2.0, 0.5], torch.float64)]
    assert sums_of(rewards).tolist() == [1.5, -1.5]
    assert sums_of(rewards[:1]).tolist() == [1.5]
    with pytest.raises(InterfaceError, match=r"'cost' of sample 7 has the shape \[\], must be \[1\]"):
        of_responses("cost", [torch.zeros(1), torch.tensor(1.0)], (4, 7))


def test_ratios_are_to_what_was_computed_again() -> None:
    data = {"logprob": [f64(-1.0), f64(-2.0)]}
    assert drawn_by(Batch((0, 1), data)).tolist() == [-1.0, -2.0]
    assert drawn_by(Batch((0, 1), {**data, "old_logprob": [f64(-3.0), f64(-4.0)]})).tolist() == [-3.0, -4.0]


def test_groups_are_of_all_samples_in_the_order_of_their_ids() -> None:
    context = SingleContext(batch_size=6, samples_per_prompt=2)
    rewards, is_counted = in_groups(
        context, (4, 1, 0, 5, 2), f64(40, 10, 7, 50, math.nan), torch.tensor([True, True, False, True, False])
    )
    # Sample 3 is on another rank, samples 0 and 2 do not count: neither has a number here.
    assert rewards.tolist() == [[0, 10], [0, 0], [40, 50]]
    assert is_counted.tolist() == [[False, True], [False, False], [True, True]]
    assert of_ids(rewards, (5, 1)).tolist() == [50, 10]


def test_whole_responses_end_by_themselves_or_are_shorter_than_allowed() -> None:
    options = GRPO(**{"max_new_tokens": 3, "eos_token": 2, "stop_sequences": ((7, 8), (9,))})
    answers = ([5, 5, 5], [5, 5, 2], [5, 5], [5, 7, 8], [5, 5, 9], [7, 8, 5], [], [2, 5, 5])
    assert is_whole(rollout(*answers), options).tolist() == [False, True, True, True, True, False, True, False]


def test_importance() -> None:
    given = rollout([5, 5], [5])
    old = Columns((0, 1), {"old_logprob": [f64(math.log(4), math.log(0.1)), f64(math.log(1.5))]})
    assert importance_columns(given, old, GRPO()) == {}
    options = GRPO(importance_correction="token_truncate", importance_low=0.5, importance_high=3.0)
    found = importance_columns(given, old, options)["importance"]
    assert [x.tolist() for x in found] == [pytest.approx([3.0, 0.5]), pytest.approx([1.5])]
    options = GRPO(importance_correction="sequence_mask", importance_low=0.5, importance_high=1.6)
    found = importance_columns(given, old, options)["importance"]
    assert [x.tolist() for x in found] == [[0.0, 0.0], pytest.approx([1.5])]  # 4 x 0.1
    for without in (None, given):
        with pytest.raises(UserError, match=r"importance_correction='sequence_mask' weighs.*no column old_logprob"):
            importance_columns(given, without, options)


# Prompts of 2 tokens and responses of 2 and 1; log(policy / reference) 1, 0.5 and -1.
GIVEN = {
    "reward": [f64(2.0), f64(5.0)],
    "logprob": [f64(-1.0, -2.0), f64(-4.0)],
    "ref_logprob": [f64(-2.0, -2.5), f64(-3.0)],
}


def columns(*names: str, **others: list[Tensor]) -> dict[str, Any]:
    given = rollout([5, 5], [5])
    return {"prompt": given.prompt, "seq": given.seq, **{name: GIVEN[name] for name in names}, **others}


def test_statistics_of_rollouts() -> None:
    lengths = {"response_length": (3.0, 2.0)}
    assert rollout_stats(columns()) == lengths
    assert rollout_stats(columns("reward")) == lengths | {"reward_mean": (7.0, 2.0)}
    assert rollout_stats(columns("ref_logprob")) == lengths
    assert rollout_stats(columns("logprob")) == lengths | {"entropy": (7.0, 3.0)}
    everything = lengths | {"reward_mean": (7.0, 2.0), "entropy": (7.0, 3.0)}
    everything |= {"kl": (0.5, 3.0), "kl_per_sequence": (0.5, 2.0)}
    assert rollout_stats(columns(*GIVEN)) == everything
    second = {"response_length": (1.0, 1.0), "reward_mean": (5.0, 1.0), "entropy": (4.0, 1.0)}
    second |= {"kl": (-1.0, 1.0), "kl_per_sequence": (-1.0, 1.0)}
    assert rollout_stats(columns(*GIVEN, valid=[f64(0.0), f64(1.0)])) == second
    assert rollout_stats(columns(*GIVEN, valid=[f64(0.0), f64(0.0)])) == {}


def test_what_a_filter_leaves_out_of_training_is_in_the_statistics() -> None:
    """All that were scored: a sample without a score is in neither."""
    given = Columns((0, 1), columns("logprob"))
    ref = Columns((0, 1), {"ref_logprob": GIVEN["ref_logprob"]})
    scores = Columns((0, 1), {"reward": GIVEN["reward"]})
    made = {"valid": [f64(0.0), f64(1.0)]}
    assert filtered_stats({}, given, scores, ref) == {}
    assert filtered_stats(made, given, scores, ref) == rollout_stats(columns(*GIVEN))
    assert filtered_stats(made, given, scores, None) == rollout_stats(columns("reward", "logprob"))
    marked = Columns((0, 1), {"reward": GIVEN["reward"], "valid": [f64(1.0), f64(0.0)]})
    assert filtered_stats(made, given, marked, None)["reward_mean"] == (2.0, 1.0)
