"""Models that wait in host memory while no call needs them (ReaL, section 4: offload nodes of the augmented graph)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from realhf.base.errors import UserError
from realhf.dataflow.graph import DataflowGraph


@dataclass(frozen=True)
class Load:
    """Loads `model` to the devices of its home for `node`, a call or a model that follows another.

    `states`: with its optimizer states, because `node` trains it. On each of these devices the load comes right before
    `node`, but need not wait for the inputs of a call. After `node` the model goes back to host memory.
    """

    name: str
    model: str
    node: str
    states: bool


def loads_of(graph: DataflowGraph, offload: Iterable[str]) -> dict[str, Load]:
    """All loads of a step by name, if the models `offload` wait in host memory."""
    waiting = set(offload)
    loads = (
        Load(f"load {model} for {node}", model, node, node in graph.calls and graph.calls[node].trains)
        for node in graph.nodes
        for model in models_needed(graph, node)
        if model in waiting
    )
    return {load.name: load for load in loads}


def models_needed(graph: DataflowGraph, node: str) -> tuple[str, ...]:
    """The models whose homes a node of the graph reads or writes."""
    if node in graph.beside:
        return ()
    follow = graph.follows.get(node)
    return (graph.calls[node].model_name,) if follow is None else (follow.source, follow.target)


def with_loads(order: Iterable[tuple[str, int]], loads: Mapping[str, Load]) -> list[tuple[str, int]]:
    """An order of (node, step) with the loads of each node right before it."""
    before: dict[str, list[str]] = {}
    for load in loads.values():
        before.setdefault(load.node, []).append(load.name)
    return [(name, step) for node, step in order for name in (*before.get(node, ()), node)]


def check_offload(offload: Iterable[str], graph: DataflowGraph) -> None:
    """Raises UserError if a plan offloads a model that it cannot."""
    names = list(offload)
    for name in names:
        if name not in graph.models:
            known = ", ".join(graph.models)
            raise UserError(f"offload: {name!r} is no model of the experiment; choose from {known}")
        if names.count(name) > 1:
            raise UserError(f"offload: {name!r} is listed twice; list each model once")
    for follow in graph.follows.values():
        if follow.source in names and follow.target in names:
            raise UserError(
                f"offload: {follow.target!r} follows {follow.source!r}, so that both are needed at once, and no call's "
                "memory counts both; offload one of them"
            )
