"""Tensors that are views of one vector."""

from collections.abc import Sequence

from torch import Tensor


def storage_id(tensor: Tensor) -> int:
    """The same number for all views of one vector, and no other vector's while it lives, with memory or without."""
    return tensor.untyped_storage()._cdata


def side_by_side(parts: Sequence[Tensor], dim: int) -> Tensor | None:
    """All parts along `dim` as one view of the storage that they share; None where they do not lie so in one.

    parts: of one shape except for `dim`.
    """
    first, stride, size = parts[0], parts[0].stride(), 0
    vector = storage_id(first)
    for part in parts:
        place = first.storage_offset() + size * stride[dim]
        if part.stride() != stride or part.storage_offset() != place or storage_id(part) != vector:
            return None
        size += part.shape[dim]
    shape = list(first.shape)
    shape[dim] = size
    return first.as_strided(shape, stride)
