"""Copies between devices and host memory as nodes of a planning problem (ReaL, section 4)."""

from collections.abc import Callable, Collection, Mapping

from msgspec.structs import replace

from realhf.dataflow.graph import DataflowGraph
from realhf.dataflow.offload import Load
from realhf.planning.problem.tables import ParentRow, TransferTable


def offload_tables(
    graph: DataflowGraph,
    loads: Collection[Load],
    number: Mapping[str, int],
    copy_of: Callable[[Load], TransferTable],
) -> tuple[list[TransferTable], dict[str, list[ParentRow]]]:
    """A load before and an offload behind each node that needs a model of those that wait in host memory.

    A load waits for the offload behind the node before. An offload takes no time where the host has the values
    already, since nothing has changed them.

    Args:
        number: of the graph's own nodes, which come first; the tables are numbered behind them.
        copy_of: the copy of what is loaded, in either direction, without name and parents.

    Returns:
        The tables, and by the name of a node the loads that it waits for.
    """
    tables: list[TransferTable] = []
    behind: dict[tuple[str, str], int] = {}
    for load in loads:
        behind[load.model, load.node] = len(number) + len(tables)
        copy = copy_of(load)
        seconds = copy.seconds if _changes(graph, load) else [0.0] * len(copy.seconds)
        name = f"offload {load.model} after {load.node}"
        tables.append(replace(copy, name=name, parents=[(number[load.node], 0)], seconds=seconds))
    waits: dict[str, list[ParentRow]] = {name: [] for name in graph.nodes}
    for load in loads:
        before = [
            (behind[load.model, edge.parent], edge.steps_back)
            for edge in graph.parents(load.node)
            if edge.kind == "version" and (load.model, edge.parent) in behind
        ]
        waits[load.node].append((len(number) + len(tables), 0))
        parents = before or [(behind[load.model, load.node], 1)]
        tables.append(replace(copy_of(load), name=load.name, parents=parents))
    return tables, waits


def _changes(graph: DataflowGraph, load: Load) -> bool:
    """Whether the model has other values behind the node than before, or others of its versions at hand."""
    follow = graph.follows.get(load.node)
    if graph.versions_kept(load.model) > 1:
        return True
    return graph.calls[load.node].trains if follow is None else follow.target == load.model
