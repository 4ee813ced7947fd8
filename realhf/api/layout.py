"""Where a call runs: a device mesh, and how a model is divided over it."""

from dataclasses import dataclass

from realhf.api.errors import UserError
from realhf.api.model import DecoderConfig


@dataclass(frozen=True, order=True)
class DeviceMesh:
    """`size` consecutive devices from global device index `first` (ReaL, section 3)."""

    first: int
    size: int

    @property
    def devices(self) -> range:
        return range(self.first, self.first + self.size)

    def overlaps(self, other: "DeviceMesh") -> bool:
        return self.first < other.first + other.size and other.first < self.first + self.size


@dataclass(frozen=True, order=True)
class ParallelStrategy:
    """Degrees of data, tensor and pipeline parallelism; their product is the mesh size.

    With `chunks` above 1 the pipeline is interleaved: each stage holds so many model chunks, runs of layers that are
    pp runs apart (Narayanan et al., 2021, section 2.2).
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    chunks: int = 1

    @property
    def size(self) -> int:
        return self.dp * self.tp * self.pp

    def __str__(self) -> str:
        return f"dp{self.dp} tp{self.tp} pp{self.pp}" + (f" chunks{self.chunks}" if self.chunks > 1 else "")


@dataclass(frozen=True, order=True)
class Layout:
    """A model divided by `strategy` over `mesh`.

    Rank r of the mesh (device `mesh.first + r`) has tensor index r % tp, data index
    r // tp % dp and pipeline stage r // (tp * dp): tensor-parallel peers are neighbours, stages
    are farthest apart, so that stages rather than tensor groups cross nodes.
    """

    mesh: DeviceMesh
    strategy: ParallelStrategy

    def device(self, dp: int, tp: int, pp: int) -> int:
        """Global device index at the given coordinates."""
        return self.mesh.first + (pp * self.strategy.dp + dp) * self.strategy.tp + tp

    def coordinates(self, device: int) -> tuple[int, int, int]:
        """(dp, tp, pp) index of a global device that lies in the mesh."""
        rank = device - self.mesh.first
        if not 0 <= rank < self.mesh.size:
            raise ValueError(f"device {device} is not in {self.mesh}")
        s = self.strategy
        return rank // s.tp % s.dp, rank % s.tp, rank // (s.tp * s.dp)

    def tensor_group(self, dp: int, pp: int) -> list[int]:
        return [self.device(dp, tp, pp) for tp in range(self.strategy.tp)]

    def data_group(self, tp: int, pp: int) -> list[int]:
        return [self.device(dp, tp, pp) for dp in range(self.strategy.dp)]

    def pipeline_group(self, dp: int, tp: int) -> list[int]:
        return [self.device(dp, tp, pp) for pp in range(self.strategy.pp)]

    def output_device(self, dp: int) -> int:
        """The one device of a data-parallel group that holds the outputs of its samples."""
        return self.device(dp, 0, self.strategy.pp - 1)

    def __str__(self) -> str:
        return f"{self.strategy} on devices {self.mesh.first}-{self.mesh.first + self.mesh.size - 1}"


def stage_layers(num_layers: int, pp: int, stage: int) -> range:
    """The layers of a pipeline stage without chunks: contiguous, the earlier stages take the remainder."""
    base, extra = divmod(num_layers, pp)
    first = stage * base + min(stage, extra)
    return range(first, first + base + (stage < extra))


def chunk_layers(num_layers: int, strategy: ParallelStrategy, stage: int) -> tuple[range, ...]:
    """The layers of each model chunk of a pipeline stage.

    Chunk c of stage s is stage c * pp + s of a pipeline with chunks times as many. A stage has as many layers in all
    as it would have without chunks.
    """
    virtual = strategy.pp * strategy.chunks
    return tuple(stage_layers(num_layers, virtual, first + stage) for first in range(0, virtual, strategy.pp))


def held_layers(num_layers: int, strategy: ParallelStrategy, stage: int) -> set[int]:
    """The layers of all chunks of a pipeline stage."""
    return {layer for chunk in chunk_layers(num_layers, strategy, stage) for layer in chunk}


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def check_strategy(call: str, model: DecoderConfig, strategy: ParallelStrategy) -> None:
    """Raises UserError when `model` cannot be divided by `strategy`."""
    tp, pp = strategy.tp, strategy.pp
    for name in ("num_heads", "num_kv_heads", "intermediate_size", "vocab_size"):
        count = getattr(model, name)
        if count % tp:
            legal = [
                t for t in divisors(model.num_kv_heads) if model.intermediate_size % t == model.vocab_size % t == 0
            ]
            raise UserError(
                f"{call}: tp={tp} does not divide {name}={count}; choose tp from {', '.join(map(str, legal))}"
            )
    if pp > model.num_layers:
        raise UserError(
            f"{call}: pp={pp} needs at least one layer a stage but the model has num_layers={model.num_layers}; "
            f"choose pp of at most {model.num_layers}"
        )
    if strategy.chunks > 1 and not 1 < pp <= model.num_layers // strategy.chunks:
        legal = [c for c in range(1, model.num_layers // pp + 1) if pp > 1 or c == 1]
        raise UserError(
            f"{call}: chunks={strategy.chunks} needs more than one stage and a layer for each chunk, but pp={pp} and "
            f"num_layers={model.num_layers}; choose chunks from {', '.join(map(str, legal))}"
        )
