"""Results of a live program's calls: their rows stay on the workers until the program asks for values."""

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, Protocol

import numpy as np

from realhf.api.script.lines import script_error
from realhf.api.script.symbols import Origin, SymbolicColumn, SymbolicColumns, Tracing
from realhf.api.script.views import View

Values = list[np.ndarray]  # one [length, ...] a sample


class Source(Tracing, Protocol):
    """The round that columns belong to, as they see it."""

    def fetch(self, columns: "LiveColumns", names: tuple[str, ...]) -> dict[str, Values]: ...

    def rows(self, name: str) -> list[Any]: ...

    def responses(self, columns: "LiveColumns") -> list[str]: ...

    def prompts(self) -> list[str]: ...

    def size(self) -> int: ...

    def is_in_data(self, name: str) -> bool: ...


class LiveColumns(SymbolicColumns):
    """Columns of a round, of all of its samples in their order. They can be given to calls and tensor functions, and
    hold until the next batch begins.

    `columns.NAME` is one of them, and `columns["NAME"]` its values, or those of a column of the data's file.
    """

    def __init__(self, source: Source, view: View, origin: Origin):
        super().__init__(source, view, origin)
        self._source = source

    def __len__(self) -> int:
        return self._source.size()

    def __bool__(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        return LiveColumn(self, name) if isinstance(found, SymbolicColumn) else found

    def __getitem__(self, name: str) -> Any:
        """The values of a column. A column of the data's file comes as the file has it, one value a sample; a column of
        a call as `LiveColumn.numpy` gives it."""
        if name in self._data or not self._source.is_in_data(name):
            return getattr(self, name).numpy()
        return self._source.rows(name)

    def texts(self) -> list[str]:
        """The responses as texts, one a sample, without their end tokens; the prompts, or whole
        examples, where there are no responses."""
        return self._source.responses(self) if "seq" in self._data else self._source.prompts()


class LiveColumn(SymbolicColumn):
    """One column. It is fetched when its values are asked for, once."""

    def __init__(self, columns: LiveColumns, name: str):
        super().__init__(columns, name)
        self._live = columns
        self._values: Values | None = None

    def values(self) -> Values:
        """One array [length, ...] a sample."""
        if self._values is None:
            self._values = self._live._source.fetch(self._live, (self._name,))[self._name]
        return self._values

    def numpy(self) -> Any:
        """[samples, ...] of a column with one number a sample, else a list with one array a sample."""
        values = self.values()
        return np.concatenate(values) if all(len(value) == 1 for value in values) else values

    def _all(self) -> np.ndarray:
        return np.concatenate(self.values()).astype(np.float64)

    def mean(self) -> float:
        """The mean over all numbers of all samples, in float64; so count `std`, `sum`, `min` and `max`."""
        return float(self._all().mean())

    def std(self) -> float:
        return float(self._all().std())

    def sum(self) -> float:
        return float(self._all().sum())

    def min(self) -> float:
        return float(self._all().min())

    def max(self) -> float:
        return float(self._all().max())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.numpy(), dtype=dtype)

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.numpy())

    def __getitem__(self, place: Any) -> Any:
        return self.numpy()[place]

    def __bool__(self) -> NoReturn:
        raise script_error(f"the truth of {self!r} is not one value; compare a number, such as its mean()")

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{self!r} has no {name!r}; numpy() gives its values as an array")


class Report(Mapping[str, float]):
    """The statistics of a call, by their names as metrics.jsonl has them; they are waited for when one is read."""

    def __init__(self, ask: Any):
        self._ask = ask

    def __getitem__(self, name: str) -> float:
        found: float = self._ask()[name]
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._ask())

    def __len__(self) -> int:
        return len(self._ask())

    def __repr__(self) -> str:
        return f"Report({dict(self)})"
