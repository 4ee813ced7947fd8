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

Measurement = Literal["links", "memory", "products", "launches"]
MEASUREMENTS: tuple[Measurement, ...] = get_args(Measurement)
# Fields of the description that each measurement finds on one machine.
FOUND_BY: dict[Measurement, tuple[str, ...]] = {
    "links": ("intra_node_bandwidth", "intra_node_latency_s"),
    "memory": ("memory_bandwidth", "host_bandwidth"),
    "products": ("matmul_flops",),
    "launches": ("layer_launch_s", "train_launch_s", "decode_launch_s", "decode_graph_launch_s"),
}
LAYERS = "layers"  # the whole profile of the experiment's models
OF_MODELS = ("sampling_s", "call_overhead_s", "mini_batch_s", *PARTS)  # known from that


class MeasuredConstant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A constant's value, and the standard deviation of the logarithm of repeated readings."""

    value: float
    spread: float

    def __post_init__(self) -> None:
        check_fields("", self, {"value": (0.0, RATES[1]), "spread": SPREAD})


class MeasuredConstants(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was measured of the hardware of a name, by the names of constants; `measured`: when, and on what."""

    hardware: str
    constants: dict[str, MeasuredConstant]
    measured: dict[str, str | int | float] = {}
    format: Literal["measured-constants/1"] = "measured-constants/1"


def measurement_of(constant: str) -> Measurement | Literal["layers"] | None:
    """What `realhf profile --only` has to measure to know a constant or a part of a profile; None: one machine cannot
    (links between nodes)."""
    field, _ = place_of(constant)
    if field in OF_MODELS:
        return "layers"
    return next((name for name, fields in FOUND_BY.items() if field in fields), None)


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
        found = msgspec.structs.replace(found, constants={**load_constants(path).constants, **found.constants})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")


def with_measured(hardware: Hardware, root: Path | None = None) -> Hardware:
    """The description with what was measured of its constants on this machine, and surer of them. Raises UserError for
    a broken file."""
    path = constants_path(hardware.name, root)
    if not path.is_file():
        return hardware
    from realhf.planning.model.gaussian import narrowed  # numpy takes long to import

    found = load_constants(path).constants
    return narrowed(hardware, {name: (constant.value, constant.spread) for name, constant in found.items()})
