"""Descriptions of hardware: what the analytic cost model knows of a machine."""

import math
from pathlib import Path

import msgspec

from realhf.api.errors import UserError
from realhf.api.files import BadContentError, decode_yaml
from realhf.api.model import DType
from realhf.api.numbers import DEVICES, check_fields

DESCRIPTIONS = Path(__file__).parent / "descriptions"  # NAME.yaml each, part of the package
RATES = (1.0, 1e24)  # of bytes and operations a second
DELAYS_S = (0.0, 1e4)
DTYPE_BYTES: dict[DType, int] = {"float32": 4, "float64": 8, "bfloat16": 2}


class Hardware(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one device and its links achieve: reached rates, not peaks. Bandwidths are per device and direction.

    `layer_launch_s` is what a layer's forward costs whatever its size (kernel launches, the
    interpreter), added to its compute and not hidden by it; `decode_launch_s` the same for a layer of one
    decode step, `decode_graph_launch_s` where the step is replayed as a CUDA graph; `call_overhead_s` a
    request's way from the master to the workers and back, with what a call prepares; `sampling_s`
    drawing the tokens of one decode step of one micro-batch, with what the step costs the host; `host_bandwidth` that
    between a device and its host's memory (PCIe 4 with 16 lanes, where a description does not say it). `packs_weights`:
    see `realhf.search.features.EngineFeatures`. `communicator_bytes`: memory that a communicator takes on each of its
    devices, beside what it sends. `shares_host_memory`: the devices of a node send over the memory of their host.
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
    host_bandwidth: float = 2.4e10
    communicator_bytes: float = 0.0
    shares_host_memory: bool = False

    def __post_init__(self) -> None:
        rates = ("matmul_flops", "memory_bandwidth", "intra_node_bandwidth", "inter_node_bandwidth", "host_bandwidth")
        delays = ("intra_node_latency_s", "inter_node_latency_s", "layer_launch_s", "decode_launch_s",
                  "decode_graph_launch_s", "call_overhead_s", "sampling_s")  # fmt: skip
        memory = {"device_memory_bytes": (1, 2**50), "communicator_bytes": (0, 2**40), "devices_per_node": DEVICES}
        check_fields("", self, {**dict.fromkeys(rates, RATES), **dict.fromkeys(delays, DELAYS_S), **memory})
        if not self.matmul_flops:
            raise UserError("matmul_flops must give a rate for at least one dtype")

    @property
    def is_gpu(self) -> bool:
        """Whether its devices are GPUs, and not processes on a host."""
        return not self.shares_host_memory

    def flops(self, dtype: DType) -> float:
        """Matrix-multiplication FLOP/s.

        Raises:
            UserError: the description has no figure for this dtype.
        """
        if dtype not in self.matmul_flops:
            known = ", ".join(self.matmul_flops)
            raise UserError(f"hardware {self.name}: no matmul_flops for dtype {dtype!r}; it has {known}")
        return self.matmul_flops[dtype]

    def send_s(self, size_bytes: float, *, crosses_nodes: bool) -> float:
        """One message: latency + bytes / bandwidth."""
        if crosses_nodes:
            return self.inter_node_latency_s + size_bytes / self.inter_node_bandwidth
        return self.intra_node_latency_s + size_bytes / self.intra_node_bandwidth

    def all_reduce_s(self, size_bytes: float, group_size: int, *, crosses_nodes: bool, per_node: int = 1) -> float:
        """The faster of a ring and a tree, as NCCL and gloo choose by size; 0 for a group of one.

        Ring: 2 (n - 1) messages of 1 / n of the data (Patarasuk and Yuan, 2009, section 3). Double binary tree:
        the whole data up and down in a pipeline, latency of 2 ceil(log2 n) hops (Sanders, Speck and Träff, 2009).
        `per_node`: members in each node of a group that crosses nodes; see `link`.
        """
        if group_size <= 1:
            return 0.0
        latency_s, bandwidth = self.link(crosses_nodes, per_node)
        ring = 2 * (group_size - 1) * (latency_s + size_bytes / group_size / bandwidth)
        tree = 2 * (math.ceil(math.log2(group_size)) * latency_s + size_bytes / bandwidth)
        return min(ring, tree)

    def all_gather_s(self, size_bytes: float, group_size: int, *, crosses_nodes: bool, per_node: int = 1) -> float:
        """Ring all-gather of `size_bytes` in all: (n - 1) messages of 1 / n of the data. So is a reduce-scatter."""
        latency_s, bandwidth = self.link(crosses_nodes, per_node)
        return (group_size - 1) * (latency_s + size_bytes / group_size / bandwidth)

    def link(self, crosses_nodes: bool, per_node: int) -> tuple[float, float]:
        """(mean latency of a hop, bandwidth) of a group's ring.

        Every member brings its own network link: a group with k members in each node runs k rings that
        leave the node at different members, up to what a device can send within the node; one hop of k crosses.
        """
        if not crosses_nodes:
            return self.intra_node_latency_s, self.intra_node_bandwidth
        latency_s = (self.inter_node_latency_s + (per_node - 1) * self.intra_node_latency_s) / per_node
        bandwidth = per_node * self.inter_node_bandwidth
        return latency_s, bandwidth if per_node == 1 else min(bandwidth, self.intra_node_bandwidth)


def load_hardware(name: str, folder: Path = DESCRIPTIONS) -> Hardware:
    """Reads the description `FOLDER/NAME.yaml`.

    Raises:
        UserError: no such description, or a missing, unknown or ill-typed field.
    """
    path = folder / f"{name}.yaml"
    try:
        text = path.read_bytes()
    except OSError:
        known = ", ".join(sorted(p.stem for p in folder.glob("*.yaml"))) or "none"
        raise UserError(f"hardware={name!r} is not known; choose one of {known}, or write {path}") from None
    try:
        hardware = decode_yaml(text, Hardware, strict=False)
    except BadContentError as error:
        raise UserError(f"{path}: not a hardware description: {error}; profiles/README.md lists the fields") from None
    if hardware.name != name:
        raise UserError(f"{path}: name is {hardware.name!r}; the file name and the field must agree")
    return hardware
