"""Copies of parameters that are taken from another call's copy, not from the model's home (`CallPlan.copy_from`).

The copy of the source is kept until every call that takes from it has its own. A call in the same layout takes it over,
and nothing moves.
"""

import copy
from collections.abc import Mapping, Sequence
from math import inf

from realhf.dataflow.graph import DataflowGraph, Edge


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
    forwards = [(edge.parent, edge.child, edge.steps_back) for edge in waiting.edges]
    backwards = [(child, parent, steps) for parent, child, steps in forwards]
    before = _least_steps(source, backwards)  # by node that the source waits for, how many steps before it
    after = {taker: _least_steps(taker, forwards) for taker in takers}  # by node that waits for it, how many later
    return {
        name
        for name in graph.model_calls
        if any(after[taker].get(name, inf) + before.get(name, inf) > 1 or name == taker for taker in takers)
    }


def _least_steps(start: str, edges: Sequence[tuple[str, str, int]]) -> dict[str, int]:
    """The least sum of steps on a way from `start` to each node, over (from, to, steps)."""
    steps, has_changed = {start: 0}, True
    while has_changed:
        has_changed = False
        for first, second, more in edges:
            if first in steps and steps[first] + more < steps.get(second, inf):
                steps[second], has_changed = steps[first] + more, True
    return steps
