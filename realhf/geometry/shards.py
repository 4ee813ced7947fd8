"""A device's parameters as one flat vector, divided over data parallelism: the boxes that a rank updates, and with
fully sharded data parallelism keeps.

The master uses it to divide the writing of a checkpoint with optimizer states. No torch here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

from realhf.architecture.compute import DataParallel
from realhf.architecture.model import DecoderConfig
from realhf.architecture.transformers_config import TransformersConfig
from realhf.base.errors import UserError
from realhf.geometry.boxes import Box, device_boxes
from realhf.geometry.layout import Layout
from realhf.geometry.parameters import ParameterSpec, decoder_parameters

# Parameters and shards start at multiples of this, so that all are aligned for vector loads (256 bytes in float32).
ALIGNMENT = 64


@dataclass(frozen=True, eq=False)
class FlatLayout:
    """Tensors of the given shapes end to end, padded to `shards` equal parts."""

    shapes: Mapping[str, tuple[int, ...]]
    shards: int = 1

    @cached_property
    def starts(self) -> dict[str, int]:
        """Where each tensor begins."""
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
        """Elements of the whole vector, including the padding after each tensor and of the last shard."""
        return _aligned(max(map(self.end, self.shapes), default=0), ALIGNMENT * self.shards)

    def shard(self, index: int) -> range:
        """The elements of shard `index` (ZeRO, Rajbhandari et al., 2020, section 5.1)."""
        size = self.size // self.shards
        return range(index * size, (index + 1) * size)


@dataclass(frozen=True)
class Placement:
    """Where a model lies: a layout, and whether data parallelism divides the parameters themselves ("fsdp")."""

    layout: Layout
    data_parallel: DataParallel = "zero1"


def flat_layout(model: DecoderConfig, layout: Layout, device: int) -> FlatLayout:
    """The parameters of `device` as one vector: first those that tp divides, then those replicated over tp, then the
    second copy of a tied embedding."""
    shapes = {box.name: box.shape for box in device_boxes(model, layout, device)}
    order = _counting_order(model, layout, device)
    return FlatLayout({name: shapes[name] for name in sorted(shapes, key=order.__getitem__)}, layout.strategy.dp)


def units(
    model: DecoderConfig, layout: Layout, device: int, data_parallel: DataParallel = "zero1"
) -> Mapping[str, FlatLayout]:
    """The vectors of `device` that data parallelism divides, each by itself, in the order of their use.

    "zero1" divides all parameters as one vector with the name "". "fsdp" divides units that are gathered together: an
    embedding, a layer, or the final norm with the head. A unit has the name of the first module that uses it. A tied
    embedding is a unit on both of its stages, so the shards of both stages have the same elements.
    """
    _, tp_index, stage = layout.coordinates(device)
    return _units(model, layout, layout.device(0, tp_index, stage), data_parallel)


@lru_cache(maxsize=1024)
def _units(model: DecoderConfig, layout: Layout, device: int, data_parallel: DataParallel) -> Mapping[str, FlatLayout]:
    """The units of `device`, which its data-parallel peers have in common."""
    whole = flat_layout(model, layout, device)
    if data_parallel == "zero1" or layout.strategy.dp == 1:
        return {"": whole}
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for spec in decoder_parameters(model):
        if spec.name in whole.shapes:
            shapes.setdefault(_unit_of(spec), {})[spec.name] = whole.shapes[spec.name]
    places = {name: place for place, name in enumerate(whole.shapes)}
    return {
        unit: FlatLayout({name: of_unit[name] for name in sorted(of_unit, key=places.__getitem__)}, layout.strategy.dp)
        for unit, of_unit in shapes.items()
    }


def counted_range(model: DecoderConfig, layout: Layout, device: int, flat: FlatLayout) -> range:
    """The part of its shard of `flat`, one of `units`, that `device` counts in sums over the whole model and writes to
    a checkpoint.

    Over all units and devices of the layout, every element of every global parameter is counted once.
    """
    dp, tp, _ = layout.coordinates(device)
    order = _counting_order(model, layout, device)
    highest = 1 if tp == 0 else 0
    counted = max((flat.end(name) for name in flat.shapes if order[name] <= highest), default=0)
    shard = flat.shard(dp)
    return range(shard.start, max(shard.start, min(shard.stop, counted)))


def counted_slices(
    model: DecoderConfig, layout: Layout, device: int, data_parallel: DataParallel = "zero1"
) -> list[slice]:
    """Where the counted parts lie in the vector of this rank's shards of all units, end to end."""
    if _divides_dimensions(model, layout, data_parallel):
        box, start = _dimension_shards(model, layout, device)[-1]
        return [slice(0, start + box.size)]
    found, first = [], 0
    for flat in units(model, layout, device, data_parallel).values():
        counted = counted_range(model, layout, device, flat)
        found.append(slice(first, first + len(counted)))  # the counted part is the beginning of a shard
        first += flat.size // layout.strategy.dp
    return found


def shard_boxes(
    model: DecoderConfig,
    layout: Layout,
    device: int,
    data_parallel: DataParallel = "zero1",
    *,
    only_counted: bool = False,
) -> list[tuple[Box, int]]:
    """The boxes of this rank's shards of all units, each with its offset in the vector of these shards.

    torch's `fully_shard` divides a model of `transformers`: each parameter along one of its dimensions.

    Raises:
        UserError: dp divides no dimension of such a parameter.
    """
    if _divides_dimensions(model, layout, data_parallel):
        return _dimension_shards(model, layout, device)
    whole = {box.name: box for box in device_boxes(model, layout, device)}
    found, first = [], 0
    for flat in units(model, layout, device, data_parallel).values():
        shard = flat.shard(layout.coordinates(device)[0])
        elements = counted_range(model, layout, device, flat) if only_counted else shard
        found += [(box, first + at - shard.start) for box, at in boxes_in(flat, whole, elements)]
        first += len(shard)
    return found


def held_boxes(model: DecoderConfig, layout: Layout, device: int, data_parallel: DataParallel = "zero1") -> list[Box]:
    """The boxes that `device` keeps: all of `device_boxes`, or its shards of them; [] outside the mesh.

    A parameter that is cut within a row gives several boxes.
    """
    if data_parallel == "zero1" or layout.strategy.dp == 1 or device not in layout.mesh.devices:
        return device_boxes(model, layout, device)
    return [box for box, _ in shard_boxes(model, layout, device, data_parallel)]


def _divides_dimensions(model: DecoderConfig, layout: Layout, data_parallel: DataParallel) -> bool:
    return isinstance(model, TransformersConfig) and data_parallel == "fsdp" and layout.strategy.dp > 1


def _dimension_shards(model: DecoderConfig, layout: Layout, device: int) -> list[tuple[Box, int]]:
    """This rank's part of every parameter, along the first dimension that dp divides; all of them are counted."""
    dp, index = layout.strategy.dp, layout.coordinates(device)[0]
    found, first = [], 0
    for spec in decoder_parameters(model):
        dim = next((dim for dim, extent in enumerate(spec.shape) if extent % dp == 0), None)
        if dim is None:
            raise UserError(
                f"data_parallel='fsdp' with dp={dp}: dp divides no dimension of {spec.name}, whose shape is "
                f"{list(spec.shape)}; choose another dp, or data_parallel='zero1'"
            )
        extent = spec.shape[dim] // dp
        box = Box(spec.name, (0,) * len(spec.shape), spec.shape).between(index * extent, (index + 1) * extent, dim)
        found.append((box, first))
        first += _aligned(box.size, ALIGNMENT)
    return found


def boxes_in(flat: FlatLayout, whole: Mapping[str, Box], elements: range) -> list[tuple[Box, int]]:
    """The boxes that make up `elements` of a vector, each with its offset in the vector.

    `whole` has the boxes that lie in the vector. The elements of a box are consecutive. A parameter that is cut within
    a row gives several boxes.
    """
    found = []
    for name, start in flat.starts.items():
        holder = whole[name]
        if start >= elements.stop or start + holder.size <= elements.start:
            continue
        first, last = (min(max(place - start, 0), holder.size) for place in (elements.start, elements.stop))
        for offset, shape in _cut(holder.shape, first, last):
            moved = tuple(a + b for a, b in zip(holder.offset, offset, strict=True))
            found.append((Box(name, moved, shape), start + first))
            first += prod(shape)
    return found


@lru_cache(maxsize=4096)  # the layers of a device are cut alike
def _cut(shape: tuple[int, ...], first: int, last: int) -> Sequence[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offset, shape) of the blocks that make up the elements [first, last) of an array in row-major order: the end of
    a row, whole rows, the beginning of a row; recursively in more than two dimensions."""
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


def _unit_of(spec: ParameterSpec) -> str:
    match spec.place:
        case "embedding":
            return spec.name.removesuffix(".weight")
        case "layer":
            return f"model.layers.{spec.layer}"
        case "head":
            return "model.norm"


def _aligned(elements: int, alignment: int) -> int:
    return -(-elements // alignment) * alignment


def _counting_order(model: DecoderConfig, layout: Layout, device: int) -> dict[str, int]:
    """0: held by this tensor-parallel rank alone; 1: replicated over them; 2: second copy of a tied embedding."""
    stage = layout.coordinates(device)[2]

    def rank(spec: ParameterSpec) -> int:
        return 2 if spec.tied and stage > 0 else int(spec.shard_dim is None)

    return {spec.name: rank(spec) for spec in decoder_parameters(model)}
