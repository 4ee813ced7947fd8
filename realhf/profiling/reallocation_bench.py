"""Times the reallocation of a short model from a device to its neighbour."""

from collections.abc import Callable
from dataclasses import replace

import torch

from realhf.engine.backend import ModelSpec
from realhf.engine.model import ShardedModel
from realhf.geometry.layout import Layout
from realhf.geometry.shards import Placement
from realhf.parallel.groups import GroupTable
from realhf.planning.model.profile import ReallocationTimings
from realhf.profiling.job import ProfileTarget
from realhf.profiling.model_bench import Stopwatch
from realhf.realloc.execute.carriers import carrier_between
from realhf.realloc.execute.executor import Reallocation, execute
from realhf.realloc.plan.planner import plan_between

FEW, MANY = 1, 4  # layers
LEAST_GAIN = 0.05  # part of the shorter move's time; layers are most of a model, so that a real gain is far above it


def reallocation(
    target: ProfileTarget, pair: tuple[Layout, Layout] | None, table: GroupTable, watch: Stopwatch
) -> ReallocationTimings:
    """The time of moving a model between neighbours, from a rank of even number to the next; all ranks call it
    together. `pair`: the layouts of this rank and its neighbour, each alone; None for a rank that has none.

    From FEW and MANY layers: the time that does not grow with them is the latency.
    """
    dtype = getattr(torch, target.dtype)
    works, size_bytes = [], []
    for layers in (FEW, MANY):
        model = replace(target.model.with_head("scalar"), num_layers=layers)
        work: Callable[[], None] | None = None
        held_bytes = 0
        if pair:
            whole = ShardedModel(ModelSpec(model, table.groups(pair[table.rank % 2]), dtype, watch.device))
            work = _move(whole, pair, table)
            held_bytes = sum(box.size for box, _ in whole.residency.held()) * dtype.itemsize
        works.append(work)
        size_bytes.append(watch.largest(held_bytes))
    few_s, gained_s = watch.seconds_and_rest(*works, slowest=True)
    return fitted(few_s, gained_s, size_bytes[0], size_bytes[1] - size_bytes[0])


def fitted(few_s: float, gained_s: float, few_bytes: float, gained_bytes: float) -> ReallocationTimings:
    """The line through two moves: of `few_bytes`, and of `gained_bytes` more, which took `gained_s` longer.

    Where the gain is lost in the noise of a busy machine, all of the time counts as that of bytes: no move is free.
    """
    if gained_s <= LEAST_GAIN * few_s:
        return ReallocationTimings(latency_s=0.0, bandwidth=(few_bytes + gained_bytes) / (few_s + max(gained_s, 0.0)))
    latency_s = few_s - gained_s * few_bytes / gained_bytes
    return ReallocationTimings(latency_s=max(latency_s, 0.0), bandwidth=gained_bytes / gained_s)


def _move(model: ShardedModel, pair: tuple[Layout, Layout], table: GroupTable) -> Callable[[], None]:
    """A rank's part: to send its model, or to receive it into memory that is new each time, as a run does."""
    source, target = pair
    plan = plan_between(
        model.config, Placement(source), Placement(target), element_bytes=model.parameters.flat.itemsize
    )
    carrier = carrier_between(table.of_host((*source.mesh.devices, *target.mesh.devices)), table.waits)

    def move() -> None:
        if table.rank in source.mesh.devices:
            execute(Reallocation(plan, table.rank, model.residency.held(), [], carrier))
            return
        model.residency.free()
        model.residency.allocate()
        execute(Reallocation(plan, table.rank, [], model.residency.held(), carrier))

    return move
