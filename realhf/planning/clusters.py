"""The cluster that is asked for: by its numbers, by its name (`h100-16x8`), or as a YAML file of node groups."""

import re
from pathlib import Path

import msgspec

from realhf.base.errors import UserError
from realhf.base.files import decode_yaml, read_file
from realhf.base.numbers import DEVICES, check_fields, check_range
from realhf.machine.gpus import visible_gpus
from realhf.machine.host import read_host
from realhf.planning.here import CPU, check_here, divided, gpus_here, hardware_here
from realhf.planning.model.cluster import Cluster
from realhf.planning.model.descriptions import YAML_SUFFIXES, left_descriptions, load_hardware
from realhf.planning.model.hardware import GIB, MEMORY_GB, Hardware
from realhf.planning.request import DevicesRequest, PlannedHardware

_NAME = re.compile(r"(?P<hardware>.+)-(?P<nodes>\d+)x(?P<devices>\d+)")
_MOST_DIGITS = 20  # that are read of a number: one with more is too large anyway
EXAMPLE = "groups: [{hardware: h100, nodes: 16, devices_per_node: 8}]"


class UnknownNodesError(UserError):
    """Nothing tells what the nodes of a cluster are."""


class NodeGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`nodes` equal nodes. `device_memory_gb` (GiB) replaces the hardware description's."""

    hardware: str
    nodes: int
    devices_per_node: int
    device_memory_gb: float | None = None

    def __post_init__(self) -> None:
        check_fields("", self, {"nodes": DEVICES, "devices_per_node": DEVICES, "device_memory_gb": MEMORY_GB})

    def cluster(self, memory_gb: float | None = None) -> Cluster:
        """Raises UserError for unknown hardware. `memory_gb` replaces the memory of the group."""
        given = self.device_memory_gb if memory_gb is None else memory_gb
        hardware = divided(with_memory(load_hardware(self.hardware), given), self.devices_per_node)
        hardware = with_network_of(hardware, self.devices_per_node)
        return Cluster(num_nodes=self.nodes, devices_per_node=self.devices_per_node, hardware=hardware)


class ClusterFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    groups: tuple[NodeGroup, ...]

    def __post_init__(self) -> None:
        if not self.groups:
            raise ValueError("groups is empty; give at least one")


def cluster_of(request: DevicesRequest, num_devices: int | None = None) -> Cluster:
    """The cluster of a request, with `num_devices` (a given plan's) where it has no number of devices. Raises UserError
    if the numbers contradict each other, or the hardware is not known or not what is here."""
    per_node = devices_per_node(request, num_devices)
    per_node = per_node or devices_per_node(request, len(visible_gpus()) or read_host().cores)
    assert per_node is not None
    hardware = with_memory(_hardware(request), request.memory_gb)
    sharing = request.nodes * per_node if request.place == "here" else per_node
    if PlannedHardware(hardware, sharing) != request.planned:
        hardware = divided(hardware, sharing, request.threads)
    if request.place == "here":
        check_here(hardware, is_given=bool(request.hardware))
    hardware = with_network_of(hardware, per_node)
    return Cluster(num_nodes=request.nodes, devices_per_node=per_node, hardware=hardware)


def with_network_of(hardware: Hardware, devices_per_node: int) -> Hardware:
    """Nodes whose devices share the network, among as many of them as the cluster has in a node."""
    if hardware.inter_node_shared_bandwidth is None:
        return hardware
    return msgspec.structs.replace(hardware, devices_per_node=devices_per_node)


def devices_per_node(request: DevicesRequest, num_devices: int | None) -> int | None:
    """Devices a node by the numbers of a request and of a given plan; None where neither says. Raises UserError if the
    numbers contradict each other."""
    total, per_node = request.num_workers, request.gpus_per_node
    if per_node is None:
        total = total or num_devices
        if total is None:
            return None
        per_node = total // request.nodes
    if per_node < 1 or (total is not None and per_node * request.nodes != total):
        raise UserError(
            f"--num-workers {total} is not --nodes {request.nodes} x --gpus-per-node {per_node}; give any two of them"
        )
    return per_node


def is_unknown_here(request: DevicesRequest) -> bool:
    """Whether nothing on this machine tells the hardware of the nodes that are asked for."""
    if request.place != "nodes" or request.hardware or request.planned:
        return False
    try:
        _of_nodes(request.cpu_only)
    except UnknownNodesError:
        return True
    return False


def hardware_text(hardware: Hardware, num_nodes: int, devices_per_node: int) -> str:
    """The hardware of a plan in words: `1 x 2 cpu with 10.9 GiB each (...)`."""
    return (
        f"{num_nodes} x {devices_per_node} {hardware.name} with {hardware.device_memory_bytes / GIB:.1f} GiB each "
        f"({hardware.description})"
    )


def crowded_text(hardware: Hardware, num_workers: int) -> str | None:
    """A warning where the threads of `num_workers` workers are more than the cores of the machine that they share."""
    cores, crowding = hardware.host_cores, hardware.crowding(num_workers)
    if cores is None or crowding == 1:
        return None
    threads = f" of {hardware.threads} threads" if hardware.threads > 1 else ""
    least = max(1, cores // hardware.threads)
    return (
        f"warning: {num_workers} workers{threads} share {cores} core{'s' * (cores > 1)}: calls are predicted to take "
        f"{crowding:.3g} times as long as with a core for each thread; give --num-workers {least} or fewer"
    )


def clusters_of(request: DevicesRequest, names: str | None, num_devices: int | None = None) -> dict[str, Cluster]:
    """The clusters of a comma list by their names; without a list the one of `cluster_of`, under the name "". Raises
    UserError as `cluster_of` and `parse_cluster`, and if a cluster is given twice."""
    if names is None:
        return {"": cluster_of(request, num_devices)}
    fields = ("nodes", "gpus_per_node", "num_workers", "hardware")
    given = [name for name in fields if getattr(request, name) != getattr(DevicesRequest, name)]
    if given:
        options = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UserError(f"--cluster {names} says it all; leave out {options}")
    clusters: dict[str, Cluster] = {}
    for word in names.split(","):
        name = word.strip()
        if name in clusters:
            raise UserError(f"--cluster: {name!r} is given twice")
        clusters[name] = parse_cluster(name, request.memory_gb)
    return clusters


def parse_cluster(text: str, memory_gb: float | None = None) -> Cluster:
    """`HARDWARE-NODESxDEVICES`, or the path of a YAML file. Raises UserError for neither of them, unknown hardware, or
    a file with a missing, unknown or ill-typed field."""
    if text.endswith(YAML_SUFFIXES):
        return _read(Path(text), memory_gb)
    match = _NAME.fullmatch(text)
    if not match:
        raise UserError(
            f"cluster {text!r} is neither HARDWARE-NODESxDEVICES (h100-16x8: 16 nodes of 8 devices) nor a .yaml file"
        )
    try:
        nodes, devices = (int(match[name][:_MOST_DIGITS]) for name in ("nodes", "devices"))
        group = NodeGroup(hardware=match["hardware"], nodes=nodes, devices_per_node=devices)
    except UserError as error:
        raise UserError(f"cluster {text!r}: {error}") from None
    return group.cluster(memory_gb)


def with_memory(hardware: Hardware, memory_gb: float | None) -> Hardware:
    """The hardware with `memory_gb` (GiB) a device, which is then no share of a host's; None leaves it. Raises
    UserError if no device has such a memory."""
    if memory_gb is None:
        return hardware
    check_range("--memory-gb", memory_gb, *MEMORY_GB, "GiB")
    return msgspec.structs.replace(hardware, device_memory_bytes=int(memory_gb * GIB), host_memory_bytes=None)


def _read(path: Path, memory_gb: float | None) -> Cluster:
    file = read_file(path, lambda data: decode_yaml(data, ClusterFile), "cluster", f"write one like {EXAMPLE}")
    if len(file.groups) > 1:
        kinds = ", ".join(f"{group.nodes} x {group.hardware}" for group in file.groups)
        raise UserError(f"{path}: {len(file.groups)} groups ({kinds}); plans are made for one group, so give one")
    [group] = file.groups
    try:
        return group.cluster(memory_gb)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _hardware(request: DevicesRequest) -> Hardware:
    """The hardware by name, as it was planned, of nodes elsewhere, or of this machine."""
    if request.hardware:
        return gpus_here(request.hardware) or load_hardware(request.hardware)
    if request.planned:
        return request.planned.hardware
    return _of_nodes(request.cpu_only) if request.place == "nodes" else hardware_here()


def _of_nodes(cpu_only: bool) -> Hardware:
    """What a machine that may be unlike a cluster's nodes knows of them. Raises UnknownNodesError if it is not their
    GPUs."""
    if cpu_only:
        return load_hardware(CPU)
    if gpus := gpus_here():
        return gpus
    profiled = [found for name in left_descriptions() if (found := load_hardware(name)).is_gpu]
    if len(profiled) == 1:
        return profiled.pop()
    kinds = f"profiles of {', '.join(one.name for one in profiled)}" if profiled else "no profile of any"
    raise UnknownNodesError(
        f"this machine has no GPU and {kinds}, so that the kind of the nodes' GPUs is not known; give it with "
        "--hardware (h100, or the path of a .yaml file), or --cpu-only for nodes without GPUs, or have a job find it "
        "and measure it: realhf profile EXPERIMENT --launcher slurm"
    )
