"""One plan of a planning problem in detail, plain and slow: the oracle of the simulator in C++ (`csrc/search`)."""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from realhf.planning.model.communicators import MOVES
from realhf.planning.problem.native import DeviceNeed
from realhf.planning.problem.tables import CallTable, KeptCopy, OptionRow, Problem

_Placed = tuple[CallTable, OptionRow, OptionRow]  # a call, its option, and that of its home


@dataclass(frozen=True)
class Event:
    """Node `node` of step `step` ran from `start_s` to `end_s`; its place in `Problem.nodes`."""

    node: int
    step: int
    start_s: float
    end_s: float


class Simulation:
    """What nodes take, occupy and wait for under one choice of options."""

    def __init__(self, problem: Problem, choice: Sequence[int]):
        self.problem = problem
        number, placed = problem.numbers(), _placed(problem, choice)
        self.devices = [set(_range(option)) for _, option, _ in placed]
        self.durations = [option.time_s for _, option, _ in placed]
        for transfer in problem.transfers:
            self.devices.append(set().union(*(self.devices[number[call]] for call in transfer.on)))
            row = transfer.rows[choice[number[transfer.source]]]
            column = transfer.columns[choice[number[transfer.target]]]
            self.durations.append(transfer.seconds[row * transfer.num_columns + column])
        self._parents = [[(number[name], back) for name, back in node.parents] for node in problem.nodes]

    def parents(self, step: int, node: int) -> list[tuple[int, int]]:
        """All (step, node) that must have ended, those of the bound on steps in flight included."""
        parents = [(step - back, parent) for parent, back in self._parents[node] if step >= back]
        is_source = all(back > 0 for _, back in self._parents[node])
        if is_source and step >= self.problem.max_steps_in_flight:
            parents += [(step - self.problem.max_steps_in_flight, other) for other in range(len(self._parents))]
        return parents


def simulate(problem: Problem, choice: Sequence[int], steps: int, order: Sequence[tuple[int, int]] = ()) -> list[Event]:
    """Algorithm 1 of the ReaL paper over `steps` steps: nodes in the order in which they become ready; ties: the
    earlier step, then the node's number. Returns the events in that order.

    `order` lists all (node, step) of some nodes, every parent before its children: those that share a device
    then run in that order. Other transfers remain free to run as soon as they are ready.
    """
    simulation = Simulation(problem, choice)
    instances = [(step, node) for step in range(steps) for node in range(len(problem.nodes))]
    before = {instance: simulation.parents(*instance) for instance in instances}
    last_on_device: dict[int, tuple[int, int]] = {}
    for node, step in order:
        earlier = {last_on_device[d] for d in simulation.devices[node] if d in last_on_device}
        before[step, node] = [*before[step, node], *earlier]
        last_on_device.update(dict.fromkeys(simulation.devices[node], (step, node)))
    waits = {instance: len(parents) for instance, parents in before.items()}
    children: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for instance, parents in before.items():
        for parent in parents:
            children.setdefault(parent, []).append(instance)
    queue = [(0.0, *instance) for instance in instances if not waits[instance]]  # (ready_s, step, node)
    heapq.heapify(queue)
    events, ends, free_at = [], dict[tuple[int, int], float](), [0.0] * problem.num_devices
    while queue:
        ready_s, step, node = heapq.heappop(queue)
        devices = simulation.devices[node]
        start_s = max([ready_s, *(free_at[device] for device in devices)])
        end_s = ends[step, node] = start_s + simulation.durations[node]
        for device in devices:
            free_at[device] = end_s
        events.append(Event(node, step, start_s, end_s))
        for child in children.get((step, node), []):
            waits[child] -= 1
            if not waits[child]:
                ready_s = max((ends[parent] for parent in simulation.parents(*child)), default=0.0)
                heapq.heappush(queue, (ready_s, *child))
    assert len(events) == len(instances), "the nodes form a cycle, or the order breaks an edge"
    return events


def device_needs(problem: Problem, choice: Sequence[int]) -> list[DeviceNeed]:
    """What each device needs: static bytes of all calls placed on it, plus the largest dynamic need of one of them;
    communicators, and what it takes to send copies.

    A call whose layout is not that of its home holds a copy of its parameters while it runs (`CallTable.spared`), and
    keeps nothing: the copy is freed, unless others take theirs from it (`Problem.kept`). Where there is one, copies
    move, which takes a communicator of all devices.
    """
    placed = _placed(problem, choice)
    moves = any(not _same_layout(option, home) for _, option, home in placed)
    kept = [option.static_bytes if _same_layout(option, home) else 0.0 for _, option, home in placed]
    sources = _sources(problem, placed)
    alone = [_needed_bytes(*each, []) for each in zip(placed, sources, strict=True)]
    needs = []
    for device in range(problem.num_devices):
        here = [i for i, (_, option, _) in enumerate(placed) if device in _range(option)]
        labels = {label for i in here for label in placed[i][1].communicators}
        if labels and moves:
            labels.add(MOVES)
        static = communicators = problem.communicator_bytes * len(labels)
        for i in here:
            static += kept[i]
        sends = any(
            device in _range(source) and device not in _range(option)
            for source, (_, option, _) in zip(sources, placed, strict=True)
        )
        waiting = [copy for copy in problem.kept if device in _range(_option_of(placed, copy.source))]
        needed = max(
            (_needed_bytes(placed[i], sources[i], waiting) if waiting else alone[i] for i in here), default=0.0
        )
        peak = static + needed + (problem.sending_bytes if sends else 0.0)
        needs.append(DeviceNeed(communicators, static, peak))
    return needs


def _needed_bytes(placed: _Placed, source: OptionRow, waiting: Sequence[KeptCopy]) -> float:
    """Beside what stays: while the copy is filled from `source`, or while the call runs; with the copies `waiting` here
    that others take theirs from."""
    call, option, home = placed
    filling, running = 0.0, option.dynamic_bytes
    if not _same_layout(home, option):
        spared = {
            (of_home, of_copy): saved for of_home, of_copy, saved in call.spared if home.devices == option.devices
        }
        less = spared.get((home.strategy, option.strategy), 0.0)
        copied = max(option.copy_bytes - less, 0.0)
        filling, running = option.copy_bytes, option.static_bytes + option.dynamic_bytes + copied
        if call.in_place_bytes is not None:
            filling -= max(less - call.in_place_bytes, 0.0)
    for copy in waiting:
        if call.name not in copy.beside or (call.name in copy.takers and _same_layout(source, option)):
            continue  # what it takes over is its own copy
        filling += copy.size_bytes
        running += copy.size_bytes if copy.takers != [call.name] else 0.0  # its only taker finds it freed
    return max(filling, running)


def _same_layout(one: OptionRow, other: OptionRow) -> bool:
    return (one.devices, one.strategy) == (other.devices, other.strategy)


def makespan_s(events: Iterable[Event]) -> float:
    return max(event.end_s for event in events)


def _sources(problem: Problem, placed: Sequence[_Placed]) -> list[OptionRow]:
    """For every call the option from whose devices its parameters come: of its home, or of the call with the copy."""
    of_takers = {taker: copy.source for copy in problem.kept for taker in copy.takers}
    return [_option_of(placed, of_takers[call.name]) if call.name in of_takers else home for call, _, home in placed]


def _option_of(placed: Sequence[_Placed], name: str) -> OptionRow:
    return next(option for call, option, _ in placed if call.name == name)


def _placed(problem: Problem, choice: Sequence[int]) -> list[_Placed]:
    """Every call with its option and that of its home."""
    chosen = {call.name: call.options[index] for call, index in zip(problem.calls, choice, strict=True)}
    return [(call, chosen[call.name], chosen[call.home]) for call in problem.calls]


def _range(option: OptionRow) -> range:
    first, size = option.devices
    return range(first, first + size)
