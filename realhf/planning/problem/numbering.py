"""The distinct layouts of options, which the rows and columns of transfers stand for."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from realhf.dataflow.graph import ModelFunctionCallDef
from realhf.geometry.layout import Layout
from realhf.planning.options import Option
from realhf.planning.task import PlanningTask

K = TypeVar("K")
Numbered = tuple[list[Layout], list[int]]  # distinct layouts, and for every option the number of its own


@dataclass(frozen=True)
class Numbering:
    """Of a task and options of its calls. groups: see `build_problem`."""

    task: PlanningTask
    options: Mapping[str, Sequence[Option]]
    groups: bool

    @cached_property
    def layouts(self) -> dict[str, Numbered]:
        return {name: _layouts(self.options[name]) for name in self.task.graph.calls}

    def parents(self, node: str) -> list[tuple[str, int]]:
        """What a node of the graph waits for in the graph."""
        return [(edge.parent, edge.steps_back) for edge in self.task.graph.parents(node)]

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
