"""Times the reallocation of a short model from a device to its neighbour."""

from collections.abc import Callable
from dataclasses import replace

import torch

from realhf.api.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.api.profile_job import ProfileTarget
from realhf.engine.model import ShardedModel
from realhf.parallel.groups import GroupTable
from realhf.realloc.executor import execute
from realhf.realloc.planner import plan_between
from realhf.search.profile import ReallocationTimings
from realhf.worker.model_bench import Stopwatch

FEW, MANY = 1, 4  # layers


def neighbours(rank: int, num_workers: int) -> tuple[Layout, Layout] | None:
    """(source, target): a rank of even number and the next, each alone; None for one that has no neighbour."""
    source = rank // 2 * 2
    if source + 1 == num_workers:
        return None
    first, second = (Layout(DeviceMesh(device, 1), ParallelStrategy()) for device in (source, source + 1))
    return first, second


def reallocation(
    target: ProfileTarget,
    pair: tuple[Layout, Layout] | None,
    table: GroupTable,
    rank: int,
    device: torch.device,
    watch: Stopwatch,
) -> ReallocationTimings:
    """What moving a model from the first to the second of a pair takes; all ranks call it together.

    From FEW and MANY layers: what does not grow with them is the latency.
    """
    seconds, size_bytes = {}, {}
    dtype = getattr(torch, target.dtype)
    for layers in (FEW, MANY):
        model = replace(target.model.with_head("scalar"), num_layers=layers)
        whole = (
            ShardedModel(model, table.groups(pair[0] if rank % 2 == 0 else pair[1]), dtype, device) if pair else None
        )
        seconds[layers] = watch.seconds(_move(whole, pair, rank) if pair and whole else None, slowest=True)
        size_bytes[layers] = sum(box.size for box, _ in whole.boxes().values()) * dtype.itemsize if whole else 0
    gained_bytes = watch.largest(size_bytes[MANY] - size_bytes[FEW])
    s_per_byte = max(seconds[MANY] - seconds[FEW], 1e-9) / gained_bytes
    latency_s = seconds[FEW] - s_per_byte * watch.largest(size_bytes[FEW])
    return ReallocationTimings(latency_s=max(latency_s, 0.0), bandwidth=1 / s_per_byte)


def _move(model: ShardedModel, pair: tuple[Layout, Layout], rank: int) -> Callable[[], None]:
    """A rank's part: to send its model, or to receive it into memory that is new each time, as a run does."""
    source, target = pair
    plan = plan_between(model.config, source, target, element_bytes=model.arena.flat.itemsize)

    def move() -> None:
        if rank in source.mesh.devices:
            execute(plan, rank, model.held(), [])
            return
        model.free_parameters()
        model.allocate_parameters()
        execute(plan, rank, [], model.held())

    return move
