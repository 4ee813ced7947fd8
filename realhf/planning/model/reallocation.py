"""Seconds of a parameter reallocation between two layouts, and the micro data-parallel groups that shorten it.

Groups (HybridFlow, section 5.3) are no options of their own. They are never worse: a call with groups moves the least,
and takes as long. So the search prices calls on the devices of their home as grouped, and its plans have the groups.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from realhf.architecture.model import DecoderConfig
from realhf.dataflow.graph import DataflowGraph
from realhf.dataflow.plan import CallPlan
from realhf.dataflow.protocols import THREE_D_PROTO
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy, held_layers
from realhf.geometry.micro_dp import contains, grouped_like
from realhf.planning.model.cluster import Cluster, share_a_node
from realhf.planning.model.hardware import Hardware
from realhf.planning.model.sizes import model_sizes


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

    def table(self, sources: Sequence[Layout], targets: Sequence[Layout]) -> list[float]:
        """`seconds` of sources x targets, row-major: for a few pairs. For the millions of a search there is C++."""
        return [
            self.seconds(
                moved_elements(self.model, source, target),
                source.mesh,
                crosses_nodes=not share_a_node(self.cluster, source.mesh, target.mesh),
            )
            for source in sources
            for target in targets
        ]


def moved_elements(model: DecoderConfig, source: Layout, target: Layout) -> tuple[int, int]:
    """(elements that the worst device of `target` lacks, elements that all of its devices lack): the boxes that each
    needs under `target` less those it holds under `source` (`realhf.geometry.boxes.device_boxes`), in closed form. The
    same formula in C++ knows neither model chunks nor micro data-parallel groups."""
    worst = total = 0
    for device in target.mesh.devices:
        lacking = _held_by_both(model, (target, target), device) - _held_by_both(model, (source, target), device)
        worst, total = max(worst, lacking), total + lacking
    return worst, total


def _held_by_both(model: DecoderConfig, layouts: tuple[Layout, Layout], device: int) -> int:
    """Elements that `device` holds under both layouts."""
    if any(device not in layout.mesh.devices for layout in layouts):
        return 0
    sizes = model_sizes(model)
    whole = layouts[0].strategy.tp * layouts[1].strategy.tp
    begin, end, layers, has_embedding, has_head = 0, whole, set(range(model.num_layers)), True, True
    for layout in layouts:
        _, tp_index, stage = layout.coordinates(device)
        tp, last = layout.strategy.tp, layout.strategy.pp - 1
        begin, end = max(begin, tp_index * whole // tp), min(end, (tp_index + 1) * whole // tp)
        layers &= held_layers(model.num_layers, layout.strategy, stage)
        has_embedding &= stage == 0 or (sizes.tied and stage == last)
        has_head &= stage == last
    sharded, replicated = len(layers) * sizes.layer_sharded, len(layers) * sizes.layer_replicated
    if has_embedding:
        sharded, replicated = sharded + sizes.embedding_sharded, replicated + sizes.embedding_replicated
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


def contains_home(model: DecoderConfig, home: Layout, layout: Layout) -> bool:
    """Whether a copy in `layout`, which is not the home's, lies on the same devices and contains the home's parameters
    on each."""
    if layout.mesh != home.mesh or layout == home:
        return False
    has_groups = layout.strategy.micro_dp != (1, 1)  # with which it contains the home, and a look takes long
    is_grouped = has_groups and grouped_like(home, layout, model.num_layers) == layout
    return is_grouped or contains(layout, home, model.num_layers)


def moved_to_groups(model: DecoderConfig, home: ParallelStrategy, target: ParallelStrategy) -> tuple[int, int]:
    """As `moved_elements`, to a grouped layout: for each stage of the home what it is contained in, less its part."""
    sizes, interval = model_sizes(model), home.pp // target.pp
    lacking = [
        sizes.on_stage(target.tp, target.pp, stage // interval) - sizes.on_stage(home.tp, home.pp, stage)
        for stage in range(home.pp)
    ]
    return max(lacking), sum(lacking) * home.dp * home.tp


def grouped_reallocations(
    seconds: Sequence[float], move: Reallocation, homes: Sequence[Layout], targets: Sequence[Layout]
) -> "array[float]":
    """The table `seconds` of homes x targets, row-major, with the times of grouped layouts where there are such."""
    table = array("d", seconds)
    on_mesh: dict[object, list[int]] = {}
    for column, target in enumerate(targets):
        on_mesh.setdefault(target.mesh, []).append(column)
    moved: dict[tuple[ParallelStrategy, ParallelStrategy], tuple[int, int] | None] = {}
    for row, home in enumerate(homes):
        crosses = move.cluster.crosses_nodes(home.mesh.devices)
        for column in on_mesh.get(home.mesh, []):
            target = targets[column]
            pair = (home.strategy, target.strategy)
            if pair not in moved:
                has_groups = target != home and grouped(home, target, move.model.num_layers, move.cluster)
                moved[pair] = moved_to_groups(move.model, *pair) if has_groups else None
            if (elements := moved[pair]) is not None:
                table[row * len(targets) + column] = move.seconds(elements, home.mesh, crosses_nodes=crosses)
    return table
