"""Where a call runs: a device mesh, and how a model is divided over it. A search makes and compares ten thousands of
these, which is why they are structs."""

from functools import lru_cache

import msgspec

from realhf.architecture.model import DecoderConfig
from realhf.architecture.transformers_config import TransformersConfig
from realhf.base.errors import UserError


class DeviceMesh(msgspec.Struct, frozen=True, order=True, cache_hash=True):
    """`size` consecutive devices from global device index `first` (ReaL, section 3)."""

    first: int
    size: int

    @property
    def devices(self) -> range:
        return range(self.first, self.first + self.size)

    @property
    def text(self) -> str:
        """For tables: `3`, or `0-7`."""
        return str(self.first) if self.size == 1 else f"{self.first}-{self.first + self.size - 1}"

    def overlaps(self, other: "DeviceMesh") -> bool:
        return self.first < other.first + other.size and other.first < self.first + self.size


class ParallelStrategy(msgspec.Struct, frozen=True, order=True, cache_hash=True):
    """Degrees of data, tensor and pipeline parallelism; their product is the mesh size.

    chunks: above 1 the pipeline is interleaved. Each stage holds that many model chunks; the layers of a chunk are
        consecutive, and the chunks of a stage lie pp chunks apart (Narayanan et al., 2021, section 2.2).
    micro_dp: (a, b) orders the ranks for devices where the model trains with a times the tp and b times the pp. Each
        micro data-parallel group of a x b ranks lies together in the layout of that training (HybridFlow, section 5.3),
        so every device's part of the model contains its part in training (`realhf.geometry.micro_dp`).
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    chunks: int = 1
    micro_dp: tuple[int, int] = (1, 1)

    @property
    def size(self) -> int:
        return self.dp * self.tp * self.pp

    def __str__(self) -> str:
        chunks = f" chunks{self.chunks}" if self.chunks > 1 else ""
        micro_dp = "" if self.micro_dp == (1, 1) else " micro-dp{}x{}".format(*self.micro_dp)
        return f"dp{self.dp} tp{self.tp} pp{self.pp}{chunks}{micro_dp}"


class Layout(msgspec.Struct, frozen=True, order=True, cache_hash=True):
    """A model divided by `strategy` over `mesh`.

    Rank r of the mesh (device `mesh.first + r`) has tensor index r % tp, data index r // tp % dp and pipeline stage
    r // (tp * dp). Tensor-parallel peers are neighbours and stages are farthest apart, so stages rather than tensor
    groups cross nodes. With `micro_dp` = (a, b) tensor-parallel peers are a ranks apart. The devices of every group
    ascend with their index in the group.
    """

    mesh: DeviceMesh
    strategy: ParallelStrategy

    def device(self, dp: int, tp: int, pp: int) -> int:
        """Global device index at the given coordinates."""
        s, (tp_interval, pp_interval) = self.strategy, self.strategy.micro_dp
        replicas = s.dp // pp_interval  # data-parallel ranks within one stage of the training layout
        stage = pp * pp_interval + dp // replicas
        replica, place = divmod(dp % replicas, tp_interval)
        return self.mesh.first + ((stage * (replicas // tp_interval) + replica) * s.tp + tp) * tp_interval + place

    def coordinates(self, device: int) -> tuple[int, int, int]:
        """(dp, tp, pp) index of a global device that lies in the mesh."""
        rank = device - self.mesh.first
        if not 0 <= rank < self.mesh.size:
            raise ValueError(f"device {device} is not in {self.mesh}")
        s, (tp_interval, pp_interval) = self.strategy, self.strategy.micro_dp
        replicas = s.dp // pp_interval
        rank, place = divmod(rank, tp_interval)
        rank, tp = divmod(rank, s.tp)
        stage, replica = divmod(rank, replicas // tp_interval)
        return stage % pp_interval * replicas + replica * tp_interval + place, tp, stage // pp_interval

    def tensor_group(self, dp: int, pp: int) -> list[int]:
        return [self.device(dp, tp, pp) for tp in range(self.strategy.tp)]

    def data_group(self, tp: int, pp: int) -> list[int]:
        return [self.device(dp, tp, pp) for dp in range(self.strategy.dp)]

    def pipeline_group(self, dp: int, tp: int) -> list[int]:
        return [self.device(dp, tp, pp) for pp in range(self.strategy.pp)]

    def output_device(self, dp: int) -> int:
        """The device that holds the outputs of the samples of data index `dp`."""
        return self.device(dp, 0, self.strategy.pp - 1)

    def __str__(self) -> str:
        return f"{self.strategy} on devices {self.mesh.first}-{self.mesh.first + self.mesh.size - 1}"


def stage_layers(num_layers: int, pp: int, stage: int) -> range:
    """The layers of a pipeline stage without chunks: consecutive ones; earlier stages take the remainder."""
    base, extra = divmod(num_layers, pp)
    first = stage * base + min(stage, extra)
    return range(first, first + base + (stage < extra))


def chunk_layers(num_layers: int, strategy: ParallelStrategy, stage: int) -> tuple[range, ...]:
    """The layers of each model chunk of a pipeline stage.

    Chunk c of stage s is stage c * pp + s of a pipeline of pp * chunks stages. A stage has as many layers in all as it
    has without chunks.
    """
    virtual = strategy.pp * strategy.chunks
    return tuple(stage_layers(num_layers, virtual, first + stage) for first in range(0, virtual, strategy.pp))


@lru_cache(maxsize=65536)
def held_layers(num_layers: int, strategy: ParallelStrategy, stage: int) -> frozenset[int]:
    """The layers of all chunks of a pipeline stage."""
    return frozenset(layer for chunk in chunk_layers(num_layers, strategy, stage) for layer in chunk)


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def undivided(model: DecoderConfig, tp: int) -> str:
    """The first size of the model that `tp` does not divide, such as "num_heads=9"; "" where it divides all."""
    sizes = {name: getattr(model, name) for name in ("num_heads", "num_kv_heads", "intermediate_size", "vocab_size")}
    return next((f"{name}={size}" for name, size in sizes.items() if size % tp), "")


def check_strategy(call: str, model: DecoderConfig, strategy: ParallelStrategy) -> None:
    """Raises UserError when `model` cannot be divided by `strategy`."""
    tp, pp = strategy.tp, strategy.pp
    if isinstance(model, TransformersConfig) and (tp, pp) != (1, 1):
        raise UserError(
            f"{call}: tp={tp} pp={pp}, but transformers computes the model, which is divided over data parallelism "
            "alone; choose tp=1 and pp=1"
        )
    if unfit := undivided(model, tp):
        legal = [degree for degree in divisors(model.num_kv_heads) if not undivided(model, degree)]
        raise UserError(f"{call}: tp={tp} does not divide {unfit}; choose tp from {', '.join(map(str, legal))}")
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
    size = strategy.micro_dp[0] * strategy.micro_dp[1]
    if min(strategy.micro_dp) < 1 or strategy.dp % size or (strategy.chunks > 1 < size):
        raise UserError(
            f"{call}: micro_dp={list(strategy.micro_dp)} must be two numbers from 1 on whose product divides "
            f"dp={strategy.dp}, in a layout without chunks; leave it out, or see docs/plans.md"
        )
