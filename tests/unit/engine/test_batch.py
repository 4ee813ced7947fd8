"""Micro-batches: balanced by tokens, the same whatever surrounds them, pairs kept together."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from realhf.engine.batch import Batch, balanced_places


def test_balanced_by_hand() -> None:
    # 9 | 8 | 7, then 5 to the 7, 4 to the 8, 2 to the 9, 1 to the 9 + 2.
    assert balanced_places([4, 9, 1, 8, 5, 7, 2], 3) == [[1, 2, 6], [0, 3], [4, 5]]
    assert balanced_places([3, 3, 3, 3], 2) == [[0, 2], [1, 3]]
    assert balanced_places([1, 100], 2) == [[1], [0]]


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=24), data=st.data())
def test_every_place_once_and_no_part_above_what_memory_is_planned_for(sizes: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(sizes)))
    groups = balanced_places(sizes, parts)
    assert sorted(place for group in groups for place in group) == list(range(len(sizes)))
    assert all(groups)
    sums = [sum(sizes[place] for place in group) for group in groups]
    assert max(sums) <= -(-len(sizes) // parts) * max(sizes)
    assert max(sums) <= sum(sizes) / parts + max(sizes)


def test_pairs_stay_together() -> None:
    lengths = [9, 1, 2, 2, 3, 4, 5, 5]  # pairs of 10, 4, 7, 10
    batch = Batch(tuple(range(8)), {"tokens": [torch.zeros(n) for n in lengths]}, together=2)
    assert batch.balanced("tokens", 2) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert batch.to(torch.device("cpu")).with_data(other=[]).together == 2


def test_more_parts_than_samples_are_refused() -> None:
    with pytest.raises(AssertionError, match="3 parts of 2"):
        balanced_places([1, 2], 3)
