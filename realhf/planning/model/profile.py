"""Measured layer timings: the file format and the interpolation."""

import hashlib
import math
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args

import msgspec
import platformdirs

import realhf
from realhf.architecture.compute import Reproducible
from realhf.architecture.model import DecoderConfig, DType
from realhf.base.errors import UserError
from realhf.base.files import decode_json, read_file, write_atomically
from realhf.base.numbers import BYTES, DEVICES, SECONDS, TOKENS, check_fields
from realhf.planning.model.hardware import RATES
from realhf.planning.model.uncertainty import SPREAD

FORMAT = "layer-profile/1"

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "send"]
# What was measured together, and is off together: layers, embeddings, heads and the optimizer; messages and
# collectives; calls beyond these; moves of parameters.
ProfilePart = Literal["layers", "collectives", "overheads", "reallocation"]
PARTS: tuple[ProfilePart, ...] = get_args(ProfilePart)
UNSTATED_ERROR = 0.1  # assumed of a part whose profile does not say how its readings spread


class Curve(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds at measured sizes. `sizes` are strictly increasing, at least two of them."""

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.sizes) != len(self.seconds) or len(self.sizes) < 2:
            raise ValueError("a curve needs as many seconds as sizes, and at least two of each")
        if any(a >= b for a, b in zip(self.sizes, self.sizes[1:], strict=False)) or self.sizes[0] < 0:
            raise ValueError(f"sizes={list(self.sizes)} must increase from at least 0")
        check_fields("", self, {"sizes": BYTES, "seconds": SECONDS})

    def at(self, size: float) -> float:
        """Piecewise linear between measured sizes (ReaL, section 5.1), the outer pieces extended.

        Below the smallest size this is at least its seconds for each of its tokens, and above the largest at least
        the seconds of that one: noise in the outer pieces makes nothing free.
        """
        right = min(max(bisect_right(self.sizes, size), 1), len(self.sizes) - 1)
        (x, next_x), (y, next_y) = self.sizes[right - 1 : right + 1], self.seconds[right - 1 : right + 1]
        seconds = y + (size - x) * (next_y - y) / (next_x - x)
        if size < self.sizes[0]:
            return max(seconds, self.seconds[0] * size / self.sizes[0])
        return max(seconds, self.seconds[-1]) if size > self.sizes[-1] else seconds


class DecodeTimings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One layer of a decode step with `context` tokens in every sequence's KV cache; sizes are sequences."""

    context: int
    seconds: Curve

    def __post_init__(self) -> None:
        check_fields("", self, {"context": (0, TOKENS[1])})


class TensorTimings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Compute of one rank at one degree of tensor parallelism; the sizes of the curves are tokens of one micro-batch.

    `includes_all_reduce`: the layers ran on `tp` devices, with their all-reduces. The head is everything above the last
    layer: the final norm, the projection and, forward, the gathering of the logits over tp.
    """

    tp: int
    includes_all_reduce: bool
    layer_forward: Curve
    layer_backward: Curve
    embedding_forward: Curve
    embedding_backward: Curve
    head_forward: Curve
    head_backward: Curve
    layer_decode: tuple[DecodeTimings, ...]

    def __post_init__(self) -> None:
        contexts = [decode.context for decode in self.layer_decode]
        check_fields("", self, {"tp": DEVICES})
        if not contexts or contexts != sorted(set(contexts)):
            raise ValueError("layer_decode must have increasing contexts")

    def curves(self) -> Iterator[tuple[str, Curve]]:
        """All curves, by name."""
        for name in self.__struct_fields__:
            if isinstance(value := getattr(self, name), Curve):
                yield name, value
        for decode in self.layer_decode:
            yield f"layer_decode of context {decode.context}", decode.seconds


class CollectiveTimings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One collective over `group_size` devices of one node (2 for a send); the sizes are bytes of the whole tensor. A
    profile of before all-gathers and reduce-scatters were measured has none of these."""

    kind: CollectiveKind
    group_size: int
    seconds: Curve

    def __post_init__(self) -> None:
        check_fields("", self, {"group_size": DEVICES})


class CallOverheads(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of whole calls beyond their layers, embedding, head, optimizer, reductions and single messages: packing,
    losses, statistics, the schedule.

    `train_s`: of a mini-batch. `generate_s_per_parameter`: putting the weights into the order that decoding wants.
    `message_s`: of a message between computing stages, beyond one between waiting stages. `part_s_per_parameter`: under
    reproducible="layout", taking the gradient of a part of a mini-batch and adding it to those of other parts.
    """

    forward_s: float = 0.0
    forward_micro_batch_s: float = 0.0
    train_s: float = 0.0
    train_micro_batch_s: float = 0.0
    generate_s: float = 0.0
    generate_s_per_parameter: float = 0.0
    decode_step_s: float = 0.0
    message_s: float = 0.0
    part_s_per_parameter: float = 0.0

    def __post_init__(self) -> None:
        check_fields("overheads: ", self, dict.fromkeys(self.__struct_fields__, SECONDS))


class ReallocationTimings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole model moved from one device to its neighbour, packed and unpacked: `latency_s + bytes / bandwidth`."""

    latency_s: float
    bandwidth: float

    def __post_init__(self) -> None:
        check_fields("reallocation: ", self, {"latency_s": SECONDS, "bandwidth": RATES})


class LayerProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The measurements of one model type in one dtype on one machine. `profiles/README.md` describes every field.

    `reproducible`: the kernels and exchanges that were measured are those of a run with this option. `spread`: of each
    part the standard deviation of the logarithm of repeated readings. `noisy`: curves, and their
    sizes, that were below what is possible or fell with the size even when they were measured again.
    """

    hardware: str
    model: DecoderConfig
    dtype: DType
    reproducible: Reproducible = "plan"
    sequence_length: int
    tensor: tuple[TensorTimings, ...]
    collectives: tuple[CollectiveTimings, ...]
    optimizer_s_per_parameter: float
    call_overhead_s: float
    sampling_s: float
    overheads: CallOverheads = CallOverheads()
    reallocation: ReallocationTimings | None = None
    communicator_bytes: int | None = None
    spread: dict[ProfilePart, float] = {}
    noisy: tuple[str, ...] = ()
    measured: dict[str, str | int | float] = {}
    format: str = FORMAT

    def __post_init__(self) -> None:
        degrees = [timings.tp for timings in self.tensor]
        if degrees != sorted(set(degrees)) or degrees[:1] != [1]:
            raise ValueError(f"tensor has tp={degrees}; it needs tp=1 and increasing degrees")
        seconds = dict.fromkeys(("optimizer_s_per_parameter", "call_overhead_s", "sampling_s"), SECONDS)
        check_fields("", self, {**seconds, "sequence_length": TOKENS, "communicator_bytes": BYTES, "spread": SPREAD})

    def error_of(self, part: ProfilePart) -> float:
        """How far the profile may be off in all that it says of a part: the standard error of a median of readings."""
        if part not in self.spread:
            return UNSTATED_ERROR
        readings = self.measured.get("repetitions", 1)
        return self.spread[part] * math.sqrt(math.pi / 2 / max(float(readings), 1.0))

    def collective(self, kind: CollectiveKind) -> list[CollectiveTimings]:
        """The measured group sizes of a collective, the smallest first."""
        return sorted((c for c in self.collectives if c.kind == kind), key=lambda c: c.group_size)


def interpolate(points: list[tuple[float, float]], x: float) -> float:
    """Piecewise linear through (x, y) points with increasing x, as a `Curve`; one point is a constant."""
    if len(points) == 1:
        return points[0][1]
    return Curve(*zip(*points, strict=True)).at(x)


def profiles_root() -> Path:
    """The folder of this machine's profiles: the checkout's where the working directory (of a run, of whatever plans it
    again) lies in it, else the user's."""
    checkout = Path(realhf.__file__).resolve().parent.parent
    if (checkout / "pyproject.toml").is_file() and Path.cwd().is_relative_to(checkout):
        return checkout / "profiles" / "local"
    return platformdirs.user_data_path("realhf") / "profiles"


def profile_path(
    model: DecoderConfig, dtype: DType, hardware: str, root: Path | None = None, reproducible: Reproducible = "plan"
) -> Path:
    """`ROOT/HARDWARE/HASH.json`: where the profile of a model type lies; `root` is `profiles_root()` by default."""
    key = {"model": msgspec.to_builtins(model), "dtype": dtype}
    content = msgspec.json.encode(
        key | ({} if reproducible == "plan" else {"reproducible": reproducible}), order="sorted"
    )
    return (root or profiles_root()) / hardware / f"{hashlib.sha256(content).hexdigest()[:16]}.json"


def save_profile(profile: LayerProfile, path: str | Path) -> None:
    """Writes a profile atomically, with the folders above it."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")


def load_profile(path: str | Path) -> LayerProfile:
    """Reads a profile. Raises UserError if the file is missing or no profile; the text names the field."""
    remedy = "measure it again with `realhf profile`"
    profile = read_file(path, lambda data: decode_json(data, LayerProfile), "layer profile", remedy)
    if profile.format != FORMAT:
        raise UserError(f"{path}: format {profile.format!r} is not {FORMAT!r}; {remedy}")
    for timings in profile.tensor:
        for name, curve in timings.curves():
            if min(curve.seconds) <= 0:
                size = curve.sizes[curve.seconds.index(min(curve.seconds))]
                raise UserError(
                    f"{path}: {name} at tp={timings.tp} takes 0 s at {size:g}, which noise of a busy machine made; "
                    "measure it again with `realhf profile --force`"
                )
    return profile
