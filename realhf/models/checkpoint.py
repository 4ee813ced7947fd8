"""Checkpoints as boxes: each rank writes the boxes that it owns, and any layout reads the boxes that it needs."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from realhf.architecture.model import DecoderConfig
from realhf.base.errors import UserError
from realhf.base.files import write_atomically
from realhf.geometry.boxes import Box
from realhf.models.checkpoint_index import (
    SavedBox,
    box_file,
    check_architecture,
    check_content,
    digest_file,
    file_keys,
    present,
    read_index,
    staging_directory,
)
from realhf.models.host_copies import copies_on_host
from realhf.models.safetensors_file import write_safetensors

TORCH_DTYPE = {"F32": torch.float32, "F64": torch.float64, "BF16": torch.bfloat16, "F16": torch.float16}

ReadBox = Callable[[Tensor, Box], None]  # as `CheckpointReader.read_into`


def snapshot(pieces: Sequence[tuple[Box, Tensor]], *, copied: bool = True) -> dict[str, Tensor]:
    """`pieces` in host memory by their keys in a file. Tensors in host memory that will not change need not be
    `copied`."""
    keys = file_keys([box for box, _ in pieces])
    assert len(set(keys)) == len(keys), "a box twice in the file of a rank"
    tensors = [tensor.detach() for _, tensor in pieces]
    copies = iter(copies_on_host([tensor for tensor in tensors if tensor.is_cuda]))
    return {
        key: next(copies) if tensor.is_cuda else tensor.to("cpu", copy=copied).contiguous()
        for key, tensor in zip(keys, tensors, strict=True)
    }


def write_snapshot(directory: Path | str, rank: int, content: Mapping[str, Tensor], *, hashed: bool = False) -> None:
    """Writes a `snapshot` as the file of `rank`, on the disk when it returns; the checkpoint `directory` appears when
    `finish` is called. An empty snapshot makes no file.

    `hashed` makes a digest of the file for `CheckpointReader.check_content`.
    """
    if not content:
        return
    staging = staging_directory(Path(directory))
    staging.mkdir(parents=True, exist_ok=True)
    path = staging / box_file(rank)
    (staging / digest_file(rank)).unlink(missing_ok=True)  # left by an interrupted attempt
    partial = path.with_name(path.name + ".tmp")
    digest = write_safetensors(partial, content)
    if hashed:
        write_atomically(staging / digest_file(rank), digest.encode())
    partial.replace(path)


def fill(target: Tensor, found: Tensor, name: str, offset: Sequence[int]) -> None:
    """Copies `found`, a part of a saved tensor, to `target` of the same shape, in the dtype of `target`.

    `name` has the file and the tensor; `offset` is where `found` begins in the tensor.

    Raises:
        UserError: a value is not finite, does not fit into the dtype, or is a negative second moment.
    """
    with torch.no_grad():
        target.copy_(found)
    if not target.numel():
        return
    least = 0.0 if name.endswith("@exp_avg_sq") else -math.inf  # a mean of squares
    lowest, highest = (float(x) for x in target.aminmax())  # both are NaN if one value is
    if math.isfinite(lowest) and math.isfinite(highest) and lowest >= least:
        return
    place = tuple((~target.isfinite() | (target < least)).nonzero()[0].tolist())
    value = found[place].item()
    if not math.isfinite(value):
        rule = "which no model can compute with"
    elif value < least:
        rule = "but a mean of squares is not below 0"
    else:
        rule = f"which is beyond {str(target.dtype).removeprefix('torch.')}"
    at = [start + i for start, i in zip(offset, place, strict=True)]
    raise UserError(f"{name} holds {value} at {at}, {rule}; use another checkpoint")


class CheckpointReader:
    """Reads any box of a checkpoint, saved under any layout; it reads only the parts that it needs.

    Raises:
        UserError: `directory` holds no complete, undamaged checkpoint.
    """

    def __init__(self, directory: Path | str) -> None:
        self.directory = present(Path(directory))
        self.index = read_index(self.directory)
        self._saved: dict[str, list[tuple[str, SavedBox]]] = {}
        for saved_file in self.index.files:
            for saved in saved_file.boxes:
                self._saved.setdefault(saved.name, []).append((saved_file.file, saved))
        self._open_files: dict[str, Any] = {}

    def names(self) -> list[str]:
        """The names of all parameters, and of their states as `<parameter>@<kind>`."""
        return list(self._saved)

    def check_content(self) -> None:
        """Reads all files whose digest is in the index. Raises UserError naming a file with other content."""
        check_content(self.directory, self.index)

    def check_architecture(self, model: DecoderConfig, ignore_head: bool = False) -> None:
        """See `realhf.models.checkpoint_index.check_architecture`."""
        check_architecture(self.index, self.directory, model, ignore_head)

    def read(self, box: Box) -> Tensor:
        """The contents of `box`, in the dtype they were saved in, on the CPU.

        Raises:
            UserError: the checkpoint has no such parameter, or a file is damaged.
        """
        file, saved = self._parts(box)[0]
        tensor = torch.empty(box.shape, dtype=TORCH_DTYPE[self._slice(file, saved).get_dtype()])
        self.read_into(tensor, box)
        return tensor

    def read_into(self, tensor: Tensor, box: Box) -> None:
        """Fills `tensor`, of the shape of `box`, converting to its dtype. Raises as `read` and `fill` do."""
        if tuple(tensor.shape) != box.shape:
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} cannot take {box}")
        for file, saved in self._parts(box):
            common = box.intersect(saved.box)
            assert common is not None
            found = self._slice(file, saved)[common.slices_in(saved.box)]
            fill(tensor[common.slices_in(box)], found, f"{self.directory / file}: {box.name}", common.offset)

    def _parts(self, box: Box) -> list[tuple[str, SavedBox]]:
        """The saved boxes that together make up `box`, with their files."""
        if box.name not in self._saved:
            raise UserError(
                f"checkpoint {self.directory} has no parameter {box.name}, only {len(self._saved)} others such as "
                f"{next(iter(self._saved), 'none')}; choose a checkpoint of this architecture"
            )
        parts = [(file, saved) for file, saved in self._saved[box.name] if box.intersect(saved.box)]
        if sum(common.size for _, saved in parts if (common := box.intersect(saved.box))) != box.size:
            raise UserError(
                f"checkpoint {self.directory} does not hold all of {box.name} at offset {box.offset}, shape "
                f"{box.shape}; choose a checkpoint of this architecture"
            )
        return parts

    def _slice(self, file: str, saved: SavedBox) -> Any:
        try:
            if file not in self._open_files:
                self._open_files[file] = safe_open(self.directory / file, framework="pt")
            found = self._open_files[file].get_slice(saved.key or saved.name)
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"checkpoint file {self.directory / file} cannot be read at {saved.name} ({error}); "
                f"restore it or use another checkpoint"
            ) from error
        if tuple(found.get_shape()) != saved.shape:
            raise UserError(
                f"checkpoint file {self.directory / file} has {saved.name} in shape {found.get_shape()}, not "
                f"{list(saved.shape)} as its index says; restore it or use another checkpoint"
            )
        return found
