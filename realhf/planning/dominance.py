"""Which of the ways to run a call are worth a search: those that no other is better than in everything.

Two options of a call are exchangeable in a plan where their layout, the label of their home, their communicators and
their transfers are the same: then only seconds and bytes tell them apart. A plan with a dominating option in place of
another needs no more memory on any device, and in the same order of calls takes no longer. So the fastest plan, in the
best order, is among the plans of what is kept.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from realhf.dataflow.graph import ModelFunctionCallDef
from realhf.planning.model.communicators import axes_used
from realhf.planning.options import Option, options_to_search
from realhf.planning.problem.option_rows import row_of
from realhf.planning.problem.tables import OptionRow
from realhf.planning.task import PlanningTask
from realhf.planning.ways import Way


def worthwhile(task: PlanningTask, name: str) -> Sequence[Option]:
    """The options of a call that the fastest plan may have: of those that may fit into memory. The task keeps them.

    Raises:
        UserError: as `options_to_search`.
    """
    is_loaded = task.graph.model_calls[name].model_name in task.offload
    key = ("worthwhile", name, task.searched, task.near, is_loaded)
    if key not in task.known:
        task.known[key] = tuple(options_to_search(task, name, Dominance(task, drops_hopeless=True)))
    found: tuple[Option, ...] = task.known[key]
    return found


@dataclass(frozen=True)
class Dominance:
    """Keeps the ways that are worth a search in a task (`realhf.planning.options.Keeps`). With `drops_hopeless` those
    go that no feasible plan has, since they do not fit into memory alone."""

    task: PlanningTask
    drops_hopeless: bool = False

    def __call__(self, call: ModelFunctionCallDef, ways: list[Way]) -> list[Way]:
        """The ways to keep, in their order; the first of several equal ones."""
        model = self.task.call_models[call.name]
        if self.drops_hopeless:
            limit = self.task.cluster.device_memory_bytes
            ways = [way for way in ways if model.under(way[2]).least_bytes(way[0], way[1]) <= limit]
        groups: dict[Hashable, list[tuple[Way, OptionRow]]] = {}
        for way in ways:
            row = row_of(self.task, call, *way)
            groups.setdefault(self._label(call, way, row), []).append((way, row))
        kept = {way for group in groups.values() for way in _undominated(group)}
        return [way for way in ways if way in kept]

    def _label(self, call: ModelFunctionCallDef, way: Way, row: OptionRow) -> Hashable:
        """Equal for ways of one (dp, tp, pp) that only seconds and bytes tell apart.

        Where a model has one call, nobody asks for the label of its home. Where a model may wait in host memory, its
        optimizer states are loaded with it unless they are there anyway.
        """
        graph, features = self.task.graph, self.task.call_models[call.name].under(way[2]).features
        is_home = self.task.homes[call.name] == call.name
        is_alone = not graph.follows and len(graph.calls_of(call.model_name)) == 1
        axes = axes_used(call, way[0], gathers_parameters=is_home and features.divides_parameters)
        states = features.offloads_states if call.model_name in self.task.offload else None
        return axes, None if is_alone else row.strategy, states


def _undominated(ways: Sequence[tuple[Way, OptionRow]]) -> list[Way]:
    costs = [(row.time_s, row.static_bytes, row.dynamic_bytes, row.copy_bytes) for _, row in ways]
    kept: list[int] = []
    for number in sorted(range(len(ways)), key=lambda each: (*costs[each], each)):
        # Whatever dominates a way comes before it.
        _, static, dynamic, copied = costs[number]
        if not any(
            costs[other][1] <= static and costs[other][2] <= dynamic and costs[other][3] <= copied for other in kept
        ):
            kept.append(number)
    return [ways[number][0] for number in sorted(kept)]
