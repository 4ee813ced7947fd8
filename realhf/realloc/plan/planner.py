"""Plans a parameter reallocation: which box travels from which device to which, in which bucket.

Pure and deterministic, no torch: every rank computes the same plan from the same two tables of boxes, the search
counts bytes with it, the executor runs it. Each byte that a device lacks is received exactly once; bytes that a device
already holds never cross the network (ReaL, section 5.3 "redistribution", for boxes of any shape).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from realhf.architecture.model import DecoderConfig
from realhf.geometry.boxes import Box
from realhf.geometry.shards import Placement, held_boxes
from realhf.realloc.plan.broadcast_chain import BroadcastChains
from realhf.realloc.plan.broadcasts import broadcast_rounds
from realhf.realloc.plan.cells import Devices, cells_of
from realhf.realloc.plan.parcels import Parcel, parcels_of
from realhf.realloc.plan.rounds import Rounds, Transfer

DEFAULT_BUCKET_BYTES = 64 * 1024 * 1024

# By messages from holders; by these and from devices that received them before; or by collectives of process groups.
MovedBy = Literal["messages", "chains", "broadcasts"]


@dataclass(frozen=True)
class DeviceRound:
    """The work of one device in round `index`: by peer, the boxes that it sends and receives, in this order.

    `forwards`: it received some of the sent boxes in an earlier round. `sends_in`, `receives_in`: the devices of the
    broadcast in which it does, the root first; empty: by messages.
    """

    index: int
    sends: dict[int, tuple[Box, ...]]
    receives: dict[int, tuple[Box, ...]]
    forwards: bool = False
    sends_in: Devices = ()
    receives_in: Devices = ()

    @property
    def moved_elements(self) -> int:
        """Elements that it sends, or receives, where these are more; a broadcast sends once."""
        sent, received = (
            [sum(box.size for box in boxes) for boxes in of_peers.values()] for of_peers in (self.sends, self.receives)
        )
        return max(max(sent, default=0) if self.sends_in else sum(sent), sum(received))


@dataclass(frozen=True, kw_only=True)
class ReallocationPlan:
    """How the parameters get from one table of boxes to another.

    `rounds` is the one total order in which all devices work: no device starts round i + 1 before its own part of round
    i is done, so overlapping meshes cannot deadlock. In a round no device sends or receives more than `bucket_bytes`.
    `local_copies` are the parts of a device's target boxes that it already holds. `lacking_bytes` are the bytes that
    each target device does not hold: no plan can move less.
    """

    rounds: tuple[tuple[Transfer, ...], ...]
    local_copies: Mapping[int, tuple[Box, ...]]
    lacking_bytes: Mapping[int, int]
    element_bytes: int
    bucket_bytes: int

    @cached_property
    def groups(self) -> tuple[Devices, ...]:
        """The devices, ascending, of the process groups that its broadcasts need, in the order of their first use."""
        return tuple(dict.fromkeys(tuple(sorted(each.broadcast)) for each in self.transfers if each.broadcast))

    @property
    def transfers(self) -> Iterator[Transfer]:
        """All transfers, in the total order."""
        return (transfer for each_round in self.rounds for transfer in each_round)

    @cached_property
    def sent_bytes(self) -> dict[int, int]:
        """Bytes sent by each device that sends."""
        return self._bytes_by(lambda transfer: transfer.source)

    @cached_property
    def received_bytes(self) -> dict[int, int]:
        """Bytes received by each device that receives."""
        return self._bytes_by(lambda transfer: transfer.target)

    def _bytes_by(self, device_of: Callable[[Transfer], int]) -> dict[int, int]:
        found: Counter[int] = Counter()
        for transfer in self.transfers:
            found[device_of(transfer)] += transfer.load.elements * self.element_bytes
        return found

    @cached_property
    def found_by_device(self) -> dict[int, object]:
        """A cache of the executor, by device; not part of the plan (`realhf.realloc.execute.locations`)."""
        return {}

    def rounds_of(self, device: int) -> list[DeviceRound]:
        """The part of `device` in the rounds that concern it."""
        result = []
        for index, transfers in enumerate(self.rounds):
            sends: dict[int, tuple[Box, ...]] = {}
            receives: dict[int, tuple[Box, ...]] = {}
            forwards = False
            sends_in: Devices = ()
            receives_in: Devices = ()
            for source, target, load, is_forwarded, broadcast in transfers:
                if source == device:
                    sends[target] = sends.get(target, ()) + load.boxes
                    forwards |= is_forwarded
                    sends_in = broadcast
                elif target == device:
                    receives[source] = receives.get(source, ()) + load.boxes
                    receives_in = broadcast
            if sends or receives:
                result.append(DeviceRound(index, sends, receives, forwards, sends_in, receives_in))
        return result


@lru_cache(maxsize=1024)
def plan_between(
    model: DecoderConfig,
    source: Placement,
    target: Placement,
    devices_per_node: int | None = None,
    element_bytes: int = 4,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    by: MovedBy = "chains",
) -> ReallocationPlan:
    """The plan that moves `model` from `source` to `target`. Planned once for each pair, then cached."""
    before, after = (
        {device: held_boxes(model, at.layout, device, at.data_parallel) for device in at.layout.mesh.devices}
        for at in (source, target)
    )
    return plan_reallocation(
        before,
        after,
        devices_per_node,
        element_bytes=element_bytes,
        bucket_bytes=bucket_bytes,
        by=by,
    )


def plan_reallocation(
    source: Mapping[int, Sequence[Box]],
    target: Mapping[int, Sequence[Box]],
    devices_per_node: int | None = None,
    *,
    element_bytes: int = 4,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    by: MovedBy = "chains",
) -> ReallocationPlan:
    """The plan after which every device of `target` holds its boxes, from the boxes that devices of `source` hold.

    A device's own part of a target box is copied locally. For the rest the sender is a holder on the same node
    (devices i * devices_per_node and following; None: one node) or else any holder; among these the one that has
    been given the fewest bytes to send, then the lowest index. By chains, a part that several devices want goes on
    from those that got it in an earlier round: the first of a node fetches it for all of the node, and holders that
    would send more than others receive are relieved, so that a chain forms behind a single holder. By broadcasts, a
    sender sends a part once to all devices that get it from there, as the root of their process group.
    Boxes larger than a bucket are cut along their first dimension (further ones only if a single row is larger).

    Raises:
        ValueError: no source device holds part of a target box, two target boxes of a device overlap, or a bucket
            cannot hold one element.
    """
    if bucket_bytes < element_bytes:
        raise ValueError(
            f"bucket_bytes={bucket_bytes} cannot hold one element of {element_bytes} bytes; make it larger"
        )
    local_copies: dict[int, list[Box]] = {}
    ways: dict[tuple[Devices, Devices], list[Box]] = {}  # (holders, lacking) -> all that goes from those to these
    for cell in cells_of(source, target):
        for device in cell.keeping:
            local_copies.setdefault(device, []).append(cell.box)
        if cell.lacking:
            ways.setdefault((cell.holders, cell.lacking), []).append(cell.box)
    lacking_elements = dict.fromkeys(target, 0)
    for (_, lacking), boxes in ways.items():
        elements = sum(box.size for box in boxes)
        for device in lacking:
            lacking_elements[device] += elements
    bucket_elements = bucket_bytes // element_bytes
    if by == "broadcasts":
        rounds = broadcast_rounds(ways, devices_per_node, bucket_elements)
    else:
        parcels = parcels_of(ways, max(lacking_elements.values(), default=0), bucket_elements)
        rounds = _rounds_of_messages(parcels, BroadcastChains(devices_per_node, by == "chains"), bucket_elements)
    return ReallocationPlan(
        rounds=tuple(map(tuple, rounds)),
        local_copies={device: tuple(cells) for device, cells in local_copies.items()},
        lacking_bytes={device: elements * element_bytes for device, elements in lacking_elements.items()},
        element_bytes=element_bytes,
        bucket_bytes=bucket_bytes,
    )


def _rounds_of_messages(
    parcels: Sequence[Parcel], senders: BroadcastChains, bucket_elements: int
) -> list[list[Transfer]]:
    rounds = Rounds(bucket_elements)
    for parcel in parcels:
        senders.expect(parcel.elements, parcel.holders)
    for parcel in parcels:
        arrived: dict[int, list[int]] = {}  # at a device that lacked the parcel: the round of each load
        for sender, receiver in senders.hops(parcel.elements, parcel.holders, parcel.lacking):
            arrived[receiver] = rounds.add(sender, receiver, parcel.loads, arrived.get(sender))
    return rounds.transfers
