"""Which device sends samples to which: a message enters each node once, and reaches every device early."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from realhf.realloc.plan.broadcast_chain import node_of


class BroadcastTrees:
    """Chooses the hops that carry messages from the devices that hold them to the devices that lack them.

    It is list scheduling (Graham, 1966) with bytes as the clock. A device sends one whole message after the other, so
    a message that all devices of a node lack spreads as a tree. A reallocation moves buckets in rounds, for which
    chains are better (`realhf.realloc.plan.broadcast_chain`).
    """

    def __init__(self, devices_per_node: int | None) -> None:
        """`devices_per_node`: None if all devices are on one node."""
        self._devices_per_node = devices_per_node
        self._sends_until: defaultdict[int, int] = defaultdict(int)
        self._fetched: defaultdict[int, int] = defaultdict(int)  # bytes, from other nodes

    def hops(self, size_bytes: int, holders: Sequence[int], lacking: Sequence[int]) -> Iterator[tuple[int, int]]:
        """(sender, receiver) for every device of `lacking`, each once; a receiver may be the sender of later hops."""
        ready_at = dict.fromkeys(holders, 0)
        on_node: dict[int, list[int]] = {}  # the devices that hold the message
        for holder in holders:
            on_node.setdefault(self._node(holder), []).append(holder)
        receivers: dict[int, list[int]] = {}
        for device in lacking:
            receivers.setdefault(self._node(device), []).append(device)
        for node, of_node in receivers.items():
            if node not in on_node:
                first = min(of_node, key=lambda device: (self._fetched[device], self._sends_until[device], device))
                self._fetched[first] += size_bytes
                of_node.remove(first)
                yield self._send(size_bytes, list(ready_at), first, ready_at)
                on_node[node] = [first]
        for node, of_node in receivers.items():
            for receiver in of_node:
                yield self._send(size_bytes, on_node[node], receiver, ready_at)
                on_node[node].append(receiver)

    def _send(
        self, size_bytes: int, candidates: Sequence[int], receiver: int, ready_at: dict[int, int]
    ) -> tuple[int, int]:
        sender = min(candidates, key=lambda device: self._start(device, ready_at))
        ready_at[receiver] = self._sends_until[sender] = self._start(sender, ready_at) + size_bytes
        return sender, receiver

    def _start(self, sender: int, ready_at: Mapping[int, int]) -> int:
        return max(ready_at[sender], self._sends_until[sender])

    def _node(self, device: int) -> int:
        return node_of(device, self._devices_per_node)
