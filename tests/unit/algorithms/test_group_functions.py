"""Statistics of groups against numbers worked out by hand, and their invariances."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.algorithms import functional as F

ALL = torch.ones(2, 4, dtype=torch.bool)


def f64(rows):
    return torch.tensor(rows, dtype=torch.float64)


def assert_close(actual, expected, tolerance=1e-9):
    torch.testing.assert_close(actual, f64(expected), rtol=tolerance, atol=tolerance)


def test_group_advantages():
    # Group 0: 1, 0, 0, 1: mean 1/2, squares 4 x 1/4, deviation sqrt(1/3). Group 1 is uniform.
    rewards = f64([[1, 0, 0, 1], [2, 2, 2, 2]])
    a = 0.5 / (math.sqrt(1 / 3) + 1e-4)
    assert_close(F.group_advantages(rewards, ALL, "group"), [[a, -a, -a, a], [0, 0, 0, 0]])
    assert_close(F.group_advantages(rewards, ALL, "none"), [[0.5, -0.5, -0.5, 0.5], [0, 0, 0, 0]])
    # The batch: mean 10/8, squares 2 x 1 + 4 x 4 = 18, variance (18 - 8 x 25/16) / 7 = 5.5/7.
    b = 0.5 / (math.sqrt(5.5 / 7) + 1e-4)
    assert_close(F.group_advantages(rewards, ALL, "batch"), [[b, -b, -b, b], [0, 0, 0, 0]])


def test_what_is_not_valid_counts_nowhere():
    rewards = f64([[1, 0, 99, math.nan], [3, 5, 7, 9]])
    valid = torch.tensor([[True, True, False, False], [True, False, False, False]])
    # Group 0: 1, 0 with mean 1/2 and deviation sqrt(1/2). Group 1 has one member, which is its own mean.
    a = 0.5 / (math.sqrt(0.5) + 1e-4)
    assert_close(F.group_advantages(rewards, valid, "group"), [[a, -a, 0, 0], [0, 0, 0, 0]])
    assert_close(F.leave_one_out_advantages(rewards, valid), [[1, -1, 0, 0], [0, 0, 0, 0]])
    # Over the batch: 1, 0, 3 with mean 4/3 and variance (10 - 16/3) / 2 = 7/3.
    s = math.sqrt(7 / 3) + 1e-4
    assert_close(F.normalised(rewards, valid), [[-1 / 3 / s, -4 / 3 / s, 0, 0], [5 / 3 / s, 0, 0, 0]])


def test_leave_one_out():
    # 6: the others' mean is (1 + 2 + 3) / 3 = 2; and so on.
    rewards = f64([[6, 1, 2, 3], [0, 0, 0, 0]])
    assert_close(F.leave_one_out_advantages(rewards, ALL), [[4, 1 - 11 / 3, 2 - 10 / 3, 0], [0, 0, 0, 0]])


def test_groups_are_centred():
    # 1, 3 with mean 2; 5 alone; none.
    x = f64([[1, 3, 99], [5, math.nan, 99], [7, 8, 9]])
    valid = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
    assert F.centred_in_groups(x, valid).tolist() == [[-1, 1, 0], [0, 0, 0], [0, 0, 0]]
    assert F.centred_in_groups(x.float(), valid).dtype == torch.float32


def test_informative_groups_and_the_first_of_them():
    rewards = f64([[1, 1], [0, 1], [2, 2], [5, 3], [1, 0]])
    valid = torch.ones(5, 2, dtype=torch.bool)
    valid[4, 1] = False  # the one that differs does not count
    chosen = F.is_informative(rewards, valid)
    assert chosen.tolist() == [False, True, False, True, False]
    assert F.first_groups(chosen, 1).tolist() == [False, True, False, False, False]
    assert torch.equal(F.first_groups(chosen, 7), chosen)
    assert not F.first_groups(chosen, 0).any()
    odd = f64([[9, 3, 3], [-9, 3, 3], [0, 0, 0]])
    assert not F.is_informative(odd, torch.tensor([[False, True, True], [False, True, True], [False] * 3])).any()


groups = st.lists(st.lists(st.floats(-10, 10), min_size=4, max_size=4), min_size=2, max_size=5)


@pytest.mark.parametrize(
    "advantages",
    [
        lambda r, v: F.group_advantages(r, v, "group"),
        lambda r, v: F.group_advantages(r, v, "batch"),
        lambda r, v: F.group_advantages(r, v, "none"),
        F.leave_one_out_advantages,
        F.normalised,
    ],
)
@settings(max_examples=25)
@given(rewards=groups, shift=st.floats(-5, 5), seed=st.integers(0, 99))
def test_invariances(advantages, rewards, shift, seed):
    """Shifting all rewards changes nothing; permuting samples or groups permutes advantages; invalid ones are 0."""
    generator = torch.Generator().manual_seed(seed)
    r = f64(rewards)
    valid = torch.rand(r.shape, generator=generator) < 0.8
    found = advantages(r, valid)
    torch.testing.assert_close(advantages(r + shift, valid), found, rtol=1e-6, atol=1e-6)
    columns, rows = torch.randperm(4, generator=generator), torch.randperm(len(r), generator=generator)
    permuted = advantages(r[rows][:, columns], valid[rows][:, columns])
    torch.testing.assert_close(permuted, found[rows][:, columns], rtol=1e-9, atol=1e-9)
    assert (found[~valid] == 0).all()
    changed = torch.where(valid, r, torch.full_like(r, math.nan))
    torch.testing.assert_close(advantages(changed, valid), found, rtol=0, atol=0)
