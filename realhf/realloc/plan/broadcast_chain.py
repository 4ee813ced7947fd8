"""Broadcast of a parcel along a chain or tree of messages (ReaL, section 5.3).

A device receives from the nearest sender. A parcel enters each node once, and sending is even over the devices.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence


class BroadcastChains:
    """Chooses the messages of each broadcast, so that all broadcasts together load the devices evenly."""

    def __init__(self, devices_per_node: int | None, forwarding: bool) -> None:
        """With `forwarding` a device may send on a parcel that it received."""
        self._devices_per_node = devices_per_node
        self._forwarding = forwarding
        self._sent: defaultdict[int, int] = defaultdict(int)
        self._received: defaultdict[int, int] = defaultdict(int)
        self._received_across_nodes: defaultdict[int, int] = defaultdict(int)
        # Bytes sent, and bytes of its own that a device has still to send: a busy holder should not forward too.
        self._load: defaultdict[int, int] = defaultdict(int)

    def expect(self, size: int, holders: Sequence[int]) -> None:
        """Counts a parcel that one of `holders` will send. Call it for every parcel before the first `hops`."""
        for holder in holders:
            self._load[holder] += size // len(holders)

    def hops(self, size: int, holders: Sequence[int], lacking: Sequence[int]) -> Iterator[tuple[int, int]]:
        """One (sender, receiver) for each device of `lacking`. A receiver may send in later hops.

        Args:
            holders: the devices that have the parcel from the start, ascending.
        """
        sent, load = self._sent, self._load
        for holder in holders:
            load[holder] -= size // len(holders)
        holders_of, forwarders_of = self._by_node(holders), self._by_node(())
        forwarders: list[int] = []
        # The first receiver of a node may fetch for the whole node: the device that has fetched the least from other
        # nodes, then the one with the least to send, which can forward.
        for receiver in sorted(lacking, key=lambda device: (self._received_across_nodes[device], load[device], device)):
            node = node_of(receiver, self._devices_per_node)
            candidates, others = holders_of[node], forwarders_of[node]
            if not candidates and not others:
                candidates, others = list(holders), forwarders
                self._received_across_nodes[receiver] += size
            sender = min(candidates or others, key=load.__getitem__)
            # Forwarding takes one round more. It pays only where the holders send more than the receivers receive.
            if sent[sender] > self._received[receiver]:
                sender = min((*candidates, *others), key=load.__getitem__)
            sent[sender] += size
            load[sender] += size
            self._received[receiver] += size
            if self._forwarding:
                forwarders.append(receiver)
                forwarders_of[node].append(receiver)
            yield sender, receiver

    def _by_node(self, devices: Iterable[int]) -> defaultdict[int, list[int]]:
        result: defaultdict[int, list[int]] = defaultdict(list)
        for device in devices:
            result[node_of(device, self._devices_per_node)].append(device)
        return result


def node_of(device: int, devices_per_node: int | None) -> int:
    """The index of a device's node. None: all devices are on one node."""
    return 0 if devices_per_node is None else device // devices_per_node
