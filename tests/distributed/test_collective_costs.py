"""The measured costs of collectives: the same on all ranks, those of the slowest; and that an all-reduce sums."""

import itertools
import threading
from dataclasses import astuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from realhf.cpu import host_group
from realhf.parallel.collectives import all_reduce
from realhf.planning.model.osdp.collective_costs import NO_COSTS, fitted
from realhf.profiling.collectives import READINGS, SIZES_BYTES, measure_collectives, measure_overlap
from tests.distributed.pool import run_distributed

pytestmark = pytest.mark.distributed

WORLD_SIZE = 3  # divides no power of two
BACKENDS = ("gloo", host_group.BACKEND)


def costs_of(rank: int, backend: str) -> tuple[tuple[tuple[float, float], ...], list[float]]:
    """What a rank measures with a clock that goes on by rank + 1 seconds whenever it is read; and a sum."""
    group = dist.new_group(backend=backend)
    ticks = itertools.count(0.0, rank + 1.0)
    costs = measure_collectives(group, torch.device("cpu"), torch.float32, lambda: next(ticks))
    numbers = torch.full((2 * WORLD_SIZE,), 10.0**rank)
    all_reduce(numbers, group)
    return astuple(costs), numbers.tolist()


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_ranks_have_the_costs_of_the_slowest(backend: str) -> None:
    ranks = run_distributed(costs_of, WORLD_SIZE, backend)
    loops = [4, 4, 4, 1, 1]  # in a reading of 4 KiB, 32 KiB, 256 KiB, 2 MiB, 16 MiB
    expected = astuple(fitted(SIZES_BYTES, [WORLD_SIZE / n for n in loops]))
    for costs, summed in ranks:
        assert costs == (expected, expected, expected)
        assert summed == [111.0] * 2 * WORLD_SIZE


def measured_for_real(rank: int) -> tuple[tuple[float, float], ...]:
    return astuple(measure_collectives(dist.group.WORLD, torch.device("cpu"), torch.bfloat16))


def test_real_times_are_above_zero_and_equal() -> None:
    first, second = run_distributed(measured_for_real, 2)
    assert first == second
    assert all(seconds_per_byte > 0 for _, seconds_per_byte in first)


def overlap_of(rank: int) -> list[float]:
    """What ranks find where a gather takes 4 s, products as long, and both together as long as is given."""
    found = []
    for both_s in (5.0 + rank, 4.0, 2.0, 8.0, 7.7):
        readings = iter([1.0, 1.0, 4.0, 2.0, *[4.0, 4.0, both_s] * READINGS])
        with mock.patch("realhf.profiling.collectives._seconds", lambda work, *_: work() or next(readings)):  # noqa: B023
            found.append(measure_overlap(dist.group.WORLD, torch.device("cpu"), torch.float32))
    return found


def test_overlap_by_hand() -> None:
    """3 of 4 s are hidden, or 2 on the slower rank; all at most; 0.3 s are noise."""
    first, second = run_distributed(overlap_of, 2)
    assert first == second == [0.5, 1.0, 1.0, 0.0, 0.0]


class Late(dist.Work):
    """Arrives a while after it was sent, and takes no core meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived = threading.Event()
        threading.Timer(0.1, self.arrived.set).start()

    def wait(self, *_: object) -> bool:
        return self.arrived.wait(10)


def overlap_for_real(rank: int) -> tuple[float, float]:
    """Of a link that needs no core, and of shared memory, which the rank copies itself."""
    group = dist.new_group(backend=host_group.BACKEND)
    with mock.patch("realhf.profiling.collectives.start_all_gather", side_effect=lambda *_: [Late()]):
        hidden = measure_overlap(group, torch.device("cpu"), torch.float32)
    return hidden, measure_overlap(group, torch.device("cpu"), torch.float32)


@pytest.mark.measures
def test_what_needs_no_core_is_hidden() -> None:
    for hidden, shared in run_distributed(overlap_for_real, 2):
        assert hidden > 0.5
        assert 0 <= shared < 0.5


def test_one_rank_costs_nothing() -> None:
    assert measure_overlap(None, torch.device("cpu"), torch.float32) == 0.0
    assert measure_collectives(None, torch.device("cpu"), torch.float32) == NO_COSTS
