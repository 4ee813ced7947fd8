"""Cells: parts of parameters. A device holds a cell whole or not at all, and wants it whole or not at all."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from realhf.geometry.boxes import Box

Devices = tuple[int, ...]  # ascending


class Cell(NamedTuple):
    """A box, the devices that hold it from the start, those that want and lack it, those that want and hold it."""

    box: Box
    holders: Devices
    lacking: Devices
    keeping: Devices


def cells_of(source: Mapping[int, Sequence[Box]], target: Mapping[int, Sequence[Box]]) -> Iterator[Cell]:
    """The boxes that the devices of `target` want, cut where the holders in `source` change, parameter by parameter.

    Raises:
        ValueError: no source device holds part of a target box, or two target boxes of a device overlap.
    """
    holders, wanting = _devices_by_box(source), _devices_by_box(target, disjoint=True)
    # The layers of a stage are divided alike: their cells differ in the name alone.
    found: dict[object, list[Cell]] = {}
    for name, wanted in wanting.items():
        held = holders.get(name, {})
        pattern = tuple(
            tuple((box.offset, box.shape, of_box) for box, of_box in side.items()) for side in (wanted, held)
        )
        cells = found.get(pattern)
        if cells is None:
            cells = found[pattern] = [cell for box, devices in wanted.items() for cell in _cells(box, devices, held)]
        for cell in cells:
            yield cell._replace(box=Box(name, cell.box.offset, cell.box.shape))


def _devices_by_box(table: Mapping[int, Sequence[Box]], disjoint: bool = False) -> dict[str, dict[Box, Devices]]:
    """Name -> distinct box -> the devices with that box in their row of the table.

    Raises:
        ValueError: `disjoint`, and two boxes of a device overlap.
    """
    alike: dict[tuple[Box, ...], list[int]] = {}
    for device in sorted(table):
        alike.setdefault(tuple(table[device]), []).append(device)
    result: dict[str, dict[Box, Devices]] = {}
    for boxes, devices in alike.items():
        own: dict[str, list[Box]] = {}
        for box in boxes:
            others = own.setdefault(box.name, [])
            if disjoint and (other := next(filter(box.intersect, others), None)):
                raise ValueError(f"device {devices[0]} wants {box} and {other}, which overlap; target boxes must not")
            others.append(box)
            of_name = result.setdefault(box.name, {})
            of_name[box] = tuple(sorted({*of_name[box], *devices})) if box in of_name else tuple(devices)
    return result


def _cells(box: Box, wanting: Devices, held: Mapping[Box, Devices]) -> list[Cell]:
    """`box` cut so that each cell lies wholly inside or outside of every held box."""
    cells: list[tuple[Box, Devices]] = [(box, ())]
    for holder, devices in held.items():
        cut: list[tuple[Box, Devices]] = []
        for cell, holders in cells:
            common = cell.intersect(holder)
            if common is None:
                cut.append((cell, holders))
                continue
            cut.append((common, tuple(sorted({*holders, *devices}))))
            cut.extend((rest, holders) for rest in subtract(cell, common))
        cells = cut
    for cell, holders in cells:
        if not holders:
            raise ValueError(
                f"parameter {box.name}: no source device holds the part of shape {cell.shape} at offset {cell.offset}; "
                f"the source layout must hold every box of the target layout"
            )
    return [
        Cell(
            cell,
            holders,
            lacking=tuple(device for device in wanting if device not in holders),
            keeping=tuple(device for device in wanting if device in holders),
        )
        for cell, holders in sorted(cells, key=lambda cell: cell[0].offset)
    ]


def subtract(box: Box, inner: Box) -> list[Box]:
    """`box` without `inner`, which lies inside it, as disjoint boxes."""
    rest = []
    for dim, (low, extent) in enumerate(zip(inner.offset, inner.shape, strict=True)):
        first, high, last = box.offset[dim], low + extent, box.offset[dim] + box.shape[dim]
        rest += [box.between(start, end, dim) for start, end in ((first, low), (high, last)) if start < end]
        box = box.between(low, high, dim)
    return rest
