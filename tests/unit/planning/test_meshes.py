"""The device meshes that a cluster offers, listed by hand."""

import pytest

from realhf.base.errors import UserError
from realhf.geometry.layout import DeviceMesh
from realhf.planning.model.cluster import Cluster, device_meshes, halves, has_all_meshes, node_runs, share_a_node
from tests.unit.planning.graphs import CPU, cpu_cluster


def runs(nodes: int) -> list[tuple[int, int]]:
    return node_runs(cpu_cluster(1, num_nodes=nodes))


def test_all_runs_of_neighbouring_nodes() -> None:
    assert runs(1) == [(0, 1)]
    assert runs(4) == [(0, 1), (1, 1), (2, 1), (3, 1), (0, 2), (1, 2), (2, 2), (0, 3), (1, 3), (0, 4)]
    assert len(runs(16)) == 16 * 17 // 2
    assert [has_all_meshes(cpu_cluster(1, num_nodes=nodes)) for nodes in (1, 15, 16, 17)] == [True, True, True, False]


def blocks(edges: list[int]) -> set[tuple[int, int]]:
    return {(first, end - first) for first in edges for end in edges if end > first}


def powers(nodes: int) -> set[tuple[int, int]]:
    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64) if size <= nodes]
    return {(first, size) for size in sizes for first in range(nodes) if first % size == 0 and first + size <= nodes}


@pytest.mark.parametrize(
    ("nodes", "edges"),
    [
        # A sixteenth of the cluster in whole nodes.
        (17, [0, 2, 4, 6, 8, 10, 12, 14, 16, 17]),
        (32, list(range(0, 33, 2))),
        # Above 32 nodes an eighth.
        (33, [0, 5, 10, 15, 20, 25, 30, 33]),
        (64, list(range(0, 65, 8))),
    ],
)
def test_of_many_nodes_runs_of_blocks_and_powers_of_two(nodes: int, edges: list[int]) -> None:
    found = runs(nodes)
    assert len(found) == len(set(found))
    assert set(found) == blocks(edges) | powers(nodes)
    assert found == sorted(found, key=lambda run: (run[1], run[0]))


def test_parts_of_a_node_and_whole_nodes() -> None:
    """Of two nodes of eight devices: aligned powers of two within a node, then whole nodes."""
    meshes = [(mesh.first, mesh.size) for mesh in device_meshes(cpu_cluster(8, num_nodes=2))]
    within = [(first, size) for size in (1, 2, 4) for first in range(0, 16, size)]
    assert meshes == [*within, (0, 8), (8, 8), (0, 16)]


def test_parts_of_nodes_that_are_no_power_of_two() -> None:
    """Of two nodes of six devices there are two fours, each at the begin of its node."""
    meshes = [(mesh.first, mesh.size) for mesh in device_meshes(cpu_cluster(6, num_nodes=2))]
    ones, twos = [(i, 1) for i in range(12)], [(0, 2), (2, 2), (4, 2), (6, 2), (8, 2), (10, 2)]
    assert meshes == [*ones, *twos, (0, 4), (6, 4), (0, 6), (6, 6), (0, 12)]
    assert [(mesh.first, mesh.size) for mesh in device_meshes(cpu_cluster(1))] == [(0, 1)]


@pytest.mark.parametrize(
    ("nodes", "per_node", "half"),
    [
        (1, 8, 4), (1, 2, 1), (2, 8, 8), (4, 6, 12), (2, 3, 3),
        # Halves of three devices are no power of two; one device, and three nodes, have no halves.
        (1, 6, None), (1, 1, None), (1, 5, None), (3, 4, None), (3, 2, None), (1, 9, None), (3, 3, None),
    ],
)  # fmt: skip
def test_halves(nodes: int, per_node: int, half: int | None) -> None:
    expected = [] if half is None else [DeviceMesh(0, half), DeviceMesh(half, half)]
    assert halves(cpu_cluster(per_node, num_nodes=nodes)) == expected


@pytest.mark.parametrize(
    ("a", "b", "shared"),
    [
        ((0, 2), (2, 2), True),
        ((0, 4), (0, 1), True),
        ((3, 1), (0, 4), True),
        ((4, 2), (6, 2), True),
        ((0, 2), (4, 2), False),
        ((4, 2), (0, 2), False),
        ((0, 8), (0, 2), False),
        ((0, 2), (0, 8), False),
        ((4, 4), (4, 8), False),
        ((4, 8), (4, 4), False),
        ((0, 8), (0, 8), False),
    ],
)
def test_meshes_within_one_node(a: tuple[int, int], b: tuple[int, int], shared: bool) -> None:
    """Of three nodes of four devices."""
    assert share_a_node(cpu_cluster(4, num_nodes=3), DeviceMesh(*a), DeviceMesh(*b)) is shared


def test_devices_cross_nodes() -> None:
    cluster = cpu_cluster(4, num_nodes=3)
    assert [cluster.node_of(device) for device in (0, 3, 4, 7, 8, 11)] == [0, 0, 1, 1, 2, 2]
    assert not cluster.crosses_nodes([4])
    assert not cluster.crosses_nodes([4, 7])
    assert cluster.crosses_nodes([3, 4])
    assert cluster.crosses_nodes(range(12))
    assert not cluster.crosses_nodes([])


def test_a_cluster_has_a_node_unless_it_says_more() -> None:
    cluster = Cluster(devices_per_node=8, hardware=CPU)
    assert (cluster.num_nodes, cluster.num_devices) == (1, 8)
    assert hash(cluster) == hash(Cluster(devices_per_node=8, hardware=CPU))
    assert cluster.device_memory_bytes == CPU.device_memory_bytes


@pytest.mark.parametrize(
    ("nodes", "per_node", "message"),
    [
        (0, 8, "cluster: num_nodes 0 is not from 1 to 4,096"),
        (2, 0, "cluster: devices_per_node 0 is not from 1 to 4,096"),
        (4097, 1, "cluster: num_nodes 4097 is not from 1 to 4,096"),
        (64, 65, "cluster: 4160 is not from 1 to 4,096 devices"),
    ],
)
def test_clusters_that_nothing_is_planned_for(nodes: int, per_node: int, message: str) -> None:
    with pytest.raises(UserError) as error:
        Cluster(num_nodes=nodes, devices_per_node=per_node, hardware=CPU)
    assert str(error.value).startswith(message)
    assert Cluster(num_nodes=64, devices_per_node=64, hardware=CPU).num_devices == 4096
