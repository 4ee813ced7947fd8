"""The line through measured times of a collective, against numbers worked out by hand."""

import math

import pytest

from realhf.base.errors import UserError
from realhf.planning.model.osdp.collective_costs import NO_COSTS, CollectiveCost, fitted


def test_times_on_a_line_give_the_line() -> None:
    found = fitted((1000, 2000, 10_000), (3.0, 4.0, 12.0))
    assert (found.latency_s, found.seconds_per_byte) == (pytest.approx(2.0), pytest.approx(0.001))
    assert found.seconds(5000) == pytest.approx(7.0)


def test_errors_count_in_proportion_to_the_times() -> None:
    # (size, seconds): (0, 1), (1, 3), (1, 6). The line a + b x with the least (a - 1)^2 + ((a + b) / 3 - 1)^2 +
    # ((a + b) / 6 - 1)^2 has a = 1, and a + b = (1/3 + 1/6) / (1/9 + 1/36) = 3.6 rather than the mean, 4.5.
    found = fitted((0, 1, 1), (1.0, 3.0, 6.0))
    assert (found.latency_s, found.seconds_per_byte) == (pytest.approx(1.0), pytest.approx(2.6))


def test_neither_number_is_below_zero() -> None:
    # From (1, 1) to (2, 4) the line begins below 0: through 0 it has y = (1 + 2/4) / (1 + 4/16).
    steep = fitted((1, 2), (1.0, 4.0))
    assert (steep.latency_s, steep.seconds_per_byte) == (0.0, pytest.approx(1.2))
    # From (1, 4) to (2, 2) it falls: a constant has (1/4 + 1/2) / (1/16 + 1/4).
    falling = fitted((1, 2), (4.0, 2.0))
    assert (falling.latency_s, falling.seconds_per_byte) == (pytest.approx(2.4), 0.0)
    # From (1, 2) to (2, 1.5) it falls by half a second a byte: a constant has (1/2 + 2/3) / (1/4 + 4/9).
    falling = fitted((1, 2), (2.0, 1.5))
    assert (falling.latency_s, falling.seconds_per_byte) == (pytest.approx((7 / 6) / (25 / 36)), 0.0)


def test_a_short_latency_is_one() -> None:
    """From (1, 1.5) to (2, 2.5): half a second, and one a byte. From (1, 1.5) to (2, 3.5) it begins half a second below
    0: through 0 it has (2/3 + 4/7) / (4/9 + 16/49)."""
    found = fitted((1, 2), (1.5, 2.5))
    assert (found.latency_s, found.seconds_per_byte) == (pytest.approx(0.5), pytest.approx(1.0))
    found = fitted((1, 2), (1.5, 3.5))
    assert (found.latency_s, found.seconds_per_byte) == (0.0, pytest.approx((2 / 3 + 4 / 7) / (4 / 9 + 16 / 49)))


def test_one_rank_pays_nothing() -> None:
    for cost in (NO_COSTS.all_reduce, NO_COSTS.all_gather, NO_COSTS.reduce_scatter):
        assert cost.seconds(0) == cost.seconds(1e12) == 0.0


@pytest.mark.parametrize(
    ("sizes", "seconds"), [((1,), (1.0,)), ((2, 2), (1.0, 1.0)), ((1, 2), (1.0, 0.0)), ((1, 2), (1.0,))]
)
def test_what_gives_no_line_is_refused(sizes: tuple[int, ...], seconds: tuple[float, ...]) -> None:
    with pytest.raises(UserError, match="give no line; measure two sizes or more"):
        fitted(sizes, seconds)


@pytest.mark.parametrize("value", [-1.0, math.nan])
def test_broken_costs_are_refused(value: float) -> None:
    with pytest.raises(UserError, match="seconds_per_byte"):
        CollectiveCost(latency_s=0.0, seconds_per_byte=value)
