"""Plans a parameter reallocation: which box travels from which device to which, in which bucket.

Pure and deterministic, no torch: every rank computes the same plan from the same two tables of boxes, the search
counts bytes with it, the executor runs it. Each byte that a device lacks is received exactly once, what a device
already holds never crosses the network (ReaL, section 5.3 "redistribution", for boxes of any shape).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from realhf.api.compute import DataParallel
from realhf.api.layout import Layout
from realhf.api.model import DecoderConfig
from realhf.realloc.layout import Box
from realhf.realloc.shards import held_boxes

DEFAULT_BUCKET_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class Transfer:
    """`box` travels from device `source` to every device of `targets` (one device; several are a broadcast)."""

    source: int
    targets: tuple[int, ...]
    box: Box


@dataclass(frozen=True)
class DeviceRound:
    """What one device does in round `index`: by peer, the boxes it sends and receives, packed in this order."""

    index: int
    sends: dict[int, tuple[Box, ...]]
    receives: dict[int, tuple[Box, ...]]


@dataclass(frozen=True, kw_only=True)
class ReallocationPlan:
    """How the parameters get from one table of boxes to another.

    `rounds` is the one total order in which all devices work: nobody starts round i + 1 before its own part of
    round i is done, so overlapping meshes cannot deadlock. In a round no device sends more than `bucket_bytes`, or
    receives more. `local_copies` are the parts of a device's target boxes that it already holds.
    `lacking_bytes`, per target device, are those it does not hold: no plan can move less.
    """

    rounds: tuple[tuple[Transfer, ...], ...]
    local_copies: Mapping[int, tuple[Box, ...]]
    lacking_bytes: Mapping[int, int]
    element_bytes: int
    bucket_bytes: int
    devices_per_node: int | None

    @property
    def transfers(self) -> Iterator[Transfer]:
        """All transfers, in the total order."""
        return (transfer for each_round in self.rounds for transfer in each_round)

    @property
    def lower_bound_bytes(self) -> int:
        """Bytes that some device lacks, summed over the devices."""
        return sum(self.lacking_bytes.values())

    @cached_property
    def sent_bytes(self) -> dict[int, int]:
        """Bytes sent by each device that sends."""
        sent: dict[int, int] = {}
        for transfer in self.transfers:
            size_bytes = transfer.box.size * self.element_bytes * len(transfer.targets)
            sent[transfer.source] = sent.get(transfer.source, 0) + size_bytes
        return sent

    @cached_property
    def received_bytes(self) -> dict[int, int]:
        """Bytes received by each device that receives."""
        received: dict[int, int] = {}
        for transfer in self.transfers:
            for device in transfer.targets:
                received[device] = received.get(device, 0) + transfer.box.size * self.element_bytes
        return received

    @cached_property
    def network_bytes(self) -> int:
        """Bytes that cross from one node to another; the other sent bytes stay within a node."""
        return sum(
            transfer.box.size * self.element_bytes
            for transfer in self.transfers
            for device in transfer.targets
            if _node(device, self.devices_per_node) != _node(transfer.source, self.devices_per_node)
        )

    @cached_property
    def device_rounds(self) -> dict[int, tuple[DeviceRound, ...]]:
        """For each device that sends or receives, its part of the rounds that concern it."""
        result: dict[int, list[DeviceRound]] = {}
        for index, transfers in enumerate(self.rounds):
            sends: dict[int, dict[int, list[Box]]] = {}
            receives: dict[int, dict[int, list[Box]]] = {}
            for transfer in transfers:
                for target in transfer.targets:
                    sends.setdefault(transfer.source, {}).setdefault(target, []).append(transfer.box)
                    receives.setdefault(target, {}).setdefault(transfer.source, []).append(transfer.box)
            for device in sends.keys() | receives.keys():
                mine = DeviceRound(
                    index,
                    {peer: tuple(boxes) for peer, boxes in sends.get(device, {}).items()},
                    {peer: tuple(boxes) for peer, boxes in receives.get(device, {}).items()},
                )
                result.setdefault(device, []).append(mine)
        return {device: tuple(rounds) for device, rounds in result.items()}


@lru_cache(maxsize=1024)
def plan_between(
    model: DecoderConfig,
    source: Layout,
    target: Layout,
    devices_per_node: int | None = None,
    element_bytes: int = 4,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    source_data_parallel: DataParallel = "zero1",
    target_data_parallel: DataParallel = "zero1",
) -> ReallocationPlan:
    """The plan that moves `model` from layout `source` to layout `target`; planned once a pair, then cached.

    What a device keeps of either depends on whether data parallelism divides parameters there (`held_boxes`).
    """
    return plan_reallocation(
        {device: held_boxes(model, source, device, source_data_parallel) for device in source.mesh.devices},
        {device: held_boxes(model, target, device, target_data_parallel) for device in target.mesh.devices},
        devices_per_node,
        element_bytes=element_bytes,
        bucket_bytes=bucket_bytes,
    )


def plan_reallocation(
    source: Mapping[int, Sequence[Box]],
    target: Mapping[int, Sequence[Box]],
    devices_per_node: int | None = None,
    *,
    element_bytes: int = 4,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> ReallocationPlan:
    """The plan after which every device of `target` holds its boxes, given what the devices of `source` hold.

    A device's own part of a target box is copied locally. For the rest the source is the holder on the same node
    (devices i * devices_per_node and following; None: one node) or else any holder; among these the one that has
    been given the fewest bytes to send, then the lowest index. Boxes larger than a bucket are cut along their first
    dimension (further ones only if a single row is larger than a bucket).

    Raises:
        ValueError: part of a target box is held by nobody, two target boxes of a device overlap, or a bucket
            cannot hold one element.
    """
    if bucket_bytes < element_bytes:
        raise ValueError(
            f"bucket_bytes={bucket_bytes} cannot hold one element of {element_bytes} bytes; make it larger"
        )
    holders = _holders_by_name(source)
    cells_of: dict[Box, list[tuple[Box, list[int]]]] = {}
    sent = dict.fromkeys(source, 0)
    local_copies: dict[int, list[Box]] = {}
    lacking_bytes = dict.fromkeys(sorted(target), 0)
    rounds = _Rounds(bucket_bytes)
    for device, box in _by_parameter(target):
        if box not in cells_of:
            cells_of[box] = _cells(box, holders.get(box.name, {}))
        for cell, cell_holders in cells_of[box]:
            if device in cell_holders:
                local_copies.setdefault(device, []).append(cell)
                continue
            size_bytes = cell.size * element_bytes
            lacking_bytes[device] += size_bytes
            node = _node(device, devices_per_node)
            nearest = [holder for holder in cell_holders if _node(holder, devices_per_node) == node] or cell_holders
            chosen = min(nearest, key=lambda holder: (sent[holder], holder))
            sent[chosen] += size_bytes
            for piece in _pieces(cell, bucket_bytes // element_bytes):
                rounds.add(Transfer(chosen, (device,), piece), piece.size * element_bytes)
    return ReallocationPlan(
        rounds=tuple(tuple(transfers) for transfers in rounds.transfers),
        local_copies={device: tuple(cells) for device, cells in local_copies.items()},
        lacking_bytes=lacking_bytes,
        element_bytes=element_bytes,
        bucket_bytes=bucket_bytes,
        devices_per_node=devices_per_node,
    )


class _Rounds:
    """Puts each transfer into the first round, not yet well filled, in which all of its devices have room for it."""

    def __init__(self, bucket_bytes: int) -> None:
        self.transfers: list[list[Transfer]] = []
        self._bucket_bytes = bucket_bytes
        self._sending: dict[int, _Lane] = {}
        self._receiving: dict[int, _Lane] = {}

    def add(self, transfer: Transfer, size_bytes: int) -> None:
        lanes = [self._sending.setdefault(transfer.source, _Lane())]
        lanes += [self._receiving.setdefault(target, _Lane()) for target in transfer.targets]
        index = max(lane.first_open for lane in lanes)
        while any(lane.used(index) + size_bytes > self._bucket_bytes for lane in lanes):
            index += 1
        for lane in lanes:
            lane.add(index, size_bytes, self._bucket_bytes // 2)
        while len(self.transfers) <= index:
            self.transfers.append([])
        self.transfers[index].append(transfer)


class _Lane:
    """Bytes that one device sends, or receives, in each round; all rounds below `first_open` are well filled."""

    def __init__(self) -> None:
        self.first_open = 0
        self._used_bytes: list[int] = []

    def used(self, index: int) -> int:
        return self._used_bytes[index] if index < len(self._used_bytes) else 0

    def add(self, index: int, size_bytes: int, well_filled_bytes: int) -> None:
        """Not looking for room where more than `well_filled_bytes` are used keeps planning fast."""
        self._used_bytes.extend([0] * (index + 1 - len(self._used_bytes)))
        self._used_bytes[index] += size_bytes
        while self.used(self.first_open) > well_filled_bytes:
            self.first_open += 1


def _node(device: int, devices_per_node: int | None) -> int:
    return 0 if devices_per_node is None else device // devices_per_node


def _holders_by_name(source: Mapping[int, Sequence[Box]]) -> dict[str, dict[Box, list[int]]]:
    """Name -> each distinct box of it -> the devices that hold that box, ascending."""
    holders: dict[str, dict[Box, list[int]]] = {}
    for device in sorted(source):
        for box in source[device]:
            holders.setdefault(box.name, {}).setdefault(box, []).append(device)
    return holders


def _by_parameter(target: Mapping[int, Sequence[Box]]) -> Iterator[tuple[int, Box]]:
    """All (device, target box), parameter by parameter, devices ascending."""
    wanted: dict[str, list[tuple[int, Box]]] = {}
    for device in sorted(target):
        for box in target[device]:
            of_name = wanted.setdefault(box.name, [])
            for other_device, other in reversed(of_name):
                if other_device != device:
                    break
                if other.intersect(box):
                    raise ValueError(f"device {device} wants {box} and {other}, which overlap; target boxes must not")
            of_name.append((device, box))
    for of_name in wanted.values():
        yield from of_name


def _cells(box: Box, holders: Mapping[Box, list[int]]) -> list[tuple[Box, list[int]]]:
    """`box` cut so that each cell lies wholly inside or outside of every held box: (cell, its holders ascending)."""
    cells: list[tuple[Box, list[int]]] = [(box, [])]
    for held, devices in holders.items():
        cut: list[tuple[Box, list[int]]] = []
        for cell, cell_holders in cells:
            common = cell.intersect(held)
            if common is None:
                cut.append((cell, cell_holders))
                continue
            cut.append((common, sorted({*cell_holders, *devices})))
            cut.extend((rest, cell_holders) for rest in subtract(cell, common))
        cells = cut
    for cell, cell_holders in cells:
        if not cell_holders:
            raise ValueError(
                f"parameter {box.name}: nobody holds the part of shape {cell.shape} at offset {cell.offset}; "
                f"the source layout must hold all that the target layout wants"
            )
    return sorted(cells, key=lambda cell: cell[0].offset)


def subtract(box: Box, inner: Box) -> list[Box]:
    """`box` without `inner`, which lies inside it, as disjoint boxes."""
    rest = []
    offset, shape = list(box.offset), list(box.shape)
    for dim, (low, extent) in enumerate(zip(inner.offset, inner.shape, strict=True)):
        for start, end in ((offset[dim], low), (low + extent, offset[dim] + shape[dim])):
            if start < end:
                rest.append(
                    Box(
                        box.name,
                        (*offset[:dim], start, *offset[dim + 1 :]),
                        (*shape[:dim], end - start, *shape[dim + 1 :]),
                    )
                )
        offset[dim], shape[dim] = low, extent
    return rest


def _pieces(box: Box, max_elements: int, dim: int = 0) -> Iterator[Box]:
    """`box` cut along dimension `dim` into pieces of at most `max_elements`; along the next ones if a row is more."""
    if box.size <= max_elements:
        yield box
        return
    row_elements = box.size // box.shape[dim]
    rows = max(1, max_elements // row_elements)
    for start in range(0, box.shape[dim], rows):
        piece = Box(
            box.name,
            (*box.offset[:dim], box.offset[dim] + start, *box.offset[dim + 1 :]),
            (*box.shape[:dim], min(rows, box.shape[dim] - start), *box.shape[dim + 1 :]),
        )
        yield from _pieces(piece, max_elements, dim + 1)
