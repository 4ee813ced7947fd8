"""Checkpoints that a test writes by itself: of a whole model, or of the boxes of a layout."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from realhf.architecture.model import DecoderConfig
from realhf.geometry.boxes import Box, device_boxes
from realhf.geometry.layout import Layout
from realhf.models.checkpoint import snapshot, write_snapshot
from realhf.models.checkpoint_index import finish, of_kind
from realhf.realloc.execute.held import by_name, part


def name_of(dtype: torch.dtype) -> Any:
    """Of a checkpoint's dtype its name: "float32"."""
    return str(dtype).removeprefix("torch.")


def write_pieces(directory: Path, rank: int, pieces: Sequence[tuple[Box, Tensor]]) -> None:
    """The file of a rank with its digest, as a worker writes it."""
    write_snapshot(directory, rank, snapshot(pieces, copied=False), hashed=True)


def write_boxes(directory: Path | str, rank: int, owned: Sequence[Box], held: Iterable[tuple[Box, Tensor]]) -> None:
    """Writes the boxes that `rank` owns, each of which lies in one of those that it has."""
    tensors = by_name(held)
    write_snapshot(directory, rank, snapshot([(box, part(tensors, box)) for box in owned], copied=False))


def save_model(
    directory: Path, model: DecoderConfig, state: Mapping[str, Tensor], metadata: Mapping[str, Any] | None = None
) -> None:
    """Saves a model that one process holds: its parameters by name, and states of them as `<name>@<kind>`."""
    whole = [(Box(name, (0,) * tensor.dim(), tuple(tensor.shape)), tensor) for name, tensor in state.items()]
    owned = [box for box, _ in whole]
    write_boxes(directory, 0, owned, whole)
    dtype = next(tensor.dtype for name, tensor in state.items() if "@" not in name)
    finish(directory, model, name_of(dtype), {0: owned}, metadata)


def checkpoint_owners(model: DecoderConfig, layout: Layout, kinds: Sequence[str] = ("",)) -> dict[int, list[Box]]:
    """By device, the boxes that it writes: whole boxes of the layout, each from the first device that holds it."""
    seen: set[Box] = set()
    owned: dict[int, list[Box]] = {}
    for device in layout.mesh.devices:
        boxes = [box for box in device_boxes(model, layout, device) if box not in seen]
        seen.update(boxes)
        owned[device] = [of_kind(box, kind) for box in boxes for kind in kinds]
    return owned
