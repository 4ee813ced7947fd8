"""Broadcasts: each part travels from one holder, the root, to all devices that lack it (ReaL, section 5.3).

They are collectives of process groups, so that all devices have to take part in one order. The order is that of the
rounds, and within a round of the groups. A device roots one broadcast of a round at most, and receives in one.

No order of this kind deadlocks, whatever the groups. A device takes part in its broadcasts in the one order of all. Of
the first that is not done, all devices have done those before it, so that each of them takes part in it.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import zip_longest

from realhf.geometry.boxes import Box
from realhf.realloc.plan.broadcast_chain import node_of
from realhf.realloc.plan.cells import Devices
from realhf.realloc.plan.parcels import loads_of
from realhf.realloc.plan.rounds import Transfer


def broadcast_rounds(
    ways: Mapping[tuple[Devices, Devices], Sequence[Box]], devices_per_node: int | None, bucket_elements: int
) -> list[list[Transfer]]:
    """The broadcasts of all boxes, round by round: each is a load of at most a bucket, and a transfer to each receiver.

    Devices of a node that lack the boxes of a way, (holders, devices that lack them), have one root: a holder on their
    node, else any, the one with the fewest bytes to send, the largest way first. A root has one group with all that it
    serves, and equal groups of several ways are one.
    """
    sizes = {way: sum(box.size for box in boxes) for way, boxes in ways.items()}
    sent = defaultdict[int, int](int)
    of_groups: dict[Devices, list[Box]] = {}  # by group, the root first
    for way in sorted(ways, key=sizes.__getitem__, reverse=True):
        holders, lacking = way
        served: dict[Devices, list[int]] = {}  # by the holders that may be their root
        for device in lacking:
            node = node_of(device, devices_per_node)
            near = tuple(holder for holder in holders if node_of(holder, devices_per_node) == node)
            served.setdefault(near or holders, []).append(device)
        for candidates, receivers in served.items():
            root = min(candidates, key=sent.__getitem__)
            sent[root] += sizes[way]
            of_groups.setdefault((root, *receivers), []).extend(ways[way])
    loads = ([(group, load) for load in loads_of(boxes, *[bucket_elements] * 2)] for group, boxes in of_groups.items())
    rounds: list[list[Transfer]] = []
    sending, receiving = defaultdict[int, int](int), defaultdict[int, int](int)  # by device a bit for each round
    for group, load in (each for in_turn in zip_longest(*loads) for each in in_turn if each):
        root, *others = group
        busy = sending[root]
        for device in others:
            busy |= receiving[device]
        free = ~busy & (busy + 1)  # the lowest bit that is not set
        sending[root] |= free
        for device in others:
            receiving[device] |= free
        if free.bit_length() > len(rounds):
            rounds.append([])
        rounds[free.bit_length() - 1] += [Transfer(root, device, load, broadcast=group) for device in others]
    return rounds
