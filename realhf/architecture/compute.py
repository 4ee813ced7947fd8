"""How a model is computed: choices that change time and memory, not the result."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Literal, NamedTuple, get_args

from realhf.base.errors import UserError
from realhf.base.options import COMPUTATION, Option

Mode = Literal["replicated", "zero1", "sharded"]
MODES: tuple[Mode, ...] = get_args(Mode)
ModeRules = tuple[tuple[str, str], ...]
OfAll = Literal["zero1", "fsdp"]
DataParallel = OfAll | ModeRules
Recomputation = Literal["off", "selective", "full"]
Reproducible = Literal["plan", "layout"]
MOST_IN_ONE_MODE = 1024  # slices of an operator, in a text


class Recomputed(NamedTuple):
    """The first `layers` of every model chunk (None: all) are recomputed as `kind` says, the others not at all."""

    kind: Recomputation = "off"
    layers: int | None = None

    def of(self, place: int) -> Recomputation:
        """The recomputation of the layer at this place within its chunk."""
        return self.kind if self.layers is None or place < self.layers else "off"

    def count(self, num_layers: int) -> int:
        """How many layers of a chunk with `num_layers` are recomputed."""
        if self.kind == "off":
            return 0
        return num_layers if self.layers is None else min(self.layers, num_layers)


@dataclass(frozen=True, kw_only=True)
class Computation:
    """How a model is computed in its home.

    Sequence parallelism and recomputation are for training alone: inference and generation keep no activations and do
    not divide tokens.

    data_parallel: the state that the ranks of a data-parallel group divide. "zero1": optimizer states (ZeRO-1); every
        rank has all parameters and gradients. "fsdp": parameters and gradients too (ZeRO-3, fully sharded data
        parallelism); a layer is gathered for its forward pass and again for its backward pass, and freed after each.
        Pairs (operators, modes): a mode for each operator (OSDP, IJCAI 2023); operators that no pair names are as with
        "zero1". The last pair that names an operator holds. `realhf.geometry.operators` lists the operators, `modes_in`
        reads the modes.
    prefetch: while one gathered part of the parameters is in use, the next one is gathered: it takes twice the memory,
        and no time of its own where computation takes longer.
    sequence_parallel: tensor-parallel ranks divide norms and residual sums along the tokens.
    recomputation: the activations that the backward pass computes again instead of keeping them. "selective": all but
        the results of matrix products and attention. "full": all but the inputs of layers.
    recomputed_layers: the number of layers that are recomputed, the first of each model chunk; the others keep all
        activations. None: all layers.
    offload_states: optimizer states and master copy lie in host memory between optimizer steps.
    reproducible: "layout": the bits of all results are the same under every layout; "plan": under every run of one.
    """

    data_parallel: DataParallel = "zero1"
    prefetch: bool = True
    sequence_parallel: bool = False
    recomputation: Recomputation = "off"
    recomputed_layers: int | None = None
    offload_states: bool = False
    reproducible: Reproducible = "plan"

    def __post_init__(self) -> None:
        _check(self)
        if self.recomputed_layers is not None and (self.recomputation == "off" or self.recomputed_layers < 0):
            raise UserError(
                f"recomputed_layers={self.recomputed_layers} with recomputation={self.recomputation!r}: it is a number "
                "of layers, 0 or more, that recomputation 'selective' or 'full' holds for; leave it out for all layers"
            )

    @property
    def recomputed(self) -> Recomputed:
        return Recomputed(self.recomputation, self.recomputed_layers)


@dataclass(frozen=True, kw_only=True)
class ComputeConfig:
    """The parts of a model's `Computation` that the user fixes. None leaves a choice to the plan, and else to the
    defaults of `Computation`. Nothing overrides a value that is given here."""

    HEADING = COMPUTATION

    data_parallel: Annotated[
        OfAll | None,
        Option("state that data-parallel ranks divide: of the optimizer, or all of it (default: as the plan says)"),
    ] = None
    prefetch: Annotated[
        bool | None, Option("gather the next part of divided parameters ahead (default: as the plan says)")
    ] = None
    sequence_parallel: Annotated[
        bool | None, Option("tensor-parallel ranks divide norms along the tokens (default: as the plan says)")
    ] = None
    recomputation: Annotated[
        Recomputation | None, Option("activations that the backward pass computes again (default: as the plan says)")
    ] = None

    def __post_init__(self) -> None:
        _check(self)


def _check(config: Computation | ComputeConfig) -> None:
    known = {"data_parallel": get_args(OfAll), "recomputation": get_args(Recomputation)}
    for field, values in known.items():
        value = getattr(config, field)
        if field == "data_parallel" and isinstance(value, tuple):
            for _, text in value:
                modes_in(text)
        elif value is not None and value not in values:
            raise UserError(f"{field}={value!r} is not known; choose one of {', '.join(values)}")


def modes_in(text: str) -> tuple[Mode, ...]:
    """The mode of each slice of an operator: `sharded` for one that is whole, `3 sharded + 1 zero1` for one in four.

    replicated: all ranks of a data-parallel group keep parameters, gradients and optimizer states. zero1: each updates
    its part of the parameters and has the states of that part alone. sharded: gradients and parameters too.

    Raises:
        UserError: that is no such text.
    """
    modes: list[Mode] = []
    for part in text.split("+"):
        count, _, mode = part.strip().rpartition(" ")
        if mode not in MODES or not (count or "1").isdecimal() or not 1 <= int(count or 1) <= MOST_IN_ONE_MODE:
            raise UserError(
                f"{text!r} is no mode of an operator; write one of {', '.join(MODES)}, or the modes of its slices, "
                f"like '4 sharded' or '3 sharded + 1 zero1', with 1 to {MOST_IN_ONE_MODE} of each"
            )
        modes += [mode] * int(count or 1)
    return tuple(modes)


def modes_text(modes: Sequence[Mode]) -> str:
    """The text of modes; `modes_in` reads it."""
    if len(modes) == 1:
        return modes[0]
    return " + ".join(f"{len(list(group))} {mode}" for mode, group in groupby(modes))
