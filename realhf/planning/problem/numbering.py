"""Numbers of what the tables of a planning problem refer to: nodes of the graph, distinct layouts of options."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from realhf.dataflow.graph import ModelFunctionCallDef
from realhf.geometry.layout import Layout
from realhf.planning.options import Option
from realhf.planning.problem.tables import ParentRow
from realhf.planning.task import PlanningTask

K = TypeVar("K")
Numbered = tuple[list[Layout], list[int]]  # distinct layouts, and for every option the number of its own


@dataclass(frozen=True)
class Numbering:
    """Of a task and options of its calls.

    groups: calls count as grouped like their home where they can be (`realhf.planning.model.reallocation`).
    number: of the graph's own nodes, which come first.
    layouts: of a call, the distinct ones among its options, and for every option the number of its own.
    """

    task: PlanningTask
    options: Mapping[str, Sequence[Option]]
    groups: bool

    @cached_property
    def number(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.task.graph.nodes)}

    @cached_property
    def layouts(self) -> dict[str, Numbered]:
        return {name: _layouts(self.options[name]) for name in self.task.graph.calls}

    def parents(self, node: str) -> list[ParentRow]:
        """What a node of the graph waits for in the graph."""
        return [(self.number[edge.parent], edge.steps_back) for edge in self.task.graph.parents(node)]

    def home_call(self, model: str) -> ModelFunctionCallDef:
        """The call in whose layout a model's parameters live."""
        return self.task.graph.calls[self.task.homes[self.task.graph.calls_of(model)[0].name]]


def _layouts(options: Sequence[Option]) -> Numbered:
    """Options of one layout usually follow one another, and share it: few have to be compared."""
    numbers: dict[Layout, int] = {}
    of_options: list[int] = []
    last: Layout | None = None
    for option in options:
        if option.layout is not last:
            last = option.layout
            number = numbers.setdefault(last, len(numbers))
        of_options.append(number)
    return list(numbers), of_options


def distinct(numbered: Numbered, key: Callable[[Layout], K]) -> tuple[list[K], list[int]]:
    """The distinct keys of the layouts, and for every option the number of its own."""
    layouts, of_options = numbered
    numbers: dict[K, int] = {}
    of_layout = [numbers.setdefault(key(layout), len(numbers)) for layout in layouts]
    return list(numbers), [of_layout[number] for number in of_options]
