"""Symbolic values: what stands for columns of the step while a script is traced."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from realhf.api.script.columns import Columns, Symbolic
from realhf.api.script.config import Generate
from realhf.api.script.functions import TensorFunction
from realhf.api.script.lines import script_error
from realhf.api.script.views import View

_WHY = (
    "a script is traced once, before there is any data, and only says which call reads what; compute with values in a "
    "tensor function (@tensor_function), which runs on the workers, and leave out samples by the column `valid`"
)


class Tracing(Protocol):
    """What symbols ask of the trace that they belong to."""

    def apply(self, function: TensorFunction, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Columns: ...


def _refuse(what: str) -> Any:
    def method(self: Any, *arguments: Any) -> NoReturn:
        raise script_error(f"{what} of {self!r} is not known in a script: {_WHY}")

    return method


class _Unknown(Symbolic):
    """Refuses everything that would need the value."""

    __bool__ = _refuse("the truth")
    __float__ = __int__ = __index__ = __complex__ = _refuse("the number")
    __iter__ = __reversed__ = _refuse("the iteration")
    __len__ = _refuse("the length")
    __getitem__ = _refuse("an element")
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _refuse("a comparison")
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse("the arithmetic")
    __truediv__ = __rtruediv__ = __neg__ = __pow__ = __matmul__ = __abs__ = _refuse("the arithmetic")
    __contains__ = _refuse("the content")
    __hash__ = object.__hash__


@dataclass(frozen=True)
class Origin:
    """What is known of symbolic columns beside their names.

    what: for messages: `actor.generate`, `prompts`.
    suffix: the name of the call that made them, where its model has another such call; part of the names of keys.
    temperature: that of the rollout they belong to, None if none; generated_by: the call that made that rollout.
    is_open: a tensor function made them, which may have added columns.
    """

    what: str
    line: str
    suffix: str = ""
    temperature: float | None = None
    is_open: bool = False
    generated_by: Generate | None = None


class SymbolicColumns(_Unknown, Columns):
    """Columns in the text of a script."""

    def __init__(self, tracing: Tracing, view: View, origin: Origin):
        Columns.__init__(self, (), dict.fromkeys(name for name, _ in view.columns))
        self._tracing, self._view, self._origin = tracing, view, origin

    def __repr__(self) -> str:
        return f"{self._origin.what} (of {self._origin.line})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in self._data or self._origin.is_open:
            return SymbolicColumn(self, name)
        raise script_error(
            f"{self!r} has no column {name!r}; its columns are {', '.join(self._data)}. A script only says which call "
            "reads which columns; compute with their values in a tensor function (@tensor_function)"
        )

    def get(self, name: str) -> Any:
        return getattr(self, name) if name in self._data or self._origin.is_open else None

    def _apply(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Columns:
        return self._tracing.apply(function, arguments, keywords)

    def _needs(self, names: Iterable[str], what: str, remedy: str) -> None:
        """Raises UserError unless the columns are there, or may have been made by a tensor function."""
        missing = [name for name in names if name not in self._data]
        if missing and not self._origin.is_open:
            raise script_error(
                f"{what} reads the column {missing[0]!r}, and {self!r} has {', '.join(self._data)}; {remedy}"
            )


class SymbolicColumn(_Unknown):
    """One column in the text of a script."""

    def __init__(self, columns: SymbolicColumns, name: str):
        self._columns, self._name = columns, name

    def __repr__(self) -> str:
        return f"column {self._name!r} of {self._columns!r}"

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise script_error(f"{name} of {self!r} is not known in a script: {_WHY}")

    def _apply(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Columns:
        return self._columns._apply(function, arguments, keywords)
