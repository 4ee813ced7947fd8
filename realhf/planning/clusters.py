"""Clusters by name (`h100-16x8`) or from a YAML file of node groups."""

import re
from pathlib import Path

import msgspec

from realhf.base.errors import UserError
from realhf.base.files import BadContentError, decode_yaml
from realhf.base.numbers import DEVICES, check_fields, check_range
from realhf.planning.cluster import Cluster
from realhf.planning.here import divided
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.model.hardware import GIB, Hardware

_NAME = re.compile(r"(?P<hardware>.+)-(?P<nodes>\d+)x(?P<devices>\d+)")
_SUFFIXES = (".yaml", ".yml")
MEMORY_GB = (1e-6, 2**20)  # a kilobyte is for tests
EXAMPLE = "groups: [{hardware: h100, nodes: 16, devices_per_node: 8}]"


class NodeGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`nodes` equal nodes. `device_memory_gb` (GiB) takes the place of the hardware description's."""

    hardware: str
    nodes: int
    devices_per_node: int
    device_memory_gb: float | None = None

    def __post_init__(self) -> None:
        check_fields("", self, {"nodes": DEVICES, "devices_per_node": DEVICES, "device_memory_gb": MEMORY_GB})

    def cluster(self, memory_gb: float | None = None) -> Cluster:
        """Raises UserError for unknown hardware. `memory_gb` takes the place of the memory of the group."""
        given = self.device_memory_gb if memory_gb is None else memory_gb
        hardware = divided(with_memory(load_hardware(self.hardware), given), self.devices_per_node)
        return Cluster(
            num_nodes=self.nodes,
            devices_per_node=self.devices_per_node,
            device_memory_bytes=hardware.device_memory_bytes,
            hardware=hardware,
        )


class ClusterFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    groups: tuple[NodeGroup, ...]

    def __post_init__(self) -> None:
        if not self.groups:
            raise ValueError("groups is empty; give at least one")


def parse_clusters(text: str, memory_gb: float | None = None) -> dict[str, Cluster]:
    """The clusters of a comma list, by what they were called.

    Raises:
        UserError: as `parse_cluster`, or a cluster given twice.
    """
    clusters: dict[str, Cluster] = {}
    for word in text.split(","):
        name = word.strip()
        if name in clusters:
            raise UserError(f"--cluster: {name!r} is given twice")
        clusters[name] = parse_cluster(name, memory_gb)
    return clusters


def parse_cluster(text: str, memory_gb: float | None = None) -> Cluster:
    """`HARDWARE-NODESxDEVICES`, or the path of a YAML file.

    Raises:
        UserError: neither of them, unknown hardware, or a file with a missing, unknown or ill-typed field.
    """
    if text.endswith(_SUFFIXES):
        return _read(Path(text), memory_gb)
    match = _NAME.fullmatch(text)
    if not match:
        raise UserError(
            f"cluster {text!r} is neither HARDWARE-NODESxDEVICES (h100-16x8: 16 nodes of 8 devices) nor a .yaml file"
        )
    try:
        nodes, devices = (int(match[name][:20]) for name in ("nodes", "devices"))  # a number of 21 digits is too large
        group = NodeGroup(hardware=match["hardware"], nodes=nodes, devices_per_node=devices)
    except UserError as error:
        raise UserError(f"cluster {text!r}: {error}") from None
    return group.cluster(memory_gb)


def with_memory(hardware: Hardware, memory_gb: float | None) -> Hardware:
    """The hardware with `memory_gb` (GiB) a device, which is then no share of a host's; None leaves it.

    Raises:
        UserError: no device has such a memory.
    """
    if memory_gb is None:
        return hardware
    check_range("--memory-gb", memory_gb, *MEMORY_GB, "GiB")
    return msgspec.structs.replace(hardware, device_memory_bytes=int(memory_gb * GIB), host_memory_bytes=None)


def _read(path: Path, memory_gb: float | None) -> Cluster:
    try:
        file = decode_yaml(path.read_bytes(), ClusterFile)
    except OSError as error:
        raise UserError(f"{path}: cannot read the cluster ({error.strerror}); write one like {EXAMPLE}") from None
    except BadContentError as error:
        raise UserError(f"{path}: not a cluster: {error}; write it like {EXAMPLE}") from None
    if len(file.groups) > 1:
        kinds = ", ".join(f"{group.nodes} x {group.hardware}" for group in file.groups)
        raise UserError(f"{path}: {len(file.groups)} groups ({kinds}); plans are made for one group, so give one")
    try:
        return file.groups[0].cluster(memory_gb)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
