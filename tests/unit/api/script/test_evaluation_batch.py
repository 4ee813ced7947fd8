"""How many held-out rows a script evaluates at a time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.api.script.experiment import evaluation_batch


@pytest.mark.parametrize(
    ("rows", "most", "size"),
    [(512, 128, 128), (101, 128, 96), (500, 128, 120), (7, 128, 7), (8, 128, 8), (300, 32, 32), (20, 64, 16)],
)
def test_known_ones(rows: int, most: int, size: int) -> None:
    assert evaluation_batch(rows, most) == size


@given(st.integers(8, 5000), st.integers(8, 512))
def test_few_rows_are_left_out(rows: int, most: int) -> None:
    size = evaluation_batch(rows, most)
    assert size % 8 == 0
    assert 0 < size <= min(rows, most)
    assert rows % size < max(8, rows // 20 + 1)
