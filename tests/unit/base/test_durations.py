"""Lengths of time in words."""

import pytest

from realhf.base.durations import duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.9, "9.9 s"), (59.4, "59 s"), (59.6, "1 min"), (200, "3 min 20 s"), (7500, "2 h 5 min"),
     (86_400 * 3 + 3600 * 4 + 59, "3 d 4 h"), (86_400, "1 d")],
)  # fmt: skip
def test_durations_have_their_two_largest_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text
