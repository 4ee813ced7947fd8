"""What the tables of a planning problem are made from, and what is known of every call before they are."""

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
class ProblemInputs:
    """A task, the options of its calls, and whether calls count as grouped like their home where they can be.

    `number` has those of the graph's own nodes, which come first; `layouts` of a call are the distinct ones among its
    options.
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

    def home_call(self, model: str) -> ModelFunctionCallDef:
        """The call in whose layout a model's parameters live."""
        return self.task.graph.calls[self.task.homes[self.task.graph.calls_of(model)[0].name]]


def _layouts(options: Sequence[Option]) -> Numbered:
    """Options of one layout usually follow one another, and share it: few have to be compared."""
    numbers: dict[Layout, int] = {}
    places: list[int] = []
    last: Layout | None = None
    for option in options:
        if option.layout is not last:
            last = option.layout
            number = numbers.setdefault(last, len(numbers))
        places.append(number)
    return list(numbers), places


def distinct(numbered: Numbered, key: Callable[[Layout], K]) -> tuple[list[K], list[int]]:
    """The distinct keys of the layouts, and for every option the number of its own."""
    layouts, places = numbered
    numbers: dict[K, int] = {}
    of_layout = [numbers.setdefault(key(layout), len(numbers)) for layout in layouts]
    return list(numbers), [of_layout[place] for place in places]
