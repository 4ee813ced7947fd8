"""A GGUF file: its fields, and where its tensors lie. Every length in it is checked before it is used.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The reader of the `gguf` package trusts the
lengths that a file states and makes several arrays of every token; the kinds of tensors, and how their blocks become
numbers, are taken from the package.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import numpy as np

from realhf.architecture.families.fields import shown
from realhf.base.errors import UserError
from realhf.base.files import open_regular

MAGIC = b"GGUF"
TENSOR_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")

_VERSIONS = (2, 3)
# The kinds of values by their numbers; for the fixed-size ones as `struct` names them.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# More than any vocabulary has tokens, and any template bytes.
_MOST_VALUES = 2**24
_MOST_DIMENSIONS = 4
_PART_BYTES = 2**18
_AGAIN = "copy or download it again"


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor of the file. `shape` has the outermost dimension first, as torch has it; `start` counts from the
    beginning of the file, in bytes."""

    name: str
    type: str
    shape: tuple[int, ...]
    start: int
    size_bytes: int


class GGUFFile:
    """The fields and the tensors of a GGUF file. Only the fields are in memory.

    Raises:
        UserError: the file cannot be read, is none, is truncated or damaged, or has tensors of another type than
            `TENSOR_TYPES`; or the `gguf` package is not installed.
    """

    def __init__(self, path: Path):
        self.path = path
        self._package = gguf_package(path)
        try:
            with open_regular(path) as file:
                header = _Header(file, path)
                self.fields: Mapping[str, Any] = header.fields()
                self.tensors: Mapping[str, StoredTensor] = self._tensors(header)
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}); give a GGUF file") from None

    def read(self, tensor: StoredTensor) -> np.ndarray:
        """The numbers of a tensor, in its shape: float32 of blocks, F16 as float16, and BF16 as its bits in uint16.

        Raises UserError where the file has changed, OSError where it cannot be read.
        """
        plain = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}.get(tensor.type)
        rows, found = math.prod(tensor.shape[:-1]), np.empty(tensor.shape, plain or np.float32)
        # In parts: the package would hold all numbers twice.
        step = rows if plain else max(1, _PART_BYTES * rows // tensor.size_bytes)
        with open_regular(self.path) as file:
            file.seek(tensor.start)
            for start in range(0, rows, step):
                part = found.reshape(rows, -1)[start : start + step]
                raw = part.view(np.uint8) if plain else np.empty((len(part), tensor.size_bytes // rows), np.uint8)
                if file.readinto(raw.data) != raw.nbytes:
                    raise UserError(f"{self.path}: it has become shorter; leave it as it is while it is read")
                if not plain:
                    part[:] = self._package.dequantize(raw, self._package.GGMLQuantizationType[tensor.type])
        return found

    def _tensors(self, header: "_Header") -> dict[str, StoredTensor]:
        entries = header.tensor_entries()
        alignment = self.fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise UserError(f"{self.path}: general.alignment={shown(alignment)} is no power of two; {_AGAIN}")
        data = math.ceil(header.at / alignment) * alignment
        found: dict[str, StoredTensor] = {}
        for name, shape, number, offset in entries:
            kind, size_bytes = self._size(name, shape, number)
            if data + offset + size_bytes > header.size_bytes:
                raise UserError(
                    f"{self.path}: it has {header.size_bytes:,} bytes, and its tensor {name} ends at "
                    f"{data + offset + size_bytes:,}: it is truncated; {_AGAIN}"
                )
            if name in found:
                raise UserError(f"{self.path}: it has the tensor {name} twice; {_AGAIN}")
            found[name] = StoredTensor(name=name, type=kind, shape=shape, start=data + offset, size_bytes=size_bytes)
        return found

    def _size(self, name: str, shape: tuple[int, ...], number: int) -> tuple[str, int]:
        """The name of a tensor's type, and its size in bytes."""
        types = {member.value: member for member in self._package.GGMLQuantizationType}
        kind = types[number].name if number in types else str(number)
        if kind not in TENSOR_TYPES:
            raise UserError(
                f"{self.path}: the tensor {name} is of type {kind}, which is not read; choose a file with tensors of "
                f"{', '.join(TENSOR_TYPES)}"
            )
        block, block_bytes = self._package.GGML_QUANT_SIZES[types[number]]
        if not shape or min(shape) < 1 or shape[-1] % block:
            raise UserError(
                f"{self.path}: the tensor {name} has shape {list(shape)}, which {kind} has no blocks for; {_AGAIN}"
            )
        return kind, math.prod(shape) // block * block_bytes


class _Header:
    """The part of a GGUF file before its tensors' numbers, read in order."""

    def __init__(self, file: BinaryIO, path: Path):
        self._file, self._path = file, path
        self.size_bytes = file.seek(0, 2)
        self.at = file.seek(0)
        magic = self._bytes(min(4, self.size_bytes))
        if magic != MAGIC:
            raise UserError(
                f"{path}: not a GGUF file: it begins with {magic!r} instead of {MAGIC!r}; give a GGUF file, or a "
                "Hugging Face directory"
            )
        version = self._value(4)
        if version not in _VERSIONS:
            order = " or of the other byte order" if version % 2**16 == 0 else ""
            raise UserError(
                f"{path}: GGUF version {version}{order} is not read, only {' and '.join(map(str, _VERSIONS))}; choose "
                "a newer file"
            )
        self._num_tensors, self._num_fields = self._value(10), self._value(10)

    def fields(self) -> dict[str, Any]:
        """By key: a number, a text, a flag, or a list of these."""
        self._check_room(self._num_fields, 13, "fields")
        found: dict[str, Any] = {}
        for _ in range(self._num_fields):
            key = self._value(_STRING)
            if key in found:
                raise UserError(f"{self._path}: it has the field {shown(key)} twice; {_AGAIN}")
            found[key] = self._value(self._value(4))
        return found

    def tensor_entries(self) -> list[tuple[str, tuple[int, ...], int, int]]:
        """Of each tensor: name, shape, number of its type, offset in the part of the numbers."""
        self._check_room(self._num_tensors, 24, "tensors")
        found = []
        for _ in range(self._num_tensors):
            name, dimensions = self._value(_STRING), self._value(4)
            if dimensions > _MOST_DIMENSIONS:
                raise UserError(f"{self._path}: the tensor {shown(name)} has {dimensions} dimensions; {_AGAIN}")
            shape = tuple(self._value(10) for _ in range(dimensions))[::-1]
            found.append((name, shape, self._value(4), self._value(10)))
        return found

    def _value(self, kind: int) -> Any:
        if form := _SCALARS.get(kind):
            return struct.unpack(f"<{form}", self._bytes(struct.calcsize(f"<{form}")))[0]
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            return self._array(self._value(4), self._value(10))
        raise UserError(f"{self._path}: damaged (a value of kind {kind} before byte {self.at}); {_AGAIN}")

    def _array(self, kind: int, count: int) -> list[Any]:
        if form := _SCALARS.get(kind):
            size_bytes = struct.calcsize(f"<{form}")
            self._check_room(count, size_bytes, "values")
            return list(struct.unpack(f"<{count}{form}", self._bytes(count * size_bytes)))
        if kind != _STRING:  # arrays of arrays are in no file of a language model
            raise UserError(f"{self._path}: damaged (an array of kind {kind} before byte {self.at}); {_AGAIN}")
        self._check_room(count, 8, "texts")
        return [self._text() for _ in range(count)]

    def _text(self) -> str:
        length = self._value(10)
        self._check_room(length, 1, "bytes of a text")
        content = self._bytes(length)
        try:
            return content.decode()
        except UnicodeDecodeError:
            raise UserError(f"{self._path}: damaged (the text {shown(content)} is not UTF-8); {_AGAIN}") from None

    def _check_room(self, count: int, least_bytes: int, what: str) -> None:
        """Raises UserError where the rest of the file has no room for so many values, or none is that long."""
        if count > _MOST_VALUES or count * least_bytes > self.size_bytes - self.at:
            raise UserError(
                f"{self._path}: truncated or damaged (at byte {self.at} it states {count:,} {what}, and has "
                f"{self.size_bytes - self.at:,} bytes left); {_AGAIN}"
            )

    def _bytes(self, count: int) -> bytes:
        content = self._file.read(count)
        if len(content) < count:
            raise UserError(f"{self._path}: truncated: it ends at byte {self.size_bytes:,}; {_AGAIN}")
        self.at += count
        return content


def gguf_package(path: Path) -> ModuleType:
    """The `gguf` package. Raises UserError where it is not installed."""
    try:
        import gguf
    except ImportError:
        raise UserError(
            f"{path}: GGUF files need the package gguf, which is not installed; `python -m pip install "
            "'realhf[gguf]'` installs it"
        ) from None
    module: ModuleType = gguf
    return module
