"""Ranges of numbers from outside."""

import math

import pytest

from realhf.base.errors import UserError
from realhf.base.numbers import check_range


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, 1e6])
def test_numbers_out_of_range_are_refused_by_name(value: float) -> None:
    with pytest.raises(UserError, match=r"--memory-gb .* is not from 0.5 to 1,000 GB; give"):
        check_range("--memory-gb", value, 0.5, 1000, "GB")


def test_the_bounds_are_in_the_range() -> None:
    assert check_range("steps", 1, 1, 10) == 1
    assert check_range("steps", 10, 1, 10) == 10
