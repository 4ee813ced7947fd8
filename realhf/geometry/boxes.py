"""Boxes: the part of a global parameter that lies on a device. The planner counts bytes with them, and workers move
parameters by them. No torch here."""

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from realhf.architecture.model import DecoderConfig
from realhf.geometry.layout import Layout, ParallelStrategy, held_layers
from realhf.geometry.parameters import ParameterSpec, decoder_parameters


@dataclass(frozen=True)
class Box:
    """A rectangular part of the global parameter `name`: it starts at `offset` and has `shape`."""

    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(self.shape)

    def intersect(self, other: "Box") -> "Box | None":
        """The common part of two boxes of one parameter, None if there is none."""
        if self.name != other.name:
            return None
        offset, shape = [], []
        for a, m, b, n in zip(self.offset, self.shape, other.offset, other.shape, strict=True):
            start, end = a if a > b else b, a + m if a + m < b + n else b + n
            if start >= end:
                return None
            offset.append(start)
            shape.append(end - start)
        return Box(self.name, tuple(offset), tuple(shape))

    def contains(self, other: "Box") -> bool:
        """Whether all of `other` is in this box."""
        if self.name != other.name:
            return False
        for a, m, b, n in zip(self.offset, self.shape, other.offset, other.shape, strict=True):
            if b < a or b + n > a + m:
                return False
        return True

    def between(self, start: int, end: int, dim: int) -> "Box":
        """The part of this box from `start` to `end` along dimension `dim`, in coordinates of the global parameter."""
        return Box(
            self.name,
            (*self.offset[:dim], start, *self.offset[dim + 1 :]),
            (*self.shape[:dim], end - start, *self.shape[dim + 1 :]),
        )

    def slices_in(self, holder: "Box") -> tuple[slice, ...]:
        """Where this box lies in an array that holds exactly `holder`, which contains it."""
        return tuple(
            slice(a - b, a - b + extent) for a, b, extent in zip(self.offset, holder.offset, self.shape, strict=True)
        )


def box_of(spec: ParameterSpec, tp: int, tp_index: int) -> Box:
    """The part of a parameter that tensor-parallel rank `tp_index` of `tp` holds.

    Raises ValueError if `tp` does not divide it; `check_strategy` refuses that for whole models.
    """
    offset, shape = [0] * len(spec.shape), list(spec.shape)
    if spec.shard_dim is not None:
        if shape[spec.shard_dim] % tp:
            raise ValueError(
                f"tp={tp} does not divide dimension {spec.shard_dim} of {spec.name}, whose extent is "
                f"{shape[spec.shard_dim]}; choose a divisor"
            )
        shape[spec.shard_dim] //= tp
        offset[spec.shard_dim] = tp_index * shape[spec.shard_dim]
    return Box(spec.name, tuple(offset), tuple(shape))


def device_boxes(model: DecoderConfig, layout: Layout, device: int) -> list[Box]:
    """The boxes that `device` holds under `layout`, in the order of the model's parameters; [] outside the mesh."""
    if device not in layout.mesh.devices:
        return []
    _, tp_index, stage = layout.coordinates(device)
    return list(_boxes_at(model, layout.strategy, tp_index, stage))


@lru_cache(maxsize=1024)
def _boxes_at(model: DecoderConfig, strategy: ParallelStrategy, tp_index: int, stage: int) -> tuple[Box, ...]:
    """The boxes of one tensor-parallel index and stage; they are the same for every data-parallel index."""
    layers = held_layers(model.num_layers, strategy, stage)
    return tuple(
        box_of(spec, strategy.tp, tp_index)
        for spec in decoder_parameters(model)
        if spec.is_on_stage(layers, stage, strategy.pp)
    )
