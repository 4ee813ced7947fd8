"""A device's parameters as one flat vector, divided over data parallelism: the boxes that a rank updates, and with
fully sharded data parallelism keeps.

The master uses it to divide the writing of a checkpoint with optimizer states. No torch here.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import NamedTuple

from realhf.architecture.compute import DataParallel, Mode
from realhf.architecture.model import DecoderConfig
from realhf.architecture.transformers_config import TransformersConfig
from realhf.base.errors import UserError
from realhf.geometry.boxes import Box, device_boxes
from realhf.geometry.layout import Layout
from realhf.geometry.operators import HEAD, cut_dim, is_projection, kind_of, operators, slice_modes
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
    """The placement of a model: a layout, and the state that data parallelism divides there."""

    layout: Layout
    data_parallel: DataParallel = "zero1"

    @property
    def divided(self) -> int:
        """Between how many ranks all of the part of a device's place in the model is divided."""
        return self.layout.strategy.dp if self.data_parallel == "fsdp" else 1


def flat_layout(model: DecoderConfig, layout: Layout, device: int) -> FlatLayout:
    """The parameters of `device` as one vector: first those that tp divides, then those replicated over tp, then the
    second copy of a tied embedding."""
    (whole,) = units(model, layout, device)
    return whole.flat


@dataclass(frozen=True, eq=False)
class Unit:
    """Tensors that data parallelism keeps together, as one vector.

    name: of its operator, with the number of the slice, or of the layer; "" for all that is not gathered in its mode.
    flat: the tensors, by the name that they have in a decoder.
    boxes: by tensor, the part of a global parameter that it is.
    module: of a sharded unit, the module that needs it first in a forward pass.
    """

    name: str
    mode: Mode
    flat: FlatLayout
    boxes: Mapping[str, Box]
    module: str = ""

    def kept(self, index: int) -> range:
        """The elements that data-parallel rank `index` keeps."""
        return self.flat.shard(index) if self.mode == "sharded" else range(self.flat.size)

    def updated(self, index: int) -> range:
        """The elements that data-parallel rank `index` updates, and has optimizer states of."""
        return range(self.flat.size) if self.mode == "replicated" else self.flat.shard(index)


def units(model: DecoderConfig, layout: Layout, device: int, data_parallel: DataParallel = "zero1") -> tuple[Unit, ...]:
    """The vectors of `device` that data parallelism divides, each by itself; those that are gathered in the order of
    their use.

    "zero1" divides all parameters as one vector. "fsdp" divides units that are gathered together: an embedding, a
    layer, or the final norm with the head. With modes, replicated operators are one vector, ZeRO-1 operators another,
    and every sharded slice one more. A tied embedding is a unit on both of its stages, so the shards of both stages
    have the same elements.

    Raises:
        UserError: the modes are not for this model.
    """
    _, tp_index, stage = layout.coordinates(device)
    return _units(model, layout, layout.device(0, tp_index, stage), data_parallel)


@lru_cache(maxsize=1024)
def _units(model: DecoderConfig, layout: Layout, device: int, data_parallel: DataParallel) -> tuple[Unit, ...]:
    """The units of `device`, which its data-parallel peers have in common."""
    whole = {box.name: box for box in device_boxes(model, layout, device)}
    order = _counting_order(model, layout, device)

    def unit(name: str, mode: Mode, boxes: Mapping[str, Box], module: str = "") -> Unit:
        names = sorted(boxes, key=lambda tensor: order[boxes[tensor].name])
        flat = FlatLayout({tensor: boxes[tensor].shape for tensor in names}, layout.strategy.dp)
        return Unit(name, mode, flat, boxes, module)

    if data_parallel == "zero1" or layout.strategy.dp == 1:
        return (unit("", "zero1", whole),)
    if data_parallel == "fsdp":
        layers: dict[str, dict[str, Box]] = {}
        for spec in decoder_parameters(model):
            if spec.name in whole:
                layers.setdefault(_layer_of(spec), {})[spec.name] = whole[spec.name]
        return tuple(unit(name, "sharded", boxes, name) for name, boxes in layers.items())
    modes = slice_modes(model, data_parallel)
    slices = []
    for name, specs in operators(model).items():
        here = {spec.name: whole[spec.name] for spec in specs if spec.name in whole}
        if here:
            slices += _slices(name, modes[name], here)
    return units_of_slices(slices, unit)


class OperatorSlice(NamedTuple):
    """A slice of an operator, or a whole one: its tensors with the parts of parameters that they are, and the module
    that uses it first."""

    name: str
    mode: Mode
    boxes: Mapping[str, Box]
    module: str


def units_of_slices(slices: Iterable[OperatorSlice], unit: Callable[..., Unit]) -> tuple[Unit, ...]:
    """The vectors of operators: one of the replicated ones, one of the ZeRO-1 ones, and one of every sharded slice;
    `unit` makes them from the fields of a slice."""
    always: dict[Mode, dict[str, Box]] = {"replicated": {}, "zero1": {}}
    gathered: list[Unit] = []
    for part in slices:
        if part.mode == "sharded":
            gathered.append(unit(*part))
        else:
            always[part.mode].update(part.boxes)
    return (*(unit("", mode, boxes, "") for mode, boxes in always.items() if boxes), *gathered)


def matrix_slices(owner: str, box: Box, modes: Sequence[Mode], dim: int = 1) -> list[OperatorSlice]:
    """The slices of a matrix, the weight of a module `owner`, along its columns or its rows (`dim` 0)."""
    slices = []
    for number, mode in enumerate(modes):
        first, last = (box.offset[dim] + box.shape[dim] * n // len(modes) for n in (number, number + 1))
        module = f"{owner}.slices.{number}"
        part = box.between(first, last, dim)
        slices.append(OperatorSlice(f"{owner}:{number}", mode, {f"{module}.weight": part}, module))
    return slices


def _slices(operator: str, modes: Sequence[Mode], boxes: Mapping[str, Box]) -> list[OperatorSlice]:
    """The slices of an operator of a decoder.

    Raises:
        UserError: the operator has fewer columns, or rows of a head, than slices.
    """
    parameter, box = next(iter(boxes.items()))
    owner = parameter.removesuffix(".weight")
    is_used_alone = is_projection(operator) or parameter == "lm_head.weight"
    mode, *others = modes
    if not others and not (mode == "sharded" and is_used_alone):
        users = {HEAD: "model.norm", "experts": parameter.partition(".mlp.")[0] + ".mlp"}
        return [OperatorSlice(operator, mode, boxes, users.get(kind_of(operator), owner))]
    dim = cut_dim(operator)
    extent, what = box.shape[dim], ("rows", "columns")[dim]
    if extent < len(modes):
        raise UserError(
            f"data_parallel: {operator!r} has {extent} {what} on a device, fewer than {len(modes)} slices; choose "
            "fewer slices"
        )
    slices = matrix_slices(owner, box, modes, dim)
    return [part._replace(name=f"{operator}:{n}" if len(modes) > 1 else operator) for n, part in enumerate(slices)]


def counted_range(model: DecoderConfig, layout: Layout, device: int, unit: Unit) -> range:
    """The part of its shard of `unit` that `device` counts in sums over the whole model and writes to a checkpoint.

    Over all units and devices of the layout, every element of every global parameter is counted once.
    """
    dp, tp, _ = layout.coordinates(device)
    order, flat = _counting_order(model, layout, device), unit.flat
    highest = 1 if tp == 0 else 0
    counted = max((flat.end(name) for name in flat.shapes if order[unit.boxes[name].name] <= highest), default=0)
    shard = flat.shard(dp)
    return range(shard.start, max(shard.start, min(shard.stop, counted)))


def counted_slices(
    model: DecoderConfig, layout: Layout, device: int, data_parallel: DataParallel = "zero1"
) -> list[slice]:
    """Places of the counted parts in the vector of all updated parts of this rank, end to end; one of each."""
    if _divides_dimensions(model, layout, data_parallel):
        box, start = _dimension_shards(model, layout, device)[-1]
        return [slice(0, start + box.size)]
    found, first = [], 0
    for unit in units(model, layout, device, data_parallel):
        counted, updated = counted_range(model, layout, device, unit), unit.updated(layout.coordinates(device)[0])
        start = first + counted.start - updated.start
        found.append(slice(start, start + len(counted)))
        first += len(updated)
    return found


def shard_boxes(
    model: DecoderConfig,
    layout: Layout,
    device: int,
    data_parallel: DataParallel = "zero1",
    *,
    only_counted: bool = False,
) -> list[tuple[Box, int]]:
    """The boxes of the parts of all units that this rank updates, each with its offset in the vector of these parts,
    end to end.

    torch's `fully_shard` divides a model of `transformers`: each parameter along one of its dimensions.

    Raises:
        UserError: dp divides no dimension of such a parameter, or modes are not for this model.
    """
    if _divides_dimensions(model, layout, data_parallel):
        return _dimension_shards(model, layout, device)
    found, first = [], 0
    for unit in units(model, layout, device, data_parallel):
        updated = unit.updated(layout.coordinates(device)[0])
        elements = counted_range(model, layout, device, unit) if only_counted else updated
        found += [(box, first + at - updated.start) for box, at in boxes_in(unit.flat, unit.boxes, elements)]
        first += len(updated)
    return found


def held_boxes(model: DecoderConfig, layout: Layout, device: int, data_parallel: DataParallel = "zero1") -> list[Box]:
    """The boxes that `device` keeps: all of `device_boxes`, or its shards of them; [] outside the mesh.

    A parameter that is cut within a row gives several boxes.
    """
    if data_parallel == "zero1" or layout.strategy.dp == 1 or device not in layout.mesh.devices:
        return device_boxes(model, layout, device)
    if _divides_dimensions(model, layout, data_parallel):
        return [box for box, _ in _dimension_shards(model, layout, device)]
    index = layout.coordinates(device)[0]
    return [
        box
        for unit in units(model, layout, device, data_parallel)
        for box, _ in boxes_in(unit.flat, unit.boxes, unit.kept(index))
    ]


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

    `whole` has the boxes of the tensors that lie in the vector. The elements of a box are consecutive. A parameter that
    is cut within a row gives several boxes.
    """
    found = []
    for name, start in flat.starts.items():
        holder = whole[name]
        if start >= elements.stop or start + holder.size <= elements.start:
            continue
        first, last = (min(max(place - start, 0), holder.size) for place in (elements.start, elements.stop))
        for offset, shape in _cut(holder.shape, first, last):
            moved = tuple(a + b for a, b in zip(holder.offset, offset, strict=True))
            found.append((Box(holder.name, moved, shape), start + first))
            first += prod(shape)
    return found


@lru_cache(maxsize=4096)  # the layers of a device are cut alike
def _cut(shape: tuple[int, ...], first: int, last: int) -> Sequence[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offset, shape) of the blocks that make up the elements [first, last) of an array in row-major order: the end of
    a row, whole rows, the beginning of a row; recursively in more than two dimensions."""
    if first >= last:
        return []
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


def _layer_of(spec: ParameterSpec) -> str:
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
