"""Descriptions of hardware: what a plan takes a device and its links to achieve."""

import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from realhf.architecture.model import DType
from realhf.base.errors import UserError
from realhf.base.numbers import DEVICES, check_fields
from realhf.planning.model.uncertainty import UNSTATED, Uncertainty, place_of

RATES = (1.0, 1e24)  # limits of bytes and operations a second
DELAYS_S = (0.0, 1e4)
MEMORY_BYTES = (1, 2**50)
MEMORY_GB = (1e-6, 2**20)  # a kilobyte is for tests
CORES = (1, 2**20)
GIB = 2**30
KINDS = {"_bandwidth": RATES, "_s": DELAYS_S}  # constants by the ends of their names
# Constants that a description may leave out, and those that then stand for them.
OPTIONAL = {"train_launch_s": "layer_launch_s", "inter_node_send_bandwidth": "inter_node_bandwidth"}


def in_gib(size_bytes: float) -> str:
    """`55.6 GiB`; two digits below 1 GiB."""
    gib = size_bytes / GIB
    return f"{gib:.1f} GiB" if gib >= 1 else f"{gib:.2g} GiB"


def device_kind(name: str) -> str:
    """The name of a device as a file can have it: nvidia-h100-80gb-hbm3 of "NVIDIA H100 80GB HBM3", with the vendor
    that older drivers leave out ("A100-SXM4-80GB")."""
    kind = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return f"nvidia-{kind.removeprefix('nvidia-')}"


def mismatch(hardware: "Hardware", device_name: str | None, memory_bytes: int) -> str:
    """Why a plan for `hardware` cannot count on a device of this name (its driver's; None: a process on the CPU) and
    memory (a GPU's); empty if it can."""
    planned = f"the plan is for {hardware.name} ({hardware.description})"
    if device_name is None:
        return f"{planned}, and there is no GPU" if hardware.is_gpu else ""
    if not hardware.is_gpu or not hardware.describes(device_name):
        return f"{planned}, and the device is {device_name}"
    if hardware.device_memory_bytes > memory_bytes:
        return (
            f"{planned} and counts on {hardware.device_memory_bytes / GIB:.1f} GiB a device, and {device_name} has "
            f"{memory_bytes / GIB:.1f} GiB"
        )
    return ""


class Hardware(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rates that one device and its links achieve, not their peaks. Bandwidths are per device and direction.

    inter_node_send_bandwidth: of a message between two devices of different nodes, which takes fewer channels than a
        collective; by default `inter_node_bandwidth`.
    inter_node_shared_bandwidth: of a whole node, in each direction, where its devices share the network; None: each has
        a card of its own, and reaches the rates above while all others send, too.
    layer_launch_s: of a layer's forward whatever its size (kernel launches, the interpreter), beside its compute.
    train_launch_s: the same in training, which also records for the backward pass; by default `layer_launch_s`.
    mini_batch_s: of a mini-batch of a training, beside its passes and the optimizer's (packing, statistics, the host).
    decode_launch_s, decode_graph_launch_s: of a layer of one decode step, eager and replayed as a CUDA graph.
    call_overhead_s: a request's way from the master to the workers and back, with what a call prepares.
    sampling_s: drawing the tokens of one decode step of one micro-batch, with what the step costs the host.
    packs_weights: see `realhf.planning.model.features.EngineFeatures`.
    host_bandwidth: between a device and its host's memory; by default of PCIe 4 with 16 lanes.
    communicator_bytes: that a communicator takes on each of its devices, beside what it sends.
    shares_host_memory: the devices of a node send over the memory of their host.
    device_names: what the driver calls these devices; empty: the description does not say.
    uncertainty: of these constants; None: as `sureness` assumes.
    multiprocessors: of a GPU: attention's deterministic gradients take memory for each that its heads leave idle.
    threads: of a worker on a CPU; host_memory_bytes, host_cores: of the machine, where its workers share those.
    """

    name: str
    description: str
    matmul_flops: dict[DType, float]
    memory_bandwidth: float
    device_memory_bytes: int
    devices_per_node: int
    intra_node_bandwidth: float
    intra_node_latency_s: float
    inter_node_bandwidth: float
    inter_node_latency_s: float
    layer_launch_s: float
    decode_launch_s: float
    decode_graph_launch_s: float
    call_overhead_s: float
    sampling_s: float
    packs_weights: bool = False
    inter_node_send_bandwidth: float | None = None
    inter_node_shared_bandwidth: float | None = None
    train_launch_s: float | None = None
    mini_batch_s: float = 0.0
    host_bandwidth: float = 2.4e10
    communicator_bytes: float = 0.0
    shares_host_memory: bool = False
    device_names: tuple[str, ...] = ()
    uncertainty: Uncertainty | None = None
    multiprocessors: int = 132
    threads: int = 1
    host_memory_bytes: int | None = None
    host_cores: int | None = None

    def __post_init__(self) -> None:
        rates = {f: limits for f in self.__struct_fields__ for end, limits in KINDS.items() if f.endswith(end)}
        memory = {"device_memory_bytes": MEMORY_BYTES, "communicator_bytes": (0, 2**40), "devices_per_node": DEVICES}
        of_host = {"host_memory_bytes": MEMORY_BYTES, "host_cores": CORES, "threads": CORES, "multiprocessors": CORES}
        check_fields("", self, {"matmul_flops": RATES, **rates, **memory, **of_host})
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]*", self.name):
            raise UserError(
                f"name {self.name!r} is no name of a folder, where profiles lie; take letters, digits and -"
            )
        for constant in self.uncertainty.spread if self.uncertainty else ():
            if not self.has_constant(constant):
                raise UserError(
                    f"uncertainty: spread has {constant!r}, which is no constant of this description; take names of "
                    "its fields, and matmul_flops[DTYPE]"
                )
        if not self.matmul_flops:
            raise UserError("matmul_flops must give a rate for at least one dtype")

    def has_constant(self, name: str) -> bool:
        """Whether the description has such a constant: a rate or a delay, or `matmul_flops[DTYPE]`."""
        field, key = place_of(name)
        values = getattr(self, field, None)
        if field in self.__struct_fields__ and not key:
            return field.endswith(tuple(KINDS))
        return isinstance(values, dict) and key in values

    def constant(self, name: str) -> float:
        """The value of a constant, or of the one that replaces it where it is left out. Raises KeyError for the shared
        bandwidth of a network that is not shared."""
        field, key = place_of(name)
        value = getattr(self, field)
        if key:
            return float(value[key])
        return float(getattr(self, OPTIONAL[field]) if value is None else value)

    def with_constants(self, values: Mapping[str, float]) -> "Hardware":
        """The description with other constants."""
        fields: dict[str, Any] = {}
        for name, value in values.items():
            field, key = place_of(name)
            fields[field] = {**getattr(self, field), **fields.get(field, {}), key: value} if key else value
        return msgspec.structs.replace(self, **fields)

    @property
    def sureness(self) -> Uncertainty:
        """How sure the description is of its constants, as it says, or as is assumed where it says nothing; constants
        that are 0 stay so."""
        if self.uncertainty is not None:
            return self.uncertainty
        names = [f"matmul_flops[{dtype}]" for dtype in self.matmul_flops]
        names += [field for field in self.__struct_fields__ if self.has_constant(field) and getattr(self, field)]
        return Uncertainty(spread=dict.fromkeys(names, UNSTATED))

    @property
    def is_gpu(self) -> bool:
        return not self.shares_host_memory

    def describes(self, device_name: str) -> bool:
        """Whether it is of devices that their driver calls `device_name`. Without `device_names` it may be of any."""
        return not self.device_names or device_kind(device_name) in map(device_kind, self.device_names)

    def flops(self, dtype: DType) -> float:
        """Matrix-multiplication FLOP/s. Raises UserError if the description has no figure for this dtype."""
        if dtype not in self.matmul_flops:
            known = ", ".join(self.matmul_flops)
            raise UserError(f"hardware {self.name}: no matmul_flops for dtype {dtype!r}; it has {known}")
        return self.matmul_flops[dtype]

    def crowding(self, num_workers: int) -> float:
        """Threads of `num_workers` workers for each core of the machine that they share, at least 1: a call takes this
        factor longer while all of them compute."""
        return 1.0 if self.host_cores is None else max(1.0, num_workers * self.threads / self.host_cores)

    @property
    def send_bandwidth(self) -> float:
        """Bytes/s of one message between nodes while all devices of its node send one."""
        return self.send_bandwidth_of(self.devices_per_node)

    def send_bandwidth_of(self, senders: int) -> float:
        """Bytes/s of one message between nodes while `senders` devices of its node send one."""
        return self._of_shared(self.inter_node_send_bandwidth or self.inter_node_bandwidth, senders)

    def _of_shared(self, bandwidth: float, senders: int) -> float:
        """The part of `bandwidth` that a device reaches while `senders` devices of its node send."""
        shared = self.inter_node_shared_bandwidth
        return bandwidth if shared is None else min(bandwidth, shared / senders)

    def launch_s(self, *, trains: bool) -> float:
        """Seconds to launch the kernels of a layer's forward pass."""
        return self.train_launch_s if trains and self.train_launch_s is not None else self.layer_launch_s

    def send_s(self, size_bytes: float, *, crosses_nodes: bool, senders: int | None = None) -> float:
        """One message: latency + bytes / bandwidth. `senders`: devices of its node that send at once (default: all)."""
        if crosses_nodes:
            bandwidth = self.send_bandwidth_of(senders or self.devices_per_node)
            return self.inter_node_latency_s + size_bytes / bandwidth
        return self.intra_node_latency_s + size_bytes / self.intra_node_bandwidth

    def sending(self, share: float) -> "Hardware":
        """With links between nodes over which messages carry a `share` of their bytes, as fast as all can be compared
        with what was sent before, which is read too."""
        if share >= 1:
            return self
        all_s, compared = self.send_bandwidth, self.memory_bandwidth / 2
        bandwidth = max(all_s, min(all_s / max(share, 1e-6), compared))
        return msgspec.structs.replace(self, inter_node_send_bandwidth=bandwidth, inter_node_shared_bandwidth=None)

    def broadcast_s(self, size_bytes: float, group_size: int, *, crosses_nodes: bool) -> float:
        """A pipeline over all members: a ring of n - 1 hops (NCCL), or a tree whose pieces follow one another (gloo).

        Over a host's memory the root copies in and the others then copy out, where the two copies of a message overlap.
        """
        latency_s, bandwidth = self.link(crosses_nodes, per_node=1)
        if self.shares_host_memory and not crosses_nodes:
            return latency_s + 2 * size_bytes / bandwidth
        return (group_size - 1) * latency_s + size_bytes / bandwidth

    def all_reduce_s(self, size_bytes: float, group_size: int, *, crosses_nodes: bool, per_node: int = 1) -> float:
        """The faster of a ring and a tree, as NCCL and gloo choose by size; 0 for one member. `per_node`: see `link`.

        Ring: 2 (n - 1) messages of 1 / n of the data (Patarasuk and Yuan, 2009, section 3). Double binary tree:
        the whole data up and down in a pipeline, latency of 2 ceil(log2 n) hops (Sanders, Speck and Träff, 2009).
        """
        latency_s, bandwidth = self.link(crosses_nodes, per_node)
        ring = 2 * (group_size - 1) * (latency_s + size_bytes / group_size / bandwidth)
        tree = 2 * (math.ceil(math.log2(group_size)) * latency_s + size_bytes / bandwidth)
        return min(ring, tree)

    def all_gather_s(self, size_bytes: float, group_size: int, *, crosses_nodes: bool, per_node: int = 1) -> float:
        """Ring all-gather of `size_bytes` in all: (n - 1) messages of 1 / n of the data. So is a reduce-scatter."""
        latency_s, bandwidth = self.link(crosses_nodes, per_node)
        return (group_size - 1) * (latency_s + size_bytes / group_size / bandwidth)

    def link(self, crosses_nodes: bool, per_node: int) -> tuple[float, float]:
        """(mean latency of a hop, bandwidth) of a group's ring. With k members in each node (`per_node`) there are k
        rings, since every member brings its own network link, up to what a device can send within the node; one hop of
        k crosses. All devices of a node are in such groups at once: each has an equal part of a shared network."""
        if not crosses_nodes:
            return self.intra_node_latency_s, self.intra_node_bandwidth
        of_device = self._of_shared(self.inter_node_bandwidth, self.devices_per_node)
        if per_node == 1:
            return self.inter_node_latency_s, of_device
        latency_s = (self.inter_node_latency_s + (per_node - 1) * self.intra_node_latency_s) / per_node
        return latency_s, min(per_node * of_device, self.intra_node_bandwidth)
