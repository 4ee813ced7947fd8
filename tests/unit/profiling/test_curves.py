"""What the profiler measures again, how often, what it makes of the rest, and what it says of it."""

import itertools
from collections.abc import Callable, Iterable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from realhf.cli.profile_tables import noise_lines
from realhf.profiling.curves import backward_floors, isotonic, measured_curves, noise_text
from realhf.profiling.model_bench import Stopwatch
from tests.unit.planning.test_profile import profile


class Readings:
    """Gives each size its seconds in turn, the last of them again and again; keeps the sizes that were asked for."""

    def __init__(self, seconds: dict[int, Iterable[tuple[float, ...]]]):
        self.seconds = {size: list(each) for size, each in seconds.items()}
        self.asked: list[int] = []

    def __call__(self, size: int) -> tuple[float, ...]:
        self.asked.append(size)
        rest = self.seconds[size]
        return rest.pop(0) if len(rest) > 1 else rest[0]


def one(*seconds: float) -> list[tuple[float]]:
    return [(each,) for each in seconds]


def test_a_curve_that_grows_is_measured_once() -> None:
    readings = Readings({1: one(1.0), 2: one(1.0), 4: one(3.0)})
    (found,) = measured_curves([1, 2, 4], readings)
    assert (found.curve.sizes, found.curve.seconds, found.noisy) == ((1.0, 2.0, 4.0), (1.0, 1.0, 3.0), ())
    assert readings.asked == [1, 2, 4]


def test_both_sizes_between_which_a_curve_falls_are_measured_again() -> None:
    """In turns, so that what disturbs one moment does not meet one size alone. The median of 9, 2 and 2 s counts."""
    readings = Readings({1: one(1.0), 2: one(9.0, 2.0, 2.0), 4: one(4.0), 8: one(8.0)})
    (found,) = measured_curves([1, 2, 4, 8], readings)
    assert (found.curve.seconds, found.noisy) == ((1.0, 2.0, 4.0, 8.0), ())
    assert readings.asked == [1, 2, 4, 8, 2, 4, 2, 4]


def test_a_second_round_comes_where_the_first_was_disturbed_too() -> None:
    readings = Readings({1: one(1.0), 2: one(9.0, 9.0, 2.0, 2.0, 2.0), 4: one(4.0)})
    (found,) = measured_curves([1, 2, 4], readings)
    assert (found.curve.seconds, found.noisy) == ((1.0, 2.0, 4.0), ())
    assert readings.asked == [1, 2, 4, 2, 4, 2, 4, 2, 4, 2, 4]


def test_the_least_fall_is_measured_again() -> None:
    readings = Readings({1: one(1.0), 2: one(0.9999)})
    (found,) = measured_curves([1, 2], readings)
    assert readings.asked == 5 * [1, 2]
    assert found.curve.seconds[0] == found.curve.seconds[1] == pytest.approx(0.99995)
    assert found.noisy == (), "a hundredth of a per cent is no news"


@pytest.mark.parametrize("nothing", [0.0, -0.5])
def test_zero_is_measured_again_and_never_kept(nothing: float) -> None:
    readings = Readings({1: one(nothing, 1.0, 1.0), 2: one(2.0)})
    (found,) = measured_curves([1, 2], readings)
    assert (found.curve.seconds, found.noisy) == ((1.0, 2.0), ())
    assert readings.asked == [1, 2, 1, 1]


def test_what_stays_impossible_is_measured_five_times_in_all() -> None:
    readings = Readings({1: one(0.0), 2: one(2.0), 4: one(3.0)})
    (found,) = measured_curves([1, 2, 4], readings)
    assert readings.asked.count(1) == 5
    assert readings.asked.count(2) == readings.asked.count(4) == 1
    assert (found.curve.seconds, found.noisy) == ((1e-9, 2.0, 3.0), (1,))


def test_one_bad_size_does_not_spoil_its_neighbours() -> None:
    (found,) = measured_curves([1, 2, 4, 8, 16], Readings({1: one(1), 2: one(50), 4: one(4), 8: one(8), 16: one(16)}))
    assert found.curve.seconds == (1.0, 8.0, 8.0, 8.0, 16.0)
    assert found.noisy == (2, 4)


def test_backward_takes_at_least_a_quarter_of_forwards_best_time() -> None:
    """Forward's best is 1 s a token, at 4 tokens; it counts at every size."""
    readings = Readings({1: [(2.0, 0.2)], 2: [(3.0, 0.6)], 4: [(4.0, -1.0)]})
    forward, backward = measured_curves([1, 2, 4], readings, backward_floors)
    assert (forward.curve.seconds, forward.noisy) == ((2.0, 3.0, 4.0), ())
    # Levelled, all are 0.2.
    assert (backward.curve.seconds, backward.noisy) == ((0.25, 0.5, 1.0), (1, 2, 4))
    assert readings.asked.count(4) == 5
    slight = partial(backward_floors, part=0.02)
    _, backward = measured_curves([1, 2], Readings({1: [(1.0, -1.0)], 2: [(4.0, -1.0)]}), slight)
    assert backward.curve.seconds == (0.02, 0.04)


def test_a_backward_that_is_possible_is_kept() -> None:
    readings = Readings({1: [(2.0, 0.25)], 2: [(3.0, 0.5)], 4: [(4.0, 8.0)]})
    _, backward = measured_curves([1, 2, 4], readings, backward_floors)
    assert (backward.curve.seconds, backward.noisy) == ((0.25, 0.5, 8.0), ())
    assert readings.asked == [1, 2, 4]


seconds = st.floats(-10, 10, allow_nan=False)


@given(st.lists(st.tuples(st.floats(0, 10), seconds), min_size=2, max_size=6), st.integers(0, 3))
def test_no_curve_is_zero_or_falls_whatever_is_measured(at: list[tuple[float, float]], better: int) -> None:
    sizes = [2**k for k in range(len(at))]
    for curve in measured_curves(sizes, lambda size: at[sizes.index(size)], backward_floors):
        assert min(curve.curve.seconds) > 0
        assert list(curve.curve.seconds) == sorted(curve.curve.seconds)
        assert set(curve.noisy) <= set(sizes)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5))
def test_levelled_values_are_the_nearest_that_never_fall(values: list[int]) -> None:
    """Against all sequences of halves that never fall."""
    found = isotonic(values)
    assert found == sorted(found)
    halves = [k / 2 for k in range(9)]
    least = min(
        sum(abs(a - b) for a, b in zip(values, tried, strict=True))
        for tried in itertools.combinations_with_replacement(halves, len(values))
    )
    assert sum(abs(a - b) for a, b in zip(values, found, strict=True)) == least


def test_noise_is_said_with_a_remedy() -> None:
    (found,) = measured_curves([16, 1024], Readings({16: one(9.0), 1024: one(1.0)}))
    text = noise_text("tp=2 layer_backward", "tokens", found)
    assert text == "tp=2 layer_backward at 16, 1,024 tokens"
    noisy = structs.replace(profile(), noisy=(text, "send at 8 bytes"), measured={"repetitions": 5})
    what, remedy = noise_lines(noisy)
    assert "tp=2 layer_backward at 16, 1,024 tokens; send at 8 bytes" in what
    assert "--force --repetitions 10" in remedy
    assert not list(noise_lines(profile()))


class Alone(Stopwatch):
    """The stopwatch of a world of one process without a process group."""

    def _over_ranks(self, value: float, op: object = None) -> float:
        return value


def test_a_difference_that_noise_made_negative_is_not_hidden() -> None:
    """Else nothing would tell the zero from a measurement. The median of three turns: 1, -2 and -2 s."""
    now_s = 0.0

    def work(*taken: float) -> Callable[[], None]:
        times = itertools.cycle(taken)

        def advance() -> None:
            nonlocal now_s
            now_s += next(times)

        return advance

    watch = Alone(torch.device("cpu"), repetitions=3, clock=lambda: now_s)
    # Two warm-ups of the whole come first.
    assert watch.seconds_and_rest(work(3.0, 3.0, 3.0), work(9.0, 9.0, 4.0, 1.0, 1.0)) == (3.0, -2.0)
