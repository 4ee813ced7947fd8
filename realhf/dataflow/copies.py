"""Copies of parameters that are taken from another call's copy, not from the model's home (`CallPlan.copy_from`).

The copy of the source is kept until every call that takes from it has its own. A call in the same layout takes it over,
and nothing moves.
"""

import copy
from collections.abc import Mapping, Sequence
from math import inf

from realhf.dataflow.graph import DataflowGraph, Edge
from realhf.geometry.layout import Layout


def takers_of(copies: Mapping[str, str], source: str) -> list[str]:
    """The calls that take their copies from that of `source`; `copies` has the source of each such call."""
    return [call for call, of in copies.items() if of == source]


def with_copies(graph: DataflowGraph, copies: Mapping[str, str]) -> DataflowGraph:
    """The graph in which every call waits for the source of its copy, and the source of the next step for the call: by
    then the copy is free."""
    if not copies:
        return graph
    waiting = copy.copy(graph)
    taken = [(source, call) for call, source in copies.items()]
    waiting.edges = [
        *graph.edges,
        *(Edge(source, call, 0, "copy") for source, call in taken),
        *(Edge(call, source, 1, "copy") for source, call in taken),
    ]
    return waiting


def running_beside(graph: DataflowGraph, copies: Mapping[str, str], source: str) -> set[str]:
    """The calls with a model that may run while the copy of `source` is kept, its takers among them.

    Any other always runs before the source or after the last taker, since the edges of `with_copies` say so: of its
    runs one comes after the taker of step t, and the one before that before the source of step t.
    """
    waiting, takers = with_copies(graph, copies), takers_of(copies, source)
    before, after = _steps_to(waiting, source), {taker: _steps_from(waiting, taker) for taker in takers}
    return {
        name
        for name in graph.model_calls
        if any(after[taker].get(name, inf) + before.get(name, inf) > 1 or name == taker for taker in takers)
    }


def copies_problem(
    copies: Mapping[str, str],
    layouts: Mapping[str, Layout],
    homes: Mapping[str, str],
    graph: DataflowGraph,
    offload: Sequence[str] = (),
) -> str:
    """Why a call cannot take its copy from where `copies` says; empty where all can. `homes` has, by model, the call in
    whose layout the parameters live."""
    for name, source in copies.items():
        says, model = f"{name}: copy_from={source!r}", graph.model_calls[name].model_name
        calls = [call.name for call in graph.calls_of(model)]
        home = layouts[homes[model]]
        if source not in calls or source == name:
            copied = [call for call in calls if call != name and layouts[call] != home]
            remedy = f"choose from {', '.join(copied)}, or leave it out" if copied else "leave it out"
            return (
                f"{says} is no other call of its model {model!r} with a copy; {remedy}: the copy then comes from the "
                "model's home"
            )
        if layouts[name] == home:
            return f"{says}, but its layout is that of its model's home and needs no copy; leave it out"
        if layouts[source] == home:
            return f"{says}, which has no copy: it runs in the home of model {model!r}; leave it out"
        if root := copies.get(source):
            return f"{says}, whose own copy is from {root}; give copy_from={root!r} here, too"
        if model in offload:
            return (
                f"{says}, but model {model!r} waits in host memory, from where all its copies come; leave copy_from "
                "out, or take the model out of offload"
            )
        if _versions(graph, name) != _versions(graph, source):
            return f"{says}, which uses another version of the parameters; leave it out"
        if graph.order.index(source) > graph.order.index(name):
            return f"{says}, which runs after it; leave it out, or give {source} copy_from={name!r}"
        for other in calls:
            if layouts[other] == layouts[source] and other != source and copies.get(other) != source:
                return (
                    f"{says}, whose copy is kept meanwhile, but {other} has the same layout and makes a copy of its "
                    f"own; give {other} copy_from={source!r} too, or another layout"
                )
    return ""


def _versions(graph: DataflowGraph, name: str) -> set[tuple[str, int]]:
    """The calls that a call must wait for to have its version of the parameters."""
    return {(edge.parent, edge.steps_back) for edge in graph.parents(name) if edge.kind == "version"}


def _steps_from(graph: DataflowGraph, name: str) -> dict[str, int]:
    """For every node that waits for `name` of step t, in how many steps from t it does so the first time."""
    return _least_steps(name, [(edge.parent, edge.child, edge.steps_back) for edge in graph.edges])


def _steps_to(graph: DataflowGraph, name: str) -> dict[str, int]:
    """For every node that `name` of step t waits for, how many steps before t the last one is."""
    return _least_steps(name, [(edge.child, edge.parent, edge.steps_back) for edge in graph.edges])


def _least_steps(start: str, edges: Sequence[tuple[str, str, int]]) -> dict[str, int]:
    """The least sum of steps on a way from `start` to each node, over (from, to, steps)."""
    steps, has_changed = {start: 0}, True
    while has_changed:
        has_changed = False
        for first, second, more in edges:
            if first in steps and steps[first] + more < steps.get(second, inf):
                steps[second], has_changed = steps[first] + more, True
    return steps
