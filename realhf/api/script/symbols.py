"""Symbolic values: what stands for columns of the step while a script is traced."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, Protocol

from realhf.api.script.columns import Columns, Symbolic
from realhf.api.script.config import Generate
from realhf.api.script.functions import TensorFunction, check_function, describe_function
from realhf.api.script.lines import ScriptError, script_error
from realhf.api.script.views import Application, ColumnOf, View
from realhf.base.errors import UserError

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

    @property
    def ends(self) -> "Ends":
        """What ends a response, taken off its text."""
        made = self.generated_by
        return Ends() if made is None else Ends(made.end_token, made.stop_strings)


class Ends(NamedTuple):
    """The end token (-1: none) and the stop strings of responses."""

    eos_token: int = -1
    stop_strings: tuple[str, ...] = ()


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


@dataclass
class Applications:
    """The tensor functions that a script applies; each has to be read by a call."""

    used: set[int] = field(default_factory=set)
    made: dict[int, tuple[str, str]] = field(default_factory=dict)  # name and line by number

    def apply(
        self, tracing: Tracing, function: TensorFunction, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> SymbolicColumns:
        """The columns that a function makes of its arguments, with those of the arguments."""
        try:
            check_function(function.function)
        except ScriptError:
            raise
        except UserError as error:
            raise script_error(str(error)) from None
        given = [value for value in (*arguments, *keywords.values()) if isinstance(value, Symbolic)]
        sources = [value._columns if isinstance(value, SymbolicColumn) else value for value in given]
        columns: dict[str, str] = {}
        for source in sources:
            assert isinstance(source, SymbolicColumns)
            view, is_made = source._view, source._origin.is_open
            columns |= {name if is_made else key: key for name, key in view.columns}
        application = Application(
            len(self.made),
            function.function,
            tuple(_argument(value) for value in arguments),
            tuple((name, _argument(value)) for name, value in keywords.items()),
        )
        origins = [source._origin for source in sources if isinstance(source, SymbolicColumns)]
        what = describe_function(function.function)
        line = script_error("").args[0].rpartition(": ")[0]
        self.made[application.number] = (what, line)
        temperature = next((o.temperature for o in origins if o.temperature is not None), None)
        origin = Origin(what, line, temperature=temperature, is_open=True)
        return SymbolicColumns(tracing, View(tuple(columns.items()), application), origin)

    def use(self, view: View) -> tuple[int, ...]:
        """Notes that a call evaluates a view; returns the functions that no call has evaluated before."""
        numbers = dict.fromkeys(application.number for application in view.applications)
        new = tuple(number for number in numbers if number not in self.used)
        self.used |= set(numbers)
        return new

    def check_used(self) -> None:
        """Raises UserError where nothing reads the result of a function."""
        for number, (what, line) in self.made.items():
            if number not in self.used:
                raise ScriptError(
                    f"{line}: nothing reads the result of {what}, and a tensor function runs within the call that "
                    "reads it; give it to a call, such as update, or leave it out"
                )


def _argument(value: Any) -> Any:
    match value:
        case SymbolicColumns():
            return value._view
        case SymbolicColumn():
            return ColumnOf(value._columns._view, value._name)
    return value
