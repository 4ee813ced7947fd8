"""The master's state machine: which calls may be issued now. Pure: events in, actions out, no I/O.

Calls are issued in the plan's total order as far as devices are shared: a call goes out when its
parents are done and every earlier call that shares a device with it has gone out. Every worker
executes what it gets first in, first out, so the earliest unfinished call of the order can always
proceed: no deadlock, and the same order on every device in every run.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from realhf.dataflow.graph import DataflowGraph
from realhf.geometry.layout import Layout


@dataclass(frozen=True, order=True)
class Node:
    """Model function call `call` of step `step`; or a model following another at its end (`DataflowGraph.follows`), or
    one coming back from host memory (`realhf.dataflow.offload.Load`)."""

    step: int
    call: str


@dataclass(frozen=True)
class Issue:
    """Action: send the call, and before it the reallocation that it needs, to the workers."""

    node: Node


@dataclass(frozen=True)
class FinishStep:
    """Action: all calls of the step have ended; its data may go."""

    step: int


Action = Issue | FinishStep


class CallQueue:
    """Issues the calls of steps `order` covers.

    Args:
        graph: the calls and their edges.
        order: every (call, step) of these steps, in the plan's order; none waits for one that is not there.
        devices: what each of them occupies, by name.
        max_steps_in_flight: step t may start when step t - max_steps_in_flight has finished.
    """

    def __init__(
        self,
        graph: DataflowGraph,
        order: Sequence[tuple[str, int]],
        devices: Mapping[str, frozenset[int]],
        max_steps_in_flight: int,
    ):
        self._graph = graph
        self._waiting = [Node(step, call) for call, step in order]
        self._window = max_steps_in_flight
        self._unfinished: dict[int, set[str]] = {}
        for node in self._waiting:
            self._unfinished.setdefault(node.step, set()).add(node.call)
        self._devices = devices

    @property
    def finished(self) -> bool:
        return not self._unfinished

    def start(self) -> list[Action]:
        """The calls that can go out at the beginning."""
        return list(self._issue())

    def ended(self, node: Node) -> list[Action]:
        """What follows from the end of a call that was issued."""
        calls = self._unfinished[node.step]
        calls.remove(node.call)
        actions: list[Action] = []
        if not calls:
            del self._unfinished[node.step]
            actions.append(FinishStep(node.step))
        return [*actions, *self._issue()]

    def _issue(self) -> Iterator[Issue]:
        oldest = min(self._unfinished, default=0)
        held_devices: set[int] = set()
        still_waiting = []
        for i, node in enumerate(self._waiting):
            if len(held_devices) == self._num_devices:
                still_waiting += self._waiting[i:]
                break
            devices = self._devices[node.call]
            if node.step < oldest + self._window and self._parents_done(node) and not devices & held_devices:
                yield Issue(node)
            else:
                still_waiting.append(node)
                held_devices |= devices
        self._waiting = still_waiting

    @property
    def _num_devices(self) -> int:
        return len(frozenset().union(*self._devices.values()))

    def _parents_done(self, node: Node) -> bool:
        return all(
            edge.parent not in self._unfinished.get(node.step - edge.steps_back, ())
            for edge in self._graph.parents(node.call)
        )


def occupied(
    graph: DataflowGraph,
    node: str,
    layouts: Mapping[str, Layout],
    homes: Mapping[str, Layout],
    offload: Sequence[str] = (),
) -> frozenset[int]:
    """The devices whose calls come to `node` in their order: the call's own mesh, or the home of a model that follows.

    Its inputs are on their way already: they were sent when they were made. Parameters that come from other devices
    are sent by these beside whatever they compute; but where they wait in host memory (`offload`), they
    are loaded and sent back in the order of calls, so that the home is one of the places.
    """
    sources, target = _sources_and_target(graph, node, layouts, homes)
    return frozenset({*target.mesh.devices, *_devices(homes[model] for model in sources if model in offload)})


def movers_of(
    graph: DataflowGraph, node: str, layouts: Mapping[str, Layout], homes: Mapping[str, Layout]
) -> frozenset[int]:
    """The devices that take part in the move of parameters for `node`, none where there is no move."""
    sources, target = _sources_and_target(graph, node, layouts, homes)
    if all(homes[model] == target for model in sources) and node not in graph.follows:
        return frozenset()
    return frozenset({*target.mesh.devices, *_devices(homes[model] for model in sources)})


def _sources_and_target(
    graph: DataflowGraph, node: str, layouts: Mapping[str, Layout], homes: Mapping[str, Layout]
) -> tuple[tuple[str, ...], Layout]:
    """The models whose homes a node needs, and where it has something to compute or to write."""
    if follow := graph.follows.get(node):
        return (follow.source, follow.target), homes[follow.target]
    return (graph.calls[node].model_name,), layouts[node]


def _devices(layouts: Iterable[Layout]) -> set[int]:
    return {device for layout in layouts for device in layout.mesh.devices}
