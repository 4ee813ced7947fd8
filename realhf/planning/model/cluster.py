"""The cluster a plan is made for, and the device meshes it offers."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from realhf.base.numbers import DEVICES, check_fields, check_range
from realhf.geometry.layout import DeviceMesh
from realhf.planning.model.hardware import Hardware


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """`num_nodes` equal nodes; `hardware` describes their devices."""

    num_nodes: int = 1
    devices_per_node: int
    hardware: Hardware = field(hash=False)  # it has a dict

    def __post_init__(self) -> None:
        check_fields("cluster: ", self, {"num_nodes": DEVICES, "devices_per_node": DEVICES})
        check_range("cluster:", self.num_devices, *DEVICES, "devices")

    @property
    def device_memory_bytes(self) -> int:
        return self.hardware.device_memory_bytes

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    def node_of(self, device: int) -> int:
        return device // self.devices_per_node

    def crosses_nodes(self, devices: Iterable[int]) -> bool:
        """Whether the devices lie on more than one node."""
        return len({self.node_of(device) for device in devices}) > 1


def share_a_node(cluster: Cluster, a: DeviceMesh, b: DeviceMesh) -> bool:
    """Whether both meshes lie within one and the same node."""
    node = cluster.node_of(a.first)
    return node == cluster.node_of(a.devices[-1]) == cluster.node_of(b.first) == cluster.node_of(b.devices[-1])


def halves(cluster: Cluster) -> list[DeviceMesh]:
    """Both halves of the cluster; none where they are no device meshes."""
    half, rest = divmod(cluster.num_devices, 2)
    is_mesh = half % cluster.devices_per_node == 0 if cluster.num_nodes > 1 else half & (half - 1) == 0
    return [DeviceMesh(0, half), DeviceMesh(half, half)] if is_mesh and not rest else []


# Meshes of several nodes are runs of so many blocks: up to that number of nodes, of nodes.
BLOCKS, MANY_NODES, FEW_BLOCKS = 16, 32, 8


def has_all_meshes(cluster: Cluster) -> bool:
    """Whether the search has every mesh: on larger clusters, meshes of several nodes are those of `node_runs`."""
    return cluster.num_nodes <= BLOCKS


def node_runs(cluster: Cluster) -> list[tuple[int, int]]:
    """(first, number) of nodes, the shortest first: all runs of neighbours; without `has_all_meshes` the aligned powers
    of two, and runs of blocks, a sixteenth of the cluster each (an eighth above 32 nodes), in whole nodes."""
    nodes = cluster.num_nodes
    block = -(-nodes // (BLOCKS if nodes <= MANY_NODES else FEW_BLOCKS))
    edges = [*range(0, nodes, block), nodes]
    runs = {(first, end - first) for i, first in enumerate(edges) for end in edges[i + 1 :]}
    for power in range(nodes.bit_length()):
        runs |= {(first, 2**power) for first in range(0, nodes - 2**power + 1, 2**power)}
    return sorted(runs, key=lambda run: (run[1], run[0]))


def device_meshes(cluster: Cluster) -> list[DeviceMesh]:
    """Aligned power-of-two parts of one node, and whole consecutive nodes, `node_runs` (ReaL, section 3)."""
    per_node = cluster.devices_per_node
    meshes, size = [], 1
    while size < per_node:
        for first in range(0, cluster.num_devices, per_node):
            meshes += [DeviceMesh(first + start, size) for start in range(0, per_node - size + 1, size)]
        size *= 2
    return meshes + [DeviceMesh(first * per_node, number * per_node) for first, number in node_runs(cluster)]
