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
from realhf.realloc.rounds import Rounds, Transfer
from realhf.realloc.senders import Senders, node_of
from realhf.realloc.shards import held_boxes

DEFAULT_BUCKET_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class DeviceRound:
    """What one device does in round `index`: by peer, the boxes it sends and receives, in this order.

    `forwards`: some of what it sends it received in an earlier round.
    """

    index: int
    sends: dict[int, tuple[Box, ...]]
    receives: dict[int, tuple[Box, ...]]
    forwards: bool = False


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
            sent[transfer.source] = sent.get(transfer.source, 0) + transfer.box.size * self.element_bytes
        return sent

    @cached_property
    def received_bytes(self) -> dict[int, int]:
        """Bytes received by each device that receives."""
        received: dict[int, int] = {}
        for transfer in self.transfers:
            received[transfer.target] = received.get(transfer.target, 0) + transfer.box.size * self.element_bytes
        return received

    @cached_property
    def network_bytes(self) -> int:
        """Bytes that cross from one node to another; the other sent bytes stay within a node."""
        return sum(
            transfer.box.size * self.element_bytes
            for transfer in self.transfers
            if node_of(transfer.target, self.devices_per_node) != node_of(transfer.source, self.devices_per_node)
        )

    @cached_property
    def found_by_device(self) -> dict[int, object]:
        """No part of the plan: what who carries it out found for each device, to be found once (`places_of`)."""
        return {}

    @cached_property
    def device_rounds(self) -> dict[int, tuple[DeviceRound, ...]]:
        """For each device that sends or receives, its part of the rounds that concern it."""
        result: dict[int, list[DeviceRound]] = {}
        for index, transfers in enumerate(self.rounds):
            sends: dict[int, dict[int, list[Box]]] = {}
            receives: dict[int, dict[int, list[Box]]] = {}
            forwarders = {transfer.source for transfer in transfers if transfer.is_forwarded}
            for transfer in transfers:
                sends.setdefault(transfer.source, {}).setdefault(transfer.target, []).append(transfer.box)
                receives.setdefault(transfer.target, {}).setdefault(transfer.source, []).append(transfer.box)
            for device in sends.keys() | receives.keys():
                mine = DeviceRound(
                    index,
                    {peer: tuple(boxes) for peer, boxes in sends.get(device, {}).items()},
                    {peer: tuple(boxes) for peer, boxes in receives.get(device, {}).items()},
                    device in forwarders,
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
    forwarding: bool = True,
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
        forwarding=forwarding,
    )


def plan_reallocation(
    source: Mapping[int, Sequence[Box]],
    target: Mapping[int, Sequence[Box]],
    devices_per_node: int | None = None,
    *,
    element_bytes: int = 4,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    forwarding: bool = True,
) -> ReallocationPlan:
    """The plan after which every device of `target` holds its boxes, given what the devices of `source` hold.

    A device's own part of a target box is copied locally. For the rest the sender is a holder on the same node
    (devices i * devices_per_node and following; None: one node) or else any holder; among these the one that has
    been given the fewest bytes to send, then the lowest index. With `forwarding`, a part that several devices want
    goes on from those that got it in an earlier round: the first of a node fetches it for all of the node, and
    holders that would send more than others receive are relieved, so that a chain forms behind a single holder.
    Boxes larger than a bucket are cut along their first dimension (further ones only if a single row is larger).

    Raises:
        ValueError: part of a target box is held by nobody, two target boxes of a device overlap, or a bucket
            cannot hold one element.
    """
    if bucket_bytes < element_bytes:
        raise ValueError(
            f"bucket_bytes={bucket_bytes} cannot hold one element of {element_bytes} bytes; make it larger"
        )
    holders = _holders_by_name(source)
    senders, rounds = Senders(devices_per_node, forwarding), Rounds(bucket_bytes)
    local_copies: dict[int, list[Box]] = {}
    lacking_bytes = dict.fromkeys(sorted(target), 0)
    to_send: list[tuple[Box, list[int], list[int]]] = []
    for box, devices in _by_parameter(target):
        for cell, cell_holders in _cells(box, holders.get(box.name, {})):
            lacking = sorted({*devices}.difference(cell_holders))
            for device in {*devices}.difference(lacking):
                local_copies.setdefault(device, []).append(cell)
            for device in lacking:
                lacking_bytes[device] += cell.size * element_bytes
            for piece in _pieces(cell, bucket_bytes // element_bytes) if lacking else ():
                to_send.append((piece, cell_holders, lacking))
                senders.expect(piece.size * element_bytes, cell_holders)
    for piece, piece_holders, lacking in to_send:
        size_bytes = piece.size * element_bytes
        can_forward: dict[int, int] = {}  # device that gets the piece -> the round after that
        for sender, receiver in senders.hops(size_bytes, piece_holders, lacking):
            transfer = Transfer(sender, receiver, piece, is_forwarded=sender in can_forward)
            can_forward[receiver] = rounds.add(transfer, size_bytes, can_forward.get(sender, 0)) + 1
    return ReallocationPlan(
        rounds=tuple(tuple(transfers) for transfers in rounds.transfers),
        local_copies={device: tuple(cells) for device, cells in local_copies.items()},
        lacking_bytes=lacking_bytes,
        element_bytes=element_bytes,
        bucket_bytes=bucket_bytes,
        devices_per_node=devices_per_node,
    )


def _holders_by_name(source: Mapping[int, Sequence[Box]]) -> dict[str, dict[Box, list[int]]]:
    """Name -> each distinct box of it -> the devices that hold that box, ascending."""
    holders: dict[str, dict[Box, list[int]]] = {}
    for device in sorted(source):
        for box in source[device]:
            holders.setdefault(box.name, {}).setdefault(box, []).append(device)
    return holders


def _by_parameter(target: Mapping[int, Sequence[Box]]) -> Iterator[tuple[Box, list[int]]]:
    """Every distinct target box, parameter by parameter, with the devices that want it, ascending."""
    wanted: dict[str, dict[Box, list[int]]] = {}
    for device in sorted(target):
        own: dict[str, list[Box]] = {}
        for box in target[device]:
            for other in own.setdefault(box.name, []):
                if other.intersect(box):
                    raise ValueError(f"device {device} wants {box} and {other}, which overlap; target boxes must not")
            own[box.name].append(box)
            wanted.setdefault(box.name, {}).setdefault(box, []).append(device)
    for of_name in wanted.values():
        yield from of_name.items()


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
