"""What the devices of a model keep and gather where operators have modes of their own, in numbers: of every pipeline
stage the elements that `realhf.geometry.shards.units` has as tensors."""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

from realhf.architecture.compute import Mode, ModeRules
from realhf.architecture.model import DecoderConfig
from realhf.geometry.layout import ParallelStrategy, held_layers
from realhf.geometry.operators import EMBEDDING, HEAD, cut_dim, kind_of, operators, slice_modes
from realhf.geometry.shards import FlatLayout

Shapes = tuple[tuple[int, ...], ...]  # shapes of an operator's tensors on a device
Modes = tuple[Mode, ...]  # modes of an operator's slices
SMALLEST_SLICED_BYTES = 2**20  # smaller operators stay whole: slicing them only adds latency


class Piece(NamedTuple):
    """An operator or a slice of one, where a forward pass uses it: its layer (-1: in none), its kind, its part of the
    operator, and the whole elements that are gathered for it (0: none)."""

    layer: int
    kind: str
    part: float
    gathered: int


@dataclass(frozen=True)
class StageUnits:
    """A device of one pipeline stage. Elements, with their padding.

    replicated, zero1: of all that is in these modes; a device keeps the parameters and gradients of both.
    gathered: of the sharded units, whole, in the order of their use.
    pieces: all that the stage computes with, in that order; a tied embedding at both of its places.
    """

    dp: int
    replicated: int
    zero1: int
    gathered: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @cached_property
    def sharded(self) -> int:
        """Elements of the sharded tensors, before sharding."""
        return sum(self.gathered)

    @property
    def kept(self) -> int:
        """Elements whose parameters and gradients a device keeps."""
        return self.replicated + self.zero1 + self.sharded // self.dp

    @property
    def updated(self) -> int:
        """Elements whose optimizer states a device has."""
        return self.replicated + (self.zero1 + self.sharded) // self.dp

    @cached_property
    def in_use(self) -> tuple[int, int]:
        """Elements of the largest unit, and of the two largest that follow one another: where layers are computed
        again, the first unit of one is followed by that of the layer before."""
        order = [piece for piece in self.pieces if piece.gathered]
        of_layers = {piece.layer: piece for piece in reversed(order) if piece.layer >= 0}
        firsts = list(of_layers.values())
        pairs = [(a.gathered, b.gathered) for each in (order, firsts) for a, b in pairwise(each)]
        largest = max((piece.gathered for piece in order), default=0)
        return largest, max(map(sum, pairs), default=largest)


def by_stage(model: DecoderConfig, strategy: ParallelStrategy, rules: ModeRules) -> tuple[StageUnits, ...]:
    """The devices of every stage.

    Raises:
        UserError: the modes are not for this model.
    """
    return tuple(stage_units(model, strategy, stage, rules) for stage in range(strategy.pp))


@lru_cache(maxsize=4096)
def stage_units(model: DecoderConfig, strategy: ParallelStrategy, stage: int, rules: ModeRules) -> StageUnits:
    """A device of one stage. Raises UserError as `by_stage`."""
    modes, dp = slice_modes(model, rules), strategy.dp
    always: Counter[Mode] = Counter()
    gathered: list[int] = []
    pieces: list[Piece] = []
    for name, shapes in operators_on(model, strategy, stage).items():
        kind, of_slices = kind_of(name), modes[name]
        layer = int(name.split(".")[1]) if name.startswith("layers.") else -1
        for mode, elements in zip(of_slices, slice_elements(shapes, of_slices, dp, cut_dim(kind)), strict=True):
            if mode == "sharded":
                gathered.append(elements)
            else:
                always[mode] += elements
            pieces.append(Piece(layer, kind, 1 / len(of_slices), elements if mode == "sharded" else 0))
    # A tied embedding comes last on the last stage, and first on the first one alone.
    used = [piece for piece in pieces if stage == 0 or piece.kind != EMBEDDING]
    is_tied = model.tied_embeddings and stage == strategy.pp - 1
    tied = [Piece(-1, HEAD, 1.0, piece.gathered) for piece in pieces if is_tied and piece.kind == EMBEDDING]
    return StageUnits(
        dp=dp,
        replicated=vector_elements(always["replicated"], dp),
        zero1=vector_elements(always["zero1"], dp),
        gathered=tuple(gathered),
        pieces=(*used, *tied),
    )


@lru_cache(maxsize=1024)
def operators_on(model: DecoderConfig, strategy: ParallelStrategy, stage: int) -> dict[str, Shapes]:
    """The operators of a stage in the order of the forward pass, with the shapes of their tensors on a device."""
    layers, found = held_layers(model.num_layers, strategy, stage), dict[str, Shapes]()
    for name, specs in operators(model).items():
        here = tuple(
            tuple(extent // strategy.tp if dim == spec.shard_dim else extent for dim, extent in enumerate(spec.shape))
            for spec in specs
            if spec.is_on_stage(layers, stage, strategy.pp)
        )
        if here:
            found[name] = here
    return found


@lru_cache(maxsize=65536)
def slice_elements(shapes: Shapes, modes: Modes, dp: int, dim: int) -> tuple[int, ...]:
    """Elements of every slice of an operator, cut along `dim`: of a sharded one as the vector of its own that it is, of
    others as a part of the vector of their mode."""
    pieces = [shapes]
    if len(modes) > 1:
        [shape] = shapes
        ends = [shape[dim] * number // len(modes) for number in range(len(modes) + 1)]
        pieces = [((last - first, shape[1 - dim]),) for first, last in pairwise(ends)]
    return tuple(
        FlatLayout(dict(zip(map(str, range(len(piece))), piece, strict=True)), dp if mode == "sharded" else 1).size
        for mode, piece in zip(modes, pieces, strict=True)
    )


@lru_cache(maxsize=65536)
def vector_elements(elements: int, dp: int) -> int:
    """Of a vector that holds tensors of so many elements, their padding included, and is divided over dp."""
    return FlatLayout({"": (elements,)}, dp).size
