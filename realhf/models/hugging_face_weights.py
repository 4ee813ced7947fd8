"""Reads and writes the weights of Hugging Face checkpoints, box by box."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from realhf.architecture.families.family import Source
from realhf.architecture.hugging_face import family_of, write_config
from realhf.architecture.model import DecoderConfig, DType
from realhf.base.errors import UserError
from realhf.base.files import write_atomically
from realhf.geometry.boxes import Box
from realhf.geometry.parameters import decoder_parameters
from realhf.models.checkpoint import TORCH_DTYPE, ReadBox, fill
from realhf.models.checkpoint_index import staged
from realhf.models.hugging_face_files import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    WEIGHTS_INDEX_FILE,
    HuggingFaceDirectory,
    sources,
)


class HuggingFaceReader:
    """Reads any box of a model from a Hugging Face checkpoint; it reads only the parts that it needs.

    Args:
        new_head: allow a checkpoint with another head, whose tensors cannot be read.

    Raises:
        UserError: the checkpoint does not hold `model`.
    """

    def __init__(self, directory: Path | str, model: DecoderConfig, new_head: bool = False):
        self.directory = HuggingFaceDirectory(directory)
        self.directory.check(model, new_head)
        self._sources = self.directory.sources(model)
        self._open_files: dict[Path, Any] = {}

    def read(self, box: Box) -> Tensor:
        """The contents of `box`, in the dtype they were saved in, on the CPU."""
        _, entry = self.directory.tensors[self._sources[box.name].tensor]
        tensor = torch.empty(box.shape, dtype=TORCH_DTYPE[entry.dtype])
        self.read_into(tensor, box)
        return tensor

    def read_into(self, tensor: Tensor, box: Box) -> None:
        """Fills `tensor`, of the shape of `box`, converting to its dtype.

        Raises:
            UserError: a file cannot be read, or as `fill`.
        """
        if tuple(tensor.shape) != box.shape:
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} cannot take {box}")
        source = self._sources[box.name]
        path, _ = self.directory.tensors[source.tensor]
        try:
            if path not in self._open_files:
                self._open_files[path] = safe_open(path, framework="pt")
            found = self._open_files[path].get_slice(source.tensor)[_slices(source, box)]
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{path} cannot be read at {source.tensor} ({error}); restore it or use another checkpoint"
            ) from error
        if source.transposed:
            tensor = tensor.T
        fill(tensor, found, f"{path}: {source.tensor}", [place.start for place in _slices(source, box)])


def write_hugging_face(
    directory: Path | str,
    model: DecoderConfig,
    dtype: DType,
    read_into: ReadBox,
    *,
    like: Mapping[str, Any] | None = None,
    companions: Sequence[Path] = (),
    max_file_bytes: int = 5 * 10**9,
) -> list[Path]:
    """Writes a directory that transformers' `from_pretrained` reads; it holds at most one file in memory.

    Args:
        read_into: fills a tensor with a box of the model, as `CheckpointReader.read_into` does.
        like: see `realhf.architecture.hugging_face.write_config`.
        companions: files (the tokenizer's) to copy along.
        max_file_bytes: weights are divided into files of about this size.

    Returns:
        The files. The directory appears when all of them are written, and replaces an older one.

    Raises:
        UserError: no Hugging Face family can express the model.
    """
    directory = Path(directory)
    config = write_config(model, dtype, like)
    tensors: dict[str, list[tuple[str, Source]]] = {}  # with the parameters that each holds
    for name, source in sources(model, family_of(config)).items():
        tensors.setdefault(source.tensor, []).append((name, source))
    files = _files({name: parts[0][1].shape for name, parts in tensors.items()}, dtype, max_file_bytes)
    boxes = {spec.name: Box(spec.name, (0,) * len(spec.shape), spec.shape) for spec in decoder_parameters(model)}
    with staged(directory, companions) as staging:
        for file, names in files.items():
            content = {name: _assemble(tensors[name], boxes, dtype, read_into) for name in names}
            save_file(content, staging / file, metadata={"format": "pt"})
        if len(files) > 1:
            size = sum(path.stat().st_size for path in staging.iterdir())
            index = {
                "metadata": {"total_size": size},
                "weight_map": {name: file for file, names in files.items() for name in names},
            }
            write_atomically(staging / WEIGHTS_INDEX_FILE, msgspec.json.format(msgspec.json.encode(index)) + b"\n")
        write_atomically(staging / CONFIG_FILE, msgspec.json.format(msgspec.json.encode(config)) + b"\n")
    return sorted(directory.iterdir())


def _slices(source: Source, box: Box) -> tuple[slice, ...]:
    """Where `box` of a parameter lies in its tensor."""
    offset, shape = (x[::-1] if source.transposed else x for x in (box.offset, box.shape))
    starts = [a + b for a, b in zip(source.offset, offset, strict=True)]
    return tuple(slice(start, start + extent) for start, extent in zip(starts, shape, strict=True))


def _files(shapes: Mapping[str, tuple[int, ...]], dtype: DType, max_file_bytes: int) -> dict[str, list[str]]:
    """File -> its tensors, in order; one file if all tensors fit into it."""
    parts = list(in_parts(shapes, getattr(torch, dtype).itemsize, max_file_bytes))
    if len(parts) == 1:
        return {WEIGHTS_FILE: parts[0]}
    return {f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors": names for i, names in enumerate(parts)}


def in_parts(shapes: Mapping[str, tuple[int, ...]], item: int, max_bytes: int) -> Iterator[list[str]]:
    """The names in consecutive parts of at most `max_bytes`; a larger tensor is a part of its own."""
    part: list[str] = []
    size_bytes = 0
    for name, shape in shapes.items():
        extent = torch.Size(shape).numel() * item
        if part and size_bytes + extent > max_bytes:
            yield part
            part, size_bytes = [], 0
        part.append(name)
        size_bytes += extent
    yield part


def _assemble(parts: list[tuple[str, Source]], boxes: Mapping[str, Box], dtype: DType, read_into: ReadBox) -> Tensor:
    """One tensor of the checkpoint, from the parameters in it."""
    tensor = torch.empty(parts[0][1].shape, dtype=getattr(torch, dtype))
    for name, source in parts:
        where = tensor[_slices(source, boxes[name])]
        read_into(where.T if source.transposed else where, boxes[name])
    return tensor
