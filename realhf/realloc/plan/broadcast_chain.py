"""Who sends a part to whom: nearest first, once into a node, and evenly over the devices."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence


class Senders:
    """Chooses the hops by which parts get from their holders to those that lack them, evenly over all parts."""

    def __init__(self, devices_per_node: int | None, forwarding: bool) -> None:
        """`forwarding`: a device may send on what it received."""
        self._devices_per_node = devices_per_node
        self._forwarding = forwarding
        self._sent: defaultdict[int, int] = defaultdict(int)
        self._received: defaultdict[int, int] = defaultdict(int)
        self._received_across_nodes: defaultdict[int, int] = defaultdict(int)
        # Bytes sent, and those still to be sent first: nobody should forward who has enough to send of its own.
        self._load: defaultdict[int, int] = defaultdict(int)

    def expect(self, size_bytes: int, holders: Sequence[int]) -> None:
        """Says that one of `holders` will have to send a part; to be said of all parts before any `hops`."""
        for holder in holders:
            self._load[holder] += size_bytes // len(holders)

    def hops(self, size_bytes: int, holders: Sequence[int], lacking: Sequence[int]) -> Iterator[tuple[int, int]]:
        """(sender, receiver) for every device of `lacking`: a receiver may be the sender of later hops.

        Args:
            holders: who has the part from the start, ascending.
        """
        sent, load = self._sent, self._load
        for holder in holders:
            load[holder] -= size_bytes // len(holders)
        holders_of, forwarders_of = self._by_node(holders), self._by_node(())
        forwarders: list[int] = []
        # Of a node's devices the one comes first, and may fetch for all, that fetched the least from other nodes; else
        # the one with the least to send, which can forward.
        for receiver in sorted(lacking, key=lambda device: (self._received_across_nodes[device], load[device], device)):
            node = node_of(receiver, self._devices_per_node)
            candidates, others = holders_of[node], forwarders_of[node]
            if not candidates and not others:
                candidates, others = list(holders), forwarders
                self._received_across_nodes[receiver] += size_bytes
            sender = min(candidates or others, key=load.__getitem__)
            # Forwarding takes a round more: it pays only where those who hold the part are the busier end.
            if others and sent[sender] > self._received[receiver]:
                sender = min((*candidates, *others), key=load.__getitem__)
            sent[sender] += size_bytes
            load[sender] += size_bytes
            self._received[receiver] += size_bytes
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
    """The node that a device is on; with None all are on one."""
    return 0 if devices_per_node is None else device // devices_per_node
