"""What a call reads: columns of the step, and tensor functions of them, as data for the workers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from realhf.api.script.columns import Symbolic
from realhf.api.script.functions import Named, TensorFunction, check_function


@dataclass(frozen=True)
class View(Symbolic):
    """Columns by the names that code sees: `columns` are pairs (name, key of the dataflow graph); without any they are
    all inputs of the call, by their keys.

    Where there is a `function`, its result replaces and adds columns.
    """

    columns: tuple[tuple[str, str], ...] = ()
    function: "Application | None" = None

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys that are read, each once, in the order of the experiment."""
        found = dict.fromkeys(key for _, key in self.columns)
        if self.function is not None:
            for view in self.function.views:
                found |= dict.fromkeys(view.keys)
        return tuple(found)

    @property
    def applications(self) -> "Iterator[Application]":
        """All functions that are applied, the outer ones first."""
        if self.function is not None:
            yield self.function
            for view in self.function.views:
                yield from view.applications

    def _apply(self, function: TensorFunction, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> "View":
        check_function(function.function)
        applied = Application(0, function.function, arguments, tuple(keywords.items()))
        named = [view.columns for view in applied.views]
        return View(tuple(dict(pair for pairs in named for pair in pairs).items()) if all(named) else (), applied)


INPUTS = View()


def inputs(*keys: str, **columns: str) -> View:
    """The columns of these keys that a listed call reads, by name those whose keys are others: `inputs("seq",
    prompt="question")`. Without an argument, all inputs of the call.

    A tensor function that is given them stands for its result: `Update(ppo_policy(ppo), batch=ppo_advantages(step,
    step, step, step, ppo))` with `step = inputs()`.
    """
    return View((*zip(keys, keys, strict=True), *columns.items()))


@dataclass(frozen=True)
class ColumnOf:
    """One column of a view: a list of tensors."""

    view: View
    name: str


@dataclass(frozen=True)
class Application:
    """A tensor function with its arguments, of which those that are a `View` or a `ColumnOf` are evaluated first: once
    in a call.

    `number` counts the applications of a script.
    """

    number: int
    function: Named
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]

    @property
    def views(self) -> tuple[View, ...]:
        """The views among its arguments."""
        values = (*self.arguments, *(value for _, value in self.keywords))
        return tuple(v.view if isinstance(v, ColumnOf) else v for v in values if isinstance(v, View | ColumnOf))
