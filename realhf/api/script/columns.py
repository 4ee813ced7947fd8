"""Columns: per-sample data by name, as a tensor function and the text of a script see it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any


class Columns:
    """Some samples of a step. On a worker `columns.NAME` is a list with one tensor [length, ...] a sample.

    `ids` are the places of the samples in the global batch. In the text of a script the same object stands for values
    that do not exist yet: it can be given to calls and tensor functions, and read in no other way.
    """

    def __init__(self, ids: Sequence[int], data: Mapping[str, Any]):
        self.ids = tuple(ids)
        self._data = dict(data)

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.ids)

    def __contains__(self, name: str) -> bool:
        return name in self._data

    def __getattr__(self, name: str) -> Any:
        """The column of that name. Raises AttributeError, with the names that there are."""
        if name.startswith("__") or name == "_data":
            raise AttributeError(name)
        if name not in self._data:
            raise AttributeError(f"no column {name!r}; the columns are {', '.join(self._data)}")
        return self._data[name]

    def get(self, name: str) -> Any:
        """The column of that name, or None."""
        return self._data.get(name)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns."""
        return tuple(self._data)


class Symbolic(ABC):
    """What stands in the text of an experiment for values of the step: columns, or one of them."""

    @abstractmethod
    def _apply(self, function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """The result of a tensor function (`realhf.api.script.functions.TensorFunction`), as a symbol again."""
