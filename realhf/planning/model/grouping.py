"""Micro data-parallel groups in planning: the calls that get them, and the parameters then moved (HybridFlow, 5.3).

Groups are no options of their own. They are never worse: a call with groups moves the least, and takes as long. So the
search prices calls on the devices of their home as grouped, and its plans have the groups.
"""

from array import array
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from realhf.architecture.model import DecoderConfig, DType
from realhf.dataflow.graph import DataflowGraph
from realhf.dataflow.plan import CallPlan
from realhf.dataflow.protocols import THREE_D_PROTO
from realhf.geometry.layout import Layout, ParallelStrategy
from realhf.geometry.micro_dp import contains, grouped_like
from realhf.planning.cluster import Cluster
from realhf.planning.model.features import ENGINE, EngineFeatures
from realhf.planning.model.memory import static_bytes
from realhf.planning.model.reallocation import Reallocation
from realhf.planning.model.sizes import model_sizes


def grouped(home: Layout, layout: Layout, num_layers: int, cluster: Cluster) -> Layout | None:
    """`layout` with the groups of `home`; None where it has none, or where tensor-parallel peers would come to lie on
    several nodes: they are as far apart as the home's."""
    if home.strategy.tp > cluster.devices_per_node:
        return None
    return grouped_like(home, layout, num_layers)


def with_groups(
    calls: Mapping[str, CallPlan], homes: Mapping[str, str], graph: DataflowGraph, cluster: Cluster
) -> dict[str, CallPlan]:
    """The calls of a plan, grouped as their homes where they would not contain what these hold otherwise.

    homes: for every call, the call in whose layout its model's parameters live.
    """
    result = dict(calls)
    for name, call in calls.items():
        home, num_layers = calls[homes[name]].layout, graph.calls[name].config.num_layers
        if graph.calls[name].protocol is not THREE_D_PROTO:
            continue  # it was asked about plain layouts
        if call.layout != home and not (call.mesh == home.mesh and contains(call.layout, home, num_layers)):
            layout = grouped(home, call.layout, num_layers, cluster)
            result[name] = replace(call, micro_dp=layout.strategy.micro_dp) if layout else call
    return result


def spared_bytes(
    model: DecoderConfig, home: Layout, layout: Layout, dtype: DType, features: EngineFeatures = ENGINE
) -> int:
    """The home's parameters on a device, where a copy in `layout` takes their place; 0 where it does not.

    Only for copies on the devices of the home: on others, the whole copy counts.
    """
    if layout.mesh != home.mesh or layout == home:
        return 0
    has_groups = layout.strategy.micro_dp != (1, 1)  # with which it contains the home, and a look takes long
    if not (has_groups and grouped_like(home, layout, model.num_layers) == layout) and not contains(
        layout, home, model.num_layers
    ):
        return 0
    return static_bytes(model, home.strategy, dtype, trained=False, features=features)


def moved_to_groups(model: DecoderConfig, home: ParallelStrategy, target: ParallelStrategy) -> tuple[int, int]:
    """As `realhf.planning.model.reallocation.moved_elements` to a grouped layout: of each stage of the home, its part
    less than what it is contained in."""
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
            elements = moved[pair]
            if elements is not None:
                table[row * len(targets) + column] = move.seconds(elements, home.mesh, crosses_nodes=crosses)
    return table
