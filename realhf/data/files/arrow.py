"""Parquet and Arrow files, through pyarrow, which is optional.

Rows of Arrow files are read where they lie, in the mapped file. Parquet is compressed, and has no way to one row: a
small file is held in memory; a large one is written once as an Arrow file, under the digest of its content.
"""

import os
import tempfile
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from platformdirs import user_cache_path

from realhf.base.digest import content_digest
from realhf.base.errors import UserError
from realhf.data.files.rows import BATCH_ROWS, Record, RowFile

# Parquet files whose columns take less than this are held in memory.
_IN_MEMORY_BYTES = 2**28


class ArrowFile(RowFile):
    """The rows of record batches, in memory or in a mapped file."""

    def __init__(self, path: Path, batches: list[Any], columns: list[str]):
        self.paths = (path,)
        self._batches = batches
        self._ends = np.array([0, *accumulate(batch.num_rows for batch in batches)])
        self._columns = tuple(columns)
        self._checked: set[int] = set()  # batches; to read one whose offsets point elsewhere ends the process

    def __len__(self) -> int:
        return int(self._ends[-1])

    def columns(self) -> tuple[str, ...]:
        return self._columns

    def place(self, row: int) -> str:
        return f"{self.paths[0]}, row {row + 1}"

    def row(self, row: int) -> Record:
        index = int(np.searchsorted(self._ends, row, "right")) - 1
        return self._records(index, row - int(self._ends[index]), 1)[0]

    def batches(self) -> Iterator[tuple[int, list[Record]]]:
        for index, batch in enumerate(self._batches):
            for first in range(0, batch.num_rows, BATCH_ROWS):
                yield int(self._ends[index]) + first, self._records(index, first, BATCH_ROWS)

    def _records(self, index: int, first: int, count: int) -> list[Record]:
        try:
            if index not in self._checked:
                self._batches[index].validate(full=True)
                self._checked.add(index)
            records: list[Record] = self._batches[index].slice(first, count).to_pylist()
        except Exception as error:  # ArrowException, ValueError, IndexError, SystemError if it is damaged
            raise UserError(
                f"{self.place(int(self._ends[index]) + first)}: {error}; write the file again, texts as UTF-8"
            ) from None
        return records


def open_arrow(path: Path) -> ArrowFile:
    """A file of Arrow's, as `datasets` saves them (a stream) or as pyarrow writes them (a file).

    Raises:
        UserError: pyarrow is not installed, or the file is broken.
    """
    pyarrow = _pyarrow(path)
    try:
        try:
            file = pyarrow.ipc.open_file(pyarrow.memory_map(str(path)))
            batches = [file.get_batch(i) for i in range(file.num_record_batches)]
        except pyarrow.ArrowInvalid:
            file = pyarrow.ipc.open_stream(pyarrow.memory_map(str(path)))
            batches = list(file)
        return ArrowFile(path, batches, file.schema.names)
    except Exception as error:  # as in `_records`
        raise UserError(f"data set {path}: not an Arrow file ({error}); write it again") from None


def open_parquet(path: Path) -> ArrowFile:
    """A parquet file.

    Raises:
        UserError: pyarrow is not installed, the file is broken, or there is no room for a large one's Arrow form.
    """
    pyarrow = _pyarrow(path)
    from pyarrow import parquet  # optional

    try:
        file = parquet.ParquetFile(path)
        groups = (file.metadata.row_group(i) for i in range(file.num_row_groups))
        if sum(group.total_byte_size for group in groups) < _IN_MEMORY_BYTES:
            return ArrowFile(path, list(file.iter_batches(BATCH_ROWS)), file.schema_arrow.names)
        cached = user_cache_path("realhf") / "data" / f"{content_digest([path])}.arrow"
        if not cached.is_file():
            _write_arrow(pyarrow, file, cached)
        opened = open_arrow(cached)
    except Exception as error:  # as in `ArrowFile._records`
        raise UserError(f"data set {path}: cannot be read as parquet ({error}); write it again, or as JSONL") from None
    opened.paths = (path,)
    return opened


def _write_arrow(pyarrow: ModuleType, file: Any, target: Path) -> None:
    """Appears complete or not at all, also where processes of several hosts write it at once. Only this user may read
    it: the data may be private."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(prefix=f".{target.name}-", dir=target.parent)
    os.close(handle)
    try:
        with pyarrow.OSFile(part, "wb") as sink, pyarrow.ipc.new_file(sink, file.schema_arrow) as writer:
            for batch in file.iter_batches(BATCH_ROWS):
                writer.write_batch(batch)
        os.replace(part, target)
    finally:
        Path(part).unlink(missing_ok=True)


def _pyarrow(path: Path) -> ModuleType:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError:
        raise UserError(
            f"data set {path}: parquet and Arrow files need pyarrow, which is not installed; "
            "`python -m pip install 'realhf[data]'` installs it, or give the rows as JSONL"
        ) from None
    module: ModuleType = pyarrow
    return module
