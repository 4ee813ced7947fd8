"""A device's parameters as one flat vector, and its division over data parallelism: which boxes a rank updates.

No torch here: the master tells from it who writes what of a checkpoint with optimizer states.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from realhf.api.layout import Layout
from realhf.api.model import DecoderConfig
from realhf.models.parameters import ParameterSpec, decoder_parameters
from realhf.realloc.layout import Box, device_boxes

# Parameters and shards start at multiples of this, so that all are aligned for vector loads (256 bytes in float32).
ALIGNMENT = 64


@dataclass(frozen=True, eq=False)
class FlatLayout:
    """Tensors of the given shapes, one behind the other, padded to `shards` equal parts."""

    shapes: Mapping[str, tuple[int, ...]]
    shards: int = 1

    @cached_property
    def starts(self) -> dict[str, int]:
        """Where each begins."""
        starts, size = {}, 0
        for name, shape in self.shapes.items():
            starts[name] = size
            size += _aligned(prod(shape), ALIGNMENT)
        return starts

    def end(self, name: str) -> int:
        """Where the part of `name` ends, padding included."""
        return self.starts[name] + _aligned(prod(self.shapes[name]), ALIGNMENT)

    @cached_property
    def size(self) -> int:
        """Elements of the whole vector, the padding behind each tensor and of the last shard included."""
        return _aligned(max(map(self.end, self.shapes), default=0), ALIGNMENT * self.shards)

    def shard(self, index: int) -> range:
        """The elements of shard `index` (ZeRO, Rajbhandari et al., 2020, section 5.1)."""
        size = self.size // self.shards
        return range(index * size, (index + 1) * size)


def flat_layout(model: DecoderConfig, layout: Layout, device: int) -> FlatLayout:
    """How the parameters of `device` lie one behind the other: those that it alone holds of its data-parallel
    replica, those replicated over tp, the second copy of a tied embedding."""
    shapes = {box.name: box.shape for box in device_boxes(model, layout, device)}
    order = _counting_order(model, layout, device)
    return FlatLayout({name: shapes[name] for name in sorted(shapes, key=order.__getitem__)}, layout.strategy.dp)


def counted_range(model: DecoderConfig, layout: Layout, device: int) -> range:
    """The part of its shard that `device` adds to a sum over the whole model, and writes into a checkpoint.

    Over all devices of the layout, every element of every global parameter is in it once.
    """
    dp, tp, _ = layout.coordinates(device)
    flat, order = flat_layout(model, layout, device), _counting_order(model, layout, device)
    highest = 1 if tp == 0 else 0
    counted = max((flat.end(name) for name in flat.shapes if order[name] <= highest), default=0)
    shard = flat.shard(dp)
    return range(shard.start, max(shard.start, min(shard.stop, counted)))


def boxes_in(model: DecoderConfig, layout: Layout, device: int, elements: range) -> list[tuple[Box, int]]:
    """The boxes that `elements` of the flat vector of `device` consist of, each with the place where it begins.

    The elements of a box lie one behind the other. A parameter that is cut within a row gives several boxes.
    """
    flat, found = flat_layout(model, layout, device), []
    whole = {box.name: box for box in device_boxes(model, layout, device)}
    for name, start in flat.starts.items():
        holder = whole[name]
        first, last = (min(max(place - start, 0), holder.size) for place in (elements.start, elements.stop))
        for offset, shape in _cut(holder.shape, first, last):
            moved = tuple(a + b for a, b in zip(holder.offset, offset, strict=True))
            found.append((Box(name, moved, shape), start + first))
            first += prod(shape)
    return found


def _cut(shape: tuple[int, ...], first: int, last: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offset, shape) of the blocks that the elements [first, last) of an array consist of, counted along its rows:
    the end of a row, whole rows, the beginning of a row; each again like this in more than two dimensions."""
    if first >= last:
        return []
    if len(shape) == 1:
        return [((first,), (last - first,))]
    row = prod(shape[1:])
    head_end = min(_aligned(first, row), last)
    tail_start = max(last // row * row, head_end)

    def within_row(begin: int, end: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        index = begin // row
        return [
            ((index, *offset), (1, *extents))
            for offset, extents in _cut(shape[1:], begin - index * row, end - index * row)
        ]

    blocks = within_row(first, head_end)
    if head_end < tail_start:
        blocks.append(((head_end // row, *(0 for _ in shape[1:])), ((tail_start - head_end) // row, *shape[1:])))
    return blocks + within_row(tail_start, last)


def _aligned(elements: int, alignment: int) -> int:
    return -(-elements // alignment) * alignment


def _counting_order(model: DecoderConfig, layout: Layout, device: int) -> dict[str, int]:
    """0: held by this tensor-parallel rank alone; 1: replicated over them; 2: second copy of a tied embedding."""
    stage = layout.coordinates(device)[2]

    def rank(spec: ParameterSpec) -> int:
        return 2 if spec.tied and stage > 0 else int(spec.shard_dim is None)

    return {spec.name: rank(spec) for spec in decoder_parameters(model)}
