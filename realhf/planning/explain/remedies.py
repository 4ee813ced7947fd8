"""The smallest changes that make an infeasible planning task feasible."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from realhf.base.errors import UserError
from realhf.base.numbers import DEVICES
from realhf.dataflow.graph import ModelFunctionCallDef
from realhf.dataflow.plan import CallCompute
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.planning.model.cluster import halves
from realhf.planning.model.hardware import GIB
from realhf.planning.options import Option, options_on, pool_meshes, ways_to_compute
from realhf.planning.problem.builder import build_problem
from realhf.planning.problem.native import native_problem
from realhf.planning.problem.option_rows import row_of
from realhf.planning.search import models_that_can_wait, offloads
from realhf.planning.task import PlanningTask
from realhf.planning.ways import has_open_room, least_room, smallest_mix

MAX_TIMES_NODES = 64
SEED = 0


@dataclass(frozen=True)
class Remedies:
    """Each alone is enough: memory a device in bytes, samples a step, equal nodes, models to offload.

    None: no such change was found.
    """

    memory_bytes: float | None
    batch_size: int | None
    num_nodes: int | None
    offload: tuple[str, ...] | None = None

    def __str__(self) -> str:
        parts = []
        if self.memory_bytes is not None:
            parts.append(f"{self.memory_bytes / GIB:.1f} GiB of memory a device")
        if self.batch_size is not None:
            parts.append(f"a batch of {self.batch_size} samples")
        if self.num_nodes is not None:
            parts.append(f"{self.num_nodes} node{'s' if self.num_nodes > 1 else ''} of this kind")
        if self.offload is not None:
            parts.append(f"--offload {','.join(self.offload)}")
        if not parts:
            return "no smaller batch and no larger cluster helps: take a smaller model or shorter sequences"
        return f"the smallest change that is enough: {', or '.join(parts)}"


def find_remedies(task: PlanningTask) -> Remedies:
    """Looks for plans that spread every model over all devices or half of them, or of its pool: each remedy is one that
    a plan has. Models to offload are none where the search has tried them."""
    return Remedies(smallest_peak_bytes(task), _batch(task), _nodes(task), _offload(task))


def smallest_peak_bytes(task: PlanningTask) -> float | None:
    """Peak memory of the smallest plan found on all devices or half of them, or of a model's pool, with all that a
    search may choose to save memory; None if no plan is legal."""
    found = [_smallest_peak_bytes(replace(task, offload=models)) for models in offloads(task)]
    return min((peak for peak in found if peak is not None), default=None)


def _smallest_peak_bytes(task: PlanningTask) -> float | None:
    """The same with these models in host memory."""
    everywhere = [DeviceMesh(0, task.cluster.num_devices), *halves(task.cluster)]
    options: dict[str, list[Option]] = {}
    calls = task.graph.model_calls.values()
    try:
        mini_batches = [call.mini_batch_size(task.batch_size) for call in calls]
    except UserError:
        return None
    for call, mini_batch in zip(calls, mini_batches, strict=True):
        pool = task.graph.pools.get(call.model_name)
        meshes = everywhere if pool is None else pool_meshes(task.cluster, pool)
        options[call.name] = options_on(meshes, call, mini_batch)
        if not options[call.name]:
            return None
        options[call.name] += _smallest_computations(task, call, options[call.name])
    native = native_problem(build_problem(task, options))
    return float(native.evaluate(native.smallest_plan(SEED))["peak_bytes"])


def _smallest_computations(task: PlanningTask, call: ModelFunctionCallDef, plain: Sequence[Option]) -> Iterator[Option]:
    """On every mesh and in every strategy the smallest of the ways to compute that the plan may choose, where there are
    any, in the most micro-batches: these are the smallest ones."""
    counts: dict[Layout, int] = {}
    for option in plain:
        counts[option.layout] = max(option.micro_batches, counts.get(option.layout, 0))

    def size_bytes(strategy: ParallelStrategy, count: int, compute: CallCompute) -> float:
        row = row_of(task, call, strategy, count, compute)
        return row.static_bytes + row.dynamic_bytes

    for layout, count in counts.items():
        ways = ways_to_compute(task, call, layout.strategy)
        sharded = [(layout.strategy, count, way) for way in ways if way.data_parallel == "fsdp"]
        ways += [mix for mix in (smallest_mix(task, call, way) for way in sharded) if mix]
        if len(ways) > 1:
            yield Option(layout, count, min(ways, key=partial(size_bytes, layout.strategy, count)))
        if has_open_room(task, call):
            room = least_room(task.call_models[call.name].lengths, layout.strategy.pp)
            yield Option(layout, 1, CallCompute(kv_cache_tokens=room))


def _fits(task: PlanningTask) -> bool:
    peak = smallest_peak_bytes(task)
    return peak is not None and peak <= task.cluster.device_memory_bytes


def _batch(task: PlanningTask) -> int | None:
    """The largest of a half, a quarter, ... of the batch that fits."""
    size = task.batch_size
    while size % 2 == 0:
        size //= 2
        if _fits(replace(task, batch_size=size)):
            return size
    return None


def _offload(task: PlanningTask) -> tuple[str, ...] | None:
    if task.may_offload:
        return None
    return next((models for models in models_that_can_wait(task.graph) if _fits(replace(task, offload=models))), None)


def _nodes(task: PlanningTask) -> int | None:
    """The least number of nodes that fits, between the cluster's and MAX_TIMES_NODES as many."""
    enough = own = task.cluster.num_nodes

    def fits(nodes: int) -> bool:
        return _fits(replace(task, cluster=replace(task.cluster, num_nodes=nodes)))

    while not fits(enough):
        enough *= 2
        if enough > own * MAX_TIMES_NODES or enough * task.cluster.devices_per_node > DEVICES[1]:
            return None
    too_few = enough // 2 if enough > own else own - 1
    while enough - too_few > 1:
        middle = (enough + too_few) // 2
        enough, too_few = (middle, too_few) if fits(middle) else (enough, middle)
    return enough
