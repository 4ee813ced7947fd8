"""The rows of a data file: one at a time in any order, or all of them in order."""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

Record = dict[str, Any]

# Rows that are in memory at once when all are read.
BATCH_ROWS = 1024


class RowFile(ABC):
    """Rows of a file, which stay in the file until they are asked for. Rows count from 0, places in messages from 1."""

    paths: tuple[Path, ...]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """The names of the columns; for a file without a schema, the names in its first row.

        Raises:
            UserError: the first row is broken.
        """

    @abstractmethod
    def row(self, row: int) -> Record:
        """All columns of a row.

        Raises:
            UserError: it is broken; naming file, place and remedy.
        """

    @abstractmethod
    def place(self, row: int) -> str:
        """Where a row is, for messages: `FILE, line N`."""

    @abstractmethod
    def batches(self) -> Iterator[tuple[int, list[Record]]]:
        """All rows in order, in runs of at most BATCH_ROWS with the number of their first. Raises as `row` does."""


class Shards(RowFile):
    """Several files as one, in the order given; the columns are those of the first."""

    def __init__(self, files: Sequence[RowFile]):
        assert files, "no files"
        self._files = list(files)
        self._ends = list(accumulate(map(len, files)))
        self.paths = tuple(path for file in files for path in file.paths)

    def __len__(self) -> int:
        return self._ends[-1]

    def columns(self) -> tuple[str, ...]:
        return self._files[0].columns()

    def row(self, row: int) -> Record:
        file, inside = self._find(row)
        return file.row(inside)

    def place(self, row: int) -> str:
        file, inside = self._find(row)
        return file.place(inside)

    def batches(self) -> Iterator[tuple[int, list[Record]]]:
        for file, (start, _) in zip(self._files, pairwise([0, *self._ends]), strict=True):
            for first, records in file.batches():
                yield start + first, records

    def _find(self, row: int) -> tuple[RowFile, int]:
        index = bisect_right(self._ends, row)
        return self._files[index], row - (self._ends[index - 1] if index else 0)
