"""Constants of a description that were measured on a machine by themselves (`realhf profile --only`), kept beside its
profiles."""

from pathlib import Path
from typing import Literal, get_args

import msgspec

from realhf.base.files import decode_json, read_file, write_atomically
from realhf.base.numbers import check_fields
from realhf.planning.model.hardware import RATES, Hardware
from realhf.planning.model.profile import PARTS, profiles_root
from realhf.planning.model.uncertainty import SPREAD, place_of

CONSTANTS_FILE = "constants.json"  # in the folder of the hardware's profiles

Measurement = Literal["links", "memory", "products", "launches", "network"]
MEASUREMENTS: tuple[Measurement, ...] = get_args(Measurement)
# Fields of the description that each measurement finds: on one machine, but for NETWORK.
FOUND_BY: dict[Measurement, tuple[str, ...]] = {
    "links": ("intra_node_bandwidth", "intra_node_latency_s"),
    "memory": ("memory_bandwidth", "host_bandwidth"),
    "products": ("matmul_flops",),
    "launches": ("layer_launch_s", "train_launch_s", "decode_launch_s", "decode_graph_launch_s"),
    "network": ("inter_node_bandwidth", "inter_node_send_bandwidth", "inter_node_latency_s"),
}
NETWORK: Measurement = "network"  # needs two nodes
SHARED = "inter_node_shared_bandwidth"  # found as what each device has of it
_LEAST_VALUE = 1e-12  # 0 has no logarithm
LAYERS = "layers"  # the whole profile of the experiment's models
OF_MODELS = ("sampling_s", "call_overhead_s", "mini_batch_s", *PARTS)  # known from that


class MeasuredConstant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A constant's value, and the standard deviation of the logarithm of repeated readings."""

    value: float
    spread: float

    def __post_init__(self) -> None:
        check_fields("", self, {"value": (_LEAST_VALUE, RATES[1]), "spread": SPREAD})


class MeasuredConstants(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The measured constants of the hardware of a name.

    `measured`: when, and on what, the last time; under NETWORK the date and the nodes of the links between nodes.
    """

    hardware: str
    constants: dict[str, MeasuredConstant]
    measured: dict[str, str | int | float] = {}
    format: Literal["measured-constants/1"] = "measured-constants/1"


def measurement_of(constant: str) -> Measurement | Literal["layers"]:
    """The word for `realhf profile --only` that measures a constant or a part of a profile."""
    field, _ = place_of(constant)
    if field in OF_MODELS:
        return "layers"
    if field == SHARED:
        return NETWORK
    return next(name for name, fields in FOUND_BY.items() if field in fields)


def constants_path(hardware: str, root: Path | None = None) -> Path:
    """Where the measured constants of a hardware lie; `root` is `profiles_root()` by default."""
    return (root or profiles_root()) / hardware / CONSTANTS_FILE


def load_constants(path: Path) -> MeasuredConstants:
    """Reads measured constants. Raises UserError if the file is missing or another; the text names the field."""
    remedy = "measure them again with `realhf profile --only ... --force`, or remove the file"
    return read_file(path, lambda data: decode_json(data, MeasuredConstants), "file of measured constants", remedy)


def save_constants(found: MeasuredConstants, path: Path) -> None:
    """Writes constants atomically; others that the file has stay in it."""
    if path.is_file():
        before = load_constants(path)
        found = msgspec.structs.replace(
            found,
            constants={**before.constants, **found.constants},
            measured={**before.measured, **found.measured},
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")


def with_measured(hardware: Hardware, root: Path | None = None) -> Hardware:
    """The description with what was measured of its constants, and surer of them. Raises UserError for a broken file.

    What a description says of a device counts beside the measurement. Of the network between the nodes of a cluster it
    knows nothing: what was measured there takes its place.
    """
    path = constants_path(hardware.name, root)
    if not path.is_file():
        return hardware
    from realhf.planning.model.gaussian import narrowed  # numpy takes long to import

    found = load_constants(path).constants
    values = {name: (one.value, one.spread) for name, one in found.items() if name not in FOUND_BY[NETWORK]}
    hardware = narrowed(hardware, values)
    between = {name: one for name, one in found.items() if name in FOUND_BY[NETWORK]}
    rates = [one for name, one in between.items() if name.endswith("_bandwidth")]
    if rates and hardware.inter_node_shared_bandwidth is not None:  # each was measured while all devices had their part
        most = max(rates, key=lambda one: one.value)
        between[SHARED] = MeasuredConstant(value=hardware.devices_per_node * most.value, spread=most.spread)
    stated = hardware.sureness
    spread = {name: between[name].spread if name in between else of for name, of in stated.spread.items()}
    hardware = hardware.with_constants({name: one.value for name, one in between.items()})
    return msgspec.structs.replace(hardware, uncertainty=msgspec.structs.replace(stated, spread=spread))


def network_text(hardware: Hardware, root: Path | None = None) -> str:
    """`links between nodes: 21.4 GB/s a device, 18 us; measured 2026-11-24 between node1, node2`, as plans take them;
    "" where they were not measured. Raises UserError for a broken file."""
    path = constants_path(hardware.name, root)
    source = load_constants(path).measured.get(NETWORK) if path.is_file() else None
    if source is None:
        return ""
    taken = with_measured(hardware, root)
    rate, delay = taken.inter_node_bandwidth / 1e9, taken.inter_node_latency_s * 1e6
    return f"links between nodes: {rate:.3g} GB/s a device, {delay:.3g} us; measured {source}"
