"""What a call of a script reads: columns of the step, and tensor functions of them, as data for the workers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from realhf.api.script.functions import Named


@dataclass(frozen=True)
class View:
    """Columns by the names that code sees: `columns` are pairs (name, key of the dataflow graph).

    Where there is a `function`, its result replaces and adds columns.
    """

    columns: tuple[tuple[str, str], ...]
    function: "Application | None" = None

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys that are read, each once, in the order of the script."""
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


@dataclass(frozen=True)
class ColumnOf:
    """One column of a view: a list of tensors."""

    view: View
    name: str


@dataclass(frozen=True)
class Application:
    """A tensor function with its arguments, of which those that are a `View` or a `ColumnOf` are evaluated first.

    `number` counts the applications of a script: each is evaluated once in a call.
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
