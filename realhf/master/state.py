"""The master's state machine: which calls may be issued now. Pure: events in, actions out, no I/O.

A call is issued when its parents have ended and every earlier call of the plan's order that shares a device with it has
been issued. A worker executes its requests in their order. So the earliest unfinished call can always proceed: there is
no deadlock, and every device has the same order in every run.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from realhf.dataflow.graph import DataflowGraph
from realhf.geometry.layout import Layout


@dataclass(frozen=True, order=True)
class Node:
    """The node `call` of step `step`: a model function call, a model that follows another (`DataflowGraph.follows`), or
    the load of a model from host memory (`realhf.dataflow.offload.Load`)."""

    step: int
    call: str


@dataclass(frozen=True)
class Issue:
    """Action: send the workers the reallocation that a call needs, and then the call."""

    node: Node


@dataclass(frozen=True)
class FinishStep:
    """Action: free the data of a step, whose calls have all ended."""

    step: int


Action = Issue | FinishStep


class CallQueue:
    """The calls of some steps, issued as soon as they may start.

    Args:
        graph: the calls and their edges.
        order: every (call, step) in the plan's order; it has all parents of its calls that have not ended.
        devices: by call, the devices that it occupies; none for a call beside the devices, which no other call keeps
            waiting.
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
        nodes = [Node(step, call) for call, step in order]
        self._waiting = [node for node in nodes if devices[node.call]]
        self._beside = sorted((node for node in nodes if not devices[node.call]), key=lambda node: node.step)
        self._window = max_steps_in_flight
        self._last_begun = -1
        self._unfinished: dict[int, set[str]] = {}
        for node in nodes:
            self._unfinished.setdefault(node.step, set()).add(node.call)
        self._devices = devices

    @property
    def finished(self) -> bool:
        return not self._unfinished

    def start(self) -> list[Action]:
        """The actions at the beginning."""
        return list(self._issue())

    def ended(self, node: Node) -> list[Action]:
        """The actions that follow when an issued call has ended."""
        calls = self._unfinished[node.step]
        calls.remove(node.call)
        actions: list[Action] = []
        if not calls:
            del self._unfinished[node.step]
            actions.append(FinishStep(node.step))
        return [*actions, *self._issue()]

    def cut(self) -> bool:
        """Takes out the steps behind the last one that has begun; returns whether there were any."""
        later = [step for step in self._unfinished if step > self._last_begun]
        for step in later:
            del self._unfinished[step]
        self._waiting = [node for node in self._waiting if node.step <= self._last_begun]
        self._beside = [node for node in self._beside if node.step <= self._last_begun]
        return bool(later)

    def _issue(self) -> Iterator[Issue]:
        for issue in self._issuable():
            self._last_begun = max(self._last_begun, issue.node.step)
            yield issue

    def _issuable(self) -> Iterator[Issue]:
        oldest = min(self._unfinished, default=0)
        # They go first: their inputs were made just now, and workers only hand them on.
        yield from self._issue_beside(oldest + self._window)
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

    def _issue_beside(self, end: int) -> Iterator[Issue]:
        """Calls beside the devices of steps before `end`."""
        for node in list(takewhile(lambda node: node.step < end, self._beside)):
            if self._parents_done(node):
                self._beside.remove(node)
                yield Issue(node)

    @property
    def _num_devices(self) -> int:
        return len(frozenset().union(*self._devices.values()))

    def _parents_done(self, node: Node) -> bool:
        """Whether a node has all it waits for. A call may keep numbers from step to step (`Context.state`), so it waits
        for that of the step before, which has the same devices: this costs a message's way at most."""
        if node.call in self._graph.calls and node.call in self._unfinished.get(node.step - 1, ()):
            return False
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
    """The devices that `node` occupies, on which it has a place in the order of calls.

    They are the call's own mesh, or the home of the model that follows; none for a call beside the devices. Devices
    that only send parameters are not occupied: they send beside their calls. If a model waits in host memory
    (`offload`), its home loads it and sends it in the order of calls, so the home is occupied too. Inputs occupy no
    device: they were sent when they were produced.
    """
    if node in graph.beside:
        return frozenset()
    sources, target = _sources_and_target(graph, node, layouts, homes)
    return frozenset({*target.mesh.devices, *_devices(homes[model] for model in sources if model in offload)})


def movers_of(
    graph: DataflowGraph,
    node: str,
    layouts: Mapping[str, Layout],
    homes: Mapping[str, Layout],
    copies: Mapping[str, str] | None = None,
) -> frozenset[int]:
    """The devices that take part in moving the parameters of `node`; none if they need not move. `copies`: by call the
    one whose copy it takes its own from (`realhf.dataflow.copies`)."""
    if node in graph.beside:
        return frozenset()
    sources, target = _sources_and_target(graph, node, layouts, homes)
    if copies and node in copies:
        source = layouts[copies[node]]
        return frozenset({*target.mesh.devices, *source.mesh.devices} if source != target else ())
    if all(homes[model] == target for model in sources) and node not in graph.follows:
        return frozenset()
    return frozenset({*target.mesh.devices, *_devices(homes[model] for model in sources)})


def _sources_and_target(
    graph: DataflowGraph, node: str, layouts: Mapping[str, Layout], homes: Mapping[str, Layout]
) -> tuple[tuple[str, ...], Layout]:
    """The models whose homes a node reads or writes, and the layout that it computes in or writes to."""
    if follow := graph.follows.get(node):
        return (follow.source, follow.target), homes[follow.target]
    return (graph.calls[node].model_name,), layouts[node]


def _devices(layouts: Iterable[Layout]) -> set[int]:
    return {device for layout in layouts for device in layout.mesh.devices}
