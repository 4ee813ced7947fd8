"""Elements of a model's parts, and of those that a device holds under a strategy."""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from realhf.architecture.model import DecoderConfig
from realhf.geometry.layout import ParallelStrategy, stage_layers
from realhf.geometry.operators import kind_of, operators
from realhf.geometry.parameters import decoder_parameters


@dataclass(frozen=True)
class ModelSizes:
    """Elements of a model's parts; "sharded" parameters are divided over tp, the others are on every rank."""

    num_layers: int
    layer_sharded: int
    layer_replicated: int
    embedding_sharded: int
    embedding_replicated: int
    head_sharded: int
    head_replicated: int
    tied: bool

    @property
    def total(self) -> int:
        """Elements of the model, of tied embeddings once."""
        layers = self.num_layers * (self.layer_sharded + self.layer_replicated)
        embedding, head = self.embedding_sharded + self.embedding_replicated, self.head_sharded + self.head_replicated
        return layers + embedding + head

    def on_stage(self, tp: int, pp: int, stage: int) -> int:
        """Elements on one tensor-parallel rank of a pipeline stage; model chunks make no difference."""
        layers = len(stage_layers(self.num_layers, pp, stage))
        total = layers * (self.layer_sharded // tp + self.layer_replicated)
        if stage == 0 or (self.tied and stage == pp - 1):
            total += self.embedding_sharded // tp
        if stage == 0:
            total += self.embedding_replicated  # learned positions, which are never tied
        if stage == pp - 1:
            total += self.head_sharded // tp + self.head_replicated
        return total

    def largest(self, strategy: ParallelStrategy) -> int:
        """Elements on the device that holds the most: no stage has more layers than the first."""
        return max(self.on_stage(strategy.tp, strategy.pp, stage) for stage in (0, strategy.pp - 1))


@lru_cache(maxsize=64)
def model_sizes(model: DecoderConfig) -> ModelSizes:
    """The sizes, summed over the model's parameters (all layers are alike)."""
    sums: Counter[tuple[str, bool]] = Counter()
    for spec in decoder_parameters(model):
        sums[spec.place, spec.shard_dim is not None] += spec.size
    return ModelSizes(
        num_layers=model.num_layers,
        layer_sharded=sums["layer", True] // model.num_layers,
        layer_replicated=sums["layer", False] // model.num_layers,
        embedding_sharded=sums["embedding", True],
        embedding_replicated=sums["embedding", False],
        head_sharded=sums["head", True],
        head_replicated=sums["head", False],
        tied=any(spec.tied for spec in decoder_parameters(model)),
    )


@lru_cache(maxsize=1024)
def linear_elements(model: DecoderConfig, strategy: ParallelStrategy) -> int:
    """Weights of the linears on the device that holds the most: of the layers, and of a head that is not tied."""
    tp, pp = strategy.tp, strategy.pp
    linears = [s for s in decoder_parameters(model) if s.place != "embedding" and len(s.shape) == 2]

    def on_stage(stage: int) -> int:
        layers = stage_layers(model.num_layers, pp, stage)
        here = (spec for spec in linears if spec.is_on_stage(layers, stage, pp))
        return sum(spec.size if spec.shard_dim is None else spec.size // tp for spec in here)

    return max(on_stage(0), on_stage(pp - 1))


@lru_cache(maxsize=64)
def largest_weight(model: DecoderConfig, tp: int) -> int:
    """Elements of the largest weight of a layer on a tensor-parallel rank."""
    weights = [spec for spec in decoder_parameters(model) if spec.place == "layer"]
    return max(spec.size if spec.shard_dim is None else spec.size // tp for spec in weights)


@lru_cache(maxsize=64)
def operator_parts(model: DecoderConfig) -> dict[str, float]:
    """By kind of a layer's operator its part of the parameters that a token goes through."""
    active: Counter[str] = Counter()
    for name, specs in operators(model).items():
        kind = kind_of(name)
        if name.startswith("layers."):
            routed = model.experts.per_token / model.experts.count if kind == "experts" else 1.0
            active[kind] += sum(spec.size for spec in specs) * routed  # type: ignore[assignment]
    return {kind: elements / active.total() for kind, elements in active.items()}


def largest_units(model: DecoderConfig, tp: int) -> tuple[int, int]:
    """Elements of the two largest units that are gathered together: a layer, an embedding or the head."""
    sizes = model_sizes(model)
    layer = sizes.layer_sharded // tp + sizes.layer_replicated
    embedding = sizes.embedding_sharded // tp + sizes.embedding_replicated
    head = sizes.head_sharded // tp + sizes.head_replicated
    first, second = sorted((layer, layer, embedding, head), reverse=True)[:2]
    return first, second
