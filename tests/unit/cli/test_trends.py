"""The course of a statistic as bars."""

import math

import pytest

from realhf.cli.trends import _bars


@pytest.mark.parametrize(
    ("parts", "bars"),
    [
        ([0.0, 1.0, 7.0], "▁▂█"),
        ([3.0, None, math.nan, math.inf, 5.0], "▁   █"),
        ([2.0, 2.0 + 1e-9], "▁▁"),
        ([-1e308, 0.0, 1.7e308], "▁▄█"),  # whose difference is no number
        ([], ""),
    ],
)
def test_bars_go_from_the_lowest_to_the_highest(parts: list[float | None], bars: str) -> None:
    assert _bars(parts) == bars
