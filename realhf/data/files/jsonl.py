"""JSONL files: one object a line. The index of the lines is in memory, the lines are not."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from realhf.base.errors import UserError
from realhf.base.files import is_too_deep, open_regular
from realhf.data.files.rows import BATCH_ROWS, Record, RowFile

_CHUNK_BYTES = 2**24
# A row is held as a whole, several times over; this is more than a sequence of any model's length.
_MAX_ROW_BYTES = 2**26
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class JSONLFile(RowFile):
    """A file of lines. Only the offsets of lines are in memory: 8 bytes a line.

    Raises:
        OSError: the file cannot be read.
        UserError: a line is longer than any row.
    """

    def __init__(self, path: Path):
        self.paths = (path,)
        self._file = open_regular(path)
        self._borders = line_borders(self._file.fileno())  # [lines + 1]
        if len(self):
            sizes = np.diff(self._borders)
            longest, size_bytes = int(sizes.argmax()), int(sizes.max())
            if size_bytes > _MAX_ROW_BYTES:
                raise UserError(
                    f"{self.place(longest)}: it has {size_bytes:,} bytes, and a row at most {_MAX_ROW_BYTES:,}; put "
                    "each row on a line of its own"
                )

    def __len__(self) -> int:
        return len(self._borders) - 1

    def columns(self) -> tuple[str, ...]:
        return tuple(self.row(0))

    def place(self, row: int) -> str:
        return f"{self.paths[0]}, line {row + 1}"

    def row(self, row: int) -> Record:
        return self._parsed(row, self._read(row, row + 1))

    def batches(self) -> Iterator[tuple[int, list[Record]]]:
        first = 0
        while first < len(self):
            # As many lines as fit a chunk, and one of any length.
            fitting = int(np.searchsorted(self._borders, self._borders[first] + _CHUNK_BYTES, "right")) - 1
            end = max(first + 1, min(fitting, first + BATCH_ROWS, len(self)))
            content, start = self._read(first, end), self._borders[first]
            cuts = (self._borders[first : end + 1] - start).tolist()
            yield first, [self._parsed(first + i, content[cuts[i] : cuts[i + 1]]) for i in range(end - first)]
            first = end

    def _read(self, first: int, end: int) -> bytes:
        """The bytes of some lines."""
        place, left = int(self._borders[first]), int(self._borders[end] - self._borders[first])
        pieces = []
        while left:
            piece = os.pread(self._file.fileno(), left, place)
            if not piece:
                raise UserError(f"{self.place(first)}: the file has become shorter; leave it as it is during a run")
            pieces.append(piece)
            place, left = place + len(piece), left - len(piece)
        return b"".join(pieces)

    def _parsed(self, row: int, line: bytes) -> Record:
        form = "every line is a JSON object with the row's columns"
        if is_too_deep(line):
            raise UserError(f"{self.place(row)}: it is nested too deeply; {form}; correct the line or delete it")
        try:
            record: Any = json.loads(line.removeprefix(_BYTE_ORDER_MARK if row == 0 else b"").decode())
        except UnicodeDecodeError:
            raise UserError(f"{self.place(row)}: it is not UTF-8; save the file as UTF-8") from None
        except json.JSONDecodeError as error:
            what = f"broken JSON ({error.msg} at column {error.colno})" if line.strip() else "the line is empty"
            if row == 0 and line.lstrip()[:1] == b"[":
                what = "the file is one JSON list"
            raise UserError(f"{self.place(row)}: {what}; {form}; correct the line or delete it") from None
        except (RecursionError, ValueError) as error:  # nested too deeply; a number of more than 4300 digits
            raise UserError(f"{self.place(row)}: {error}; {form}; correct the line or delete it") from None
        if not isinstance(record, dict):
            what = f"a {type(record).__name__} instead of an object"
            raise UserError(f"{self.place(row)}: {what}; {form}; correct the line")
        return record


def line_borders(descriptor: int) -> np.ndarray:
    """Where the lines of a file begin, and the end of the file: [lines + 1] int64.

    A last line may lack its line break.
    """
    breaks, size = [], 0
    while chunk := os.pread(descriptor, _CHUNK_BYTES, size):
        breaks.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + (size + 1))
        size += len(chunk)
    borders = np.concatenate([np.zeros(1, np.int64), *breaks])
    return borders if borders[-1] == size else np.append(borders, size)
