"""Times the collectives of data parallelism in one group: all-reduce, all-gather and reduce-scatter, each by itself."""

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from realhf.parallel.collectives import all_gather, all_reduce, reduce_scatter, start_all_gather
from realhf.planning.model.osdp.collective_costs import NO_COSTS, CollectiveCost, CollectiveCosts, fitted

__all__ = ["CollectiveCost", "CollectiveCosts", "measure_collectives", "measure_overlap"]

SIZES_BYTES = tuple(2**k for k in (12, 15, 18, 21, 24))
READINGS = 5
# Small vectors are repeated within one reading of the clock.
READING_BYTES, MOST_LOOPS = 2**20, 4
COLLECTIVES = (all_reduce, all_gather, reduce_scatter)
OVERLAP_BYTES, PRODUCT = 2**22, 256  # what is gathered, and the size of the matrices that are multiplied meanwhile
MOST_PRODUCTS = 2**14
LEAST_OVERLAP = 0.1  # less is noise: as where the rank that computes also copies


def measure_collectives(
    group: dist.ProcessGroup | None,
    device: torch.device,
    dtype: torch.dtype,
    clock: Callable[[], float] = time.perf_counter,
) -> CollectiveCosts:
    """The cost of the engine's collectives in `group` on vectors of `dtype`: lines through the times of 4 KiB to 16
    MiB.

    A time is the median of READINGS, each of the slowest rank. All ranks of the group call this together, and all get
    the same numbers. None is a group of one rank, where nothing costs anything. `clock` tells seconds.
    """
    if group is None or group.size() == 1:
        return NO_COSTS
    # In rounds over everything: other work of the machine comes and goes, and disturbs all alike. The first warms up.
    rounds = [
        [_reading(work, size_bytes, group, torch.empty(0, dtype=dtype, device=device), clock)
         for work in COLLECTIVES for size_bytes in SIZES_BYTES]
        for _ in range(1 + READINGS)
    ][1:]  # fmt: skip
    slowest = torch.tensor(rounds, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    medians = [statistics.median(readings) for readings in slowest.T.tolist()]
    count = len(SIZES_BYTES)
    costs = [fitted(SIZES_BYTES, medians[i * count : (i + 1) * count]) for i in range(len(COLLECTIVES))]
    return CollectiveCosts(all_reduce=costs[0], all_gather=costs[1], reduce_scatter=costs[2])


def measure_overlap(
    group: dist.ProcessGroup | None,
    device: torch.device,
    dtype: torch.dtype,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """How far an all-gather in `group` advances in a second of computation: 1 where both go on as if alone, 0 where one
    waits for the other.

    Of a gather that takes G s and products that take C s alone, and B s both at once, (G + C - B) / min(G, C) is
    hidden. G, C and B are each the least of READINGS, since other work of the machine only adds to them. All ranks of
    the group call this together, and all get the least number of any. `clock` tells seconds.
    """
    if group is None or group.size() == 1:
        return 0.0
    shards = group.size()
    flat = torch.zeros(OVERLAP_BYTES // dtype.itemsize // shards * shards, dtype=dtype, device=device)
    left = torch.ones(PRODUCT, PRODUCT, dtype=dtype, device=device)

    def gather(products: int) -> None:
        arriving = start_all_gather(flat, group)
        compute(products)
        for work in arriving:
            work.wait()

    def compute(products: int) -> None:
        for _ in range(products):
            left @ left

    def seconds(work: Callable[[int], None], products: int) -> float:
        return _seconds(lambda: work(products), group, flat, clock)

    for work in (gather, compute):
        seconds(work, 1)  # warms up
    alone = torch.tensor([seconds(gather, 0) / seconds(compute, 1)], dtype=torch.float64, device=device)
    dist.all_reduce(alone, dist.ReduceOp.MAX, group=group)
    products = min(max(round(alone.item()), 1), MOST_PRODUCTS)  # that last as long as the gather
    readings = [(seconds(gather, 0), seconds(compute, products), seconds(gather, products)) for _ in range(READINGS)]
    gather_s, compute_s, both_s = (min(column) for column in zip(*readings, strict=True))
    hidden = (gather_s + compute_s - both_s) / min(gather_s, compute_s)
    least = torch.tensor([-hidden], dtype=torch.float64, device=device)
    dist.all_reduce(least, dist.ReduceOp.MAX, group=group)
    overlap = min(-least.item(), 1.0)
    return overlap if overlap >= LEAST_OVERLAP else 0.0


def _reading(
    work: Callable[[Tensor, dist.ProcessGroup], object],
    size_bytes: int,
    group: dist.ProcessGroup,
    like: Tensor,
    clock: Callable[[], float],
) -> float:
    """Seconds of one `work` on a vector of about `size_bytes`, of the dtype and device of `like`, on this rank."""
    loops = max(1, min(MOST_LOOPS, READING_BYTES // size_bytes))
    flat = like.new_zeros(-(-size_bytes // like.itemsize // group.size()) * group.size())

    def repeated() -> None:
        for _ in range(loops):
            work(flat, group)

    return _seconds(repeated, group, like, clock) / loops


def _seconds(work: Callable[[], object], group: dist.ProcessGroup, like: Tensor, clock: Callable[[], float]) -> float:
    """Seconds of `work` on this rank, which all ranks begin together, on the device of `like`."""
    together = torch.zeros(1, device=like.device)
    dist.all_reduce(together, group=group)
    together.item()  # waits for the device
    start = clock()
    work()
    if like.device.type == "cuda":
        torch.cuda.synchronize(like.device)
    return clock() - start
