"""Seconds of a parameter reallocation between two layouts, and the micro data-parallel groups that shorten it.

Groups (HybridFlow, section 5.3) are no options of their own. They are never worse: a call with groups moves the least,
and takes as long. So the search prices calls on the devices of their home as grouped, and its plans have the groups.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from msgspec.structs import replace

from realhf.architecture.model import DecoderConfig
from realhf.dataflow.graph import DataflowGraph
from realhf.dataflow.plan import CallPlan
from realhf.dataflow.protocols import THREE_D_PROTO
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy, held_layers
from realhf.geometry.micro_dp import contains, grouped_like
from realhf.geometry.shards import Placement
from realhf.planning.model.cluster import Cluster, share_a_node
from realhf.planning.model.hardware import Hardware
from realhf.planning.model.sizes import model_sizes
from realhf.realloc.plan.planner import ReallocationPlan, plan_between

# The time of broadcasts over gloo as a part of that of as many bytes in messages: one thread of a process carries all
# its messages, and each process group has a thread of its own. 24 pairs of layouts of 4 and 8 processes on two cores
# had 0.71 to 1.24, each the median of five runs of `benchmarks/reallocation.py`; the mean is 0.98.
GLOO_BROADCASTS = 0.98


@dataclass(frozen=True)
class Reallocation:
    """Moves of a model's parameters, `item` bytes an element, over `links` (`Timings.links`). With `forwarding` devices
    send on what several lack; on the way to an average they do not."""

    model: DecoderConfig
    item: int
    cluster: Cluster
    links: Hardware
    forwarding: bool = True

    def seconds(self, moved: tuple[int, int], source: DeviceMesh, *, crosses_nodes: bool) -> float:
        """Seconds of a move from the devices of `source` of `moved` (`moved_elements`); zero if nothing moves.

        The time of the busiest link: the most that one device receives, or the equal share that a device of the source
        sends: with `forwarding` of one model at most (`realhf.realloc.plan.broadcast_chain`; 0.96 to 1.5 times this in
        400 pairs of layouts of up to 16 devices).
        """
        worst, total = moved
        if not total:
            return 0.0
        sent = (min(total, model_sizes(self.model).total) if self.forwarding else total) / source.size
        return self.links.send_s(max(worst, sent) * self.item, crosses_nodes=crosses_nodes)

    def comparing_s(self, source: Placement, target: Layout) -> float:
        """Seconds in which the devices of the source compare what they send with what they sent before: each reads an
        equal share of both. Meanwhile the first of it is on its way."""
        _, total = moved_elements(self.model, source, target)
        compared = min(total, model_sizes(self.model).total) / source.layout.mesh.size
        return 2 * compared * self.item / self.links.memory_bandwidth

    def by_broadcasts(self, source: Placement, target: Layout) -> ReallocationPlan:
        """The same move by broadcasts; planned once for each pair."""
        per_node = self.cluster.devices_per_node
        return plan_between(self.model, source, Placement(target), per_node, self.item, by="broadcasts")

    def broadcasts_s(self, source: Placement, target: Layout) -> float:
        """Seconds of the move by broadcasts (`Hardware.broadcast_s`): those of the busiest device.

        With NCCL and over a host's memory a device has one broadcast at a time. With gloo it sends and receives at the
        same time.
        """
        crosses = not share_a_node(self.cluster, source.layout.mesh, target.mesh)
        sending, receiving = defaultdict[int, float](float), defaultdict[int, float](float)
        for transfers in self.by_broadcasts(source, target).rounds:
            for (root, *others), load in {each.broadcast: each.load for each in transfers}.items():
                seconds = self.links.broadcast_s(load.elements * self.item, 1 + len(others), crosses_nodes=crosses)
                sending[root] += seconds
                for device in others:
                    receiving[device] += seconds
        if crosses and not self.links.is_gpu:
            return GLOO_BROADCASTS * max([*sending.values(), *receiving.values()], default=0.0)
        return max((sending[device] + receiving[device] for device in {*sending, *receiving}), default=0.0)

    def table(self, sources: Sequence[Placement], targets: Sequence[Layout]) -> list[float]:
        """`seconds` of sources x targets, row-major: for a few pairs. For the millions of a search there is C++."""
        return [
            self.seconds(
                moved_elements(self.model, source, target),
                source.layout.mesh,
                crosses_nodes=not share_a_node(self.cluster, source.layout.mesh, target.mesh),
            )
            for source in sources
            for target in targets
        ]


@lru_cache(maxsize=4096)
def moved_elements(model: DecoderConfig, source: Placement, target: Layout) -> tuple[int, int]:
    """(elements that the worst device of `target` lacks, elements that all of its devices lack): the boxes that each
    needs under `target` less those it holds under `source` (`realhf.geometry.boxes.device_boxes`), in closed form.

    Of a source whose parameters are divided over data parallelism a device holds an equal share of these. The same
    formula in C++ knows no micro data-parallel groups.
    """
    worst = needed_by_all = held_by_all = 0
    for device in target.mesh.devices:
        needed = _held_by_both(model, (target, target), device)
        held = _held_by_both(model, (source.layout, target), device)
        worst = max(worst, needed - held // source.divided)
        needed_by_all, held_by_all = needed_by_all + needed, held_by_all + held
    return worst, needed_by_all - held_by_all // source.divided


def _held_by_both(model: DecoderConfig, layouts: tuple[Layout, Layout], device: int) -> int:
    """Elements that `device` holds under both layouts."""
    if any(device not in layout.mesh.devices for layout in layouts):
        return 0
    sizes = model_sizes(model)
    whole = layouts[0].strategy.tp * layouts[1].strategy.tp
    begin, end, layers = 0, whole, set(range(model.num_layers))
    has_positions = has_embedding = has_head = True
    for layout in layouts:
        _, tp_index, stage = layout.coordinates(device)
        tp, last = layout.strategy.tp, layout.strategy.pp - 1
        begin, end = max(begin, tp_index * whole // tp), min(end, (tp_index + 1) * whole // tp)
        layers &= held_layers(model.num_layers, layout.strategy, stage)
        has_positions &= stage == 0  # learned ones, which are never tied
        has_embedding &= stage == 0 or (sizes.tied and stage == last)
        has_head &= stage == last
    sharded, replicated = len(layers) * sizes.layer_sharded, len(layers) * sizes.layer_replicated
    sharded += has_embedding * sizes.embedding_sharded
    replicated += has_positions * sizes.embedding_replicated
    if has_head:
        sharded, replicated = sharded + sizes.head_sharded, replicated + sizes.head_replicated
    return sharded * max(end - begin, 0) // whole + replicated


def grouped(home: Layout, layout: Layout, num_layers: int, cluster: Cluster) -> Layout | None:
    """`layout` with the groups of `home`; None where it has none, or where tensor-parallel peers, which are as far
    apart as the home's, would lie on several nodes."""
    if home.strategy.tp > cluster.devices_per_node:
        return None
    return grouped_like(home, layout, num_layers)


def with_groups(
    calls: Mapping[str, CallPlan], homes: Mapping[str, str], graph: DataflowGraph, cluster: Cluster
) -> dict[str, CallPlan]:
    """The calls of a plan, grouped as their `homes` (`PlanningTask.homes`) where they would not contain what these hold
    otherwise."""
    result = dict(calls)
    for name, call in calls.items():
        home, num_layers = calls[homes[name]].layout, graph.model_calls[name].config.num_layers
        if graph.model_calls[name].protocol is not THREE_D_PROTO:
            continue  # it was asked about plain layouts
        if call.layout != home and not (call.mesh == home.mesh and contains(call.layout, home, num_layers)):
            layout = grouped(home, call.layout, num_layers, cluster)
            result[name] = replace(call, micro_dp=layout.strategy.micro_dp) if layout else call
    return result


def moved_to_groups(model: DecoderConfig, home: ParallelStrategy, target: ParallelStrategy) -> tuple[int, int]:
    """As `moved_elements`, to a grouped layout: for each stage of the home what it is contained in, less its part."""
    sizes, interval = model_sizes(model), home.pp // target.pp
    lacking = [
        sizes.on_stage(target.tp, target.pp, stage // interval) - sizes.on_stage(home.tp, home.pp, stage)
        for stage in range(home.pp)
    ]
    return max(lacking), sum(lacking) * home.dp * home.tp


def grouped_reallocations(
    move: Reallocation, homes: Sequence[Placement], targets: Sequence[Layout]
) -> Iterator[tuple[int, float]]:
    """Where a table of homes x targets, row-major, has grouped layouts: the place, and the seconds that they take."""
    columns: dict[DeviceMesh, list[int]] = {}
    for column, target in enumerate(targets):
        columns.setdefault(target.mesh, []).append(column)
    taken: dict[tuple[ParallelStrategy, ParallelStrategy, bool], float | None] = {}  # wherever the mesh lies
    for row, (home, divided) in enumerate((placement.layout, placement.divided) for placement in homes):
        if divided > 1:
            continue  # it moves nearly all, with groups or without
        crosses = move.cluster.crosses_nodes(home.mesh.devices)
        for column in columns.get(home.mesh, []):
            target = targets[column]
            key = (home.strategy, target.strategy, crosses)
            if key not in taken:
                has_groups = target != home and grouped(home, target, move.model.num_layers, move.cluster)
                moved = moved_to_groups(move.model, home.strategy, target.strategy) if has_groups else None
                taken[key] = None if moved is None else move.seconds(moved, home.mesh, crosses_nodes=crosses)
            if (seconds := taken[key]) is not None:
                yield row * len(targets) + column, seconds
