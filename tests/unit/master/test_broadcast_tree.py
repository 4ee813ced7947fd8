"""Who sends to whom, by hand: sizes are seconds in which a device sends nothing else."""

import pytest

from realhf.master.broadcast_tree import BroadcastTrees


def test_the_next_message_comes_from_whoever_is_free() -> None:
    trees = BroadcastTrees(None)
    assert list(trees.hops(1, [0, 1], [2])) == [(0, 2)], "both are free: the first"
    assert list(trees.hops(1, [0, 1], [3])) == [(1, 3)]
    assert list(trees.hops(5, [0, 1], [4])) == [(0, 4)], "both are free after one second"
    assert list(trees.hops(1, [0, 1], [5])) == [(1, 5)]
    assert list(trees.hops(4, [0, 1], [6])) == [(1, 6)], "free after two seconds, not six"
    assert list(trees.hops(1, [0, 1], [7])) == [(0, 7)], "both are free after six"


def test_who_has_a_message_sends_it_on() -> None:
    """Devices 0 and 1 send to 2 and 3, and all four to the rest."""
    hops = list(BroadcastTrees(None).hops(3, [0], [1, 2, 3, 4, 5]))
    assert hops == [(0, 1), (0, 2), (1, 3), (0, 4), (1, 5)]


def test_a_message_enters_a_node_once_by_the_device_that_has_fetched_least() -> None:
    """Of nodes of four devices the second lacks it; there it goes on from device to device."""
    trees = BroadcastTrees(4)
    assert list(trees.hops(2, [0], [4, 5, 6])) == [(0, 4), (4, 5), (4, 6)]
    # Device 4 has fetched already; 5 sends nothing, and 6 neither: the first of them.
    assert list(trees.hops(2, [1], [4, 5, 6])) == [(1, 5), (5, 4), (5, 6)]
    assert list(trees.hops(1, [1], [4, 5, 6])) == [(1, 6), (6, 4), (6, 5)]
    # All have fetched, 6 least of all; a node that holds it is not entered.
    assert list(trees.hops(1, [2, 7], [6, 3])) == [(7, 6), (2, 3)]
    trees = BroadcastTrees(4)
    assert list(trees.hops(9, [4], [5])) == [(4, 5)]
    assert next(trees.hops(1, [0], [4, 5])) == (0, 5), "device 4 is still sending"


@pytest.mark.parametrize(("fetched", "first"), [((8, 4), 9), ((4, 8), 8)])
def test_between_nodes_bytes_count(fetched: tuple[int, int], first: int) -> None:
    trees = BroadcastTrees(8)
    for device, size_bytes in zip((8, 9), fetched, strict=True):
        list(trees.hops(size_bytes, [0], [device]))
    assert next(trees.hops(1, [1], [8, 9])) == (1, first)
