"""Bytes on a device: what stays there and what a call needs while it runs."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from realhf.architecture.model import DecoderConfig, DType
from realhf.dataflow.graph import GENERATE, TRAIN_STEP, ModelFunctionCallDef
from realhf.geometry.layout import ParallelStrategy, chunk_layers, stage_layers
from realhf.geometry.parameters import decoder_parameters
from realhf.geometry.pipeline_schedule import training_order
from realhf.planning.model.activations import activation_elements, backward_bytes, kept_bytes
from realhf.planning.model.descriptions import DTYPE_BYTES
from realhf.planning.model.features import ENGINE, EngineFeatures
from realhf.planning.model.timings import kv_bytes_per_token_layer
from realhf.planning.options import Option, mini_batch_size
from realhf.planning.workload import Workload
from realhf.realloc.plan.planner import DEFAULT_BUCKET_BYTES

# Of a worker on a CPU, beside tensors. Measured: 12 MiB that torch and oneDNN take when they first compute, and 4 MiB
# that it shares with the workers of its tensor-parallel group.
WORKER_BYTES = 16 << 20
HOLES = 1 / 8  # of what malloc gave; measured 4 to 9 %
OFFLOADED_CHUNK = 2**26  # elements, as in realhf/engine/train/optimizer.py


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
        return (
            self.num_layers * (self.layer_sharded + self.layer_replicated)
            + self.embedding_sharded + self.embedding_replicated + self.head_sharded + self.head_replicated
        )  # fmt: skip

    def on_stage(self, tp: int, pp: int, stage: int) -> int:
        """Elements on one tensor-parallel rank of a pipeline stage; model chunks make no difference."""
        layers = len(stage_layers(self.num_layers, pp, stage))
        total = layers * (self.layer_sharded // tp + self.layer_replicated)
        if stage == 0 or (self.tied and stage == pp - 1):
            total += self.embedding_sharded // tp
        if stage == 0:
            total += self.embedding_replicated  # of learned positions, which are never tied
        if stage == pp - 1:
            total += self.head_sharded // tp + self.head_replicated
        return total

    def largest(self, strategy: ParallelStrategy) -> int:
        """Elements on the device that holds the most: no stage has more layers than the first."""
        return max(self.on_stage(strategy.tp, strategy.pp, stage) for stage in (0, strategy.pp - 1))


@lru_cache(maxsize=64)
def model_sizes(model: DecoderConfig) -> ModelSizes:
    """The sizes, summed over the model's parameters (all layers are alike)."""
    sums = {(place, sharded): 0 for place in ("embedding", "layer", "head") for sharded in (True, False)}
    tied = False
    for spec in decoder_parameters(model):
        sums[spec.place, spec.shard_dim is not None] += spec.size
        tied = tied or spec.tied
    return ModelSizes(
        num_layers=model.num_layers,
        layer_sharded=sums["layer", True] // model.num_layers,
        layer_replicated=sums["layer", False] // model.num_layers,
        embedding_sharded=sums["embedding", True],
        embedding_replicated=sums["embedding", False],
        head_sharded=sums["head", True],
        head_replicated=sums["head", False],
        tied=tied,
    )


def parameter_bytes(model: DecoderConfig, strategy: ParallelStrategy, dtype: DType) -> int:
    """Parameters on the device that holds the most of them."""
    return model_sizes(model).largest(strategy) * DTYPE_BYTES[dtype]


def copy_bytes(model: DecoderConfig, strategy: ParallelStrategy, dtype: DType) -> int:
    """A reallocated copy of the parameters, and the two buckets that fill it: one to send, one to receive."""
    return parameter_bytes(model, strategy, dtype) + 2 * DEFAULT_BUCKET_BYTES


def static_bytes(
    model: DecoderConfig,
    strategy: ParallelStrategy,
    dtype: DType,
    *,
    trained: bool,
    features: EngineFeatures = ENGINE,
    versions: int = 1,
) -> int:
    """What the home of a model keeps on each device.

    Parameters, in so many `versions` where it is not trained; for a trained model also gradients and the two states of
    AdamW (at least in fp32), and below fp32 a master copy in fp32 (ReaL, section 5.1, "static memory"). All are on
    every rank of a data-parallel group, but with ZeRO-1 states and master copy are divided over it (16 or 4 + 12 / dp
    bytes a parameter in bf16, 2 more with gradients in fp32; ZeRO, section 5.1), and fully sharded all of it is. States
    that wait in host memory count nothing. On a CPU a run that saves on its way has a copy of what this device writes:
    its part of parameters and states, which the ranks of a data-parallel group divide.
    """
    item = DTYPE_BYTES[dtype]
    elements = model_sizes(model).largest(strategy)
    if features.fully_sharded:
        elements = math.ceil(elements / strategy.dp)
    if not trained:
        return versions * elements * item
    optimizer = 0 if features.offloads_states else features.state_bytes(dtype)
    is_divided = features.zero1 and not features.fully_sharded
    updated = math.ceil(elements / strategy.dp) if is_divided else elements
    written = elements if features.fully_sharded else math.ceil(elements / strategy.dp)
    copied = written * (item + features.state_bytes(dtype)) if features.copies_checkpoints else 0
    return elements * (item + features.gradient_bytes(dtype)) + updated * optimizer + copied


def offloaded_bytes(
    model: DecoderConfig,
    strategy: ParallelStrategy,
    dtype: DType,
    *,
    trained: bool,
    features: EngineFeatures = ENGINE,
    versions: int = 1,
) -> int:
    """What goes from a device to host memory and back: `static_bytes` but for gradients, which are not kept."""
    features = replace(features, copies_checkpoints=False)
    kept = static_bytes(model, strategy, dtype, trained=trained, features=features, versions=versions)
    if not trained:
        return kept
    elements = model_sizes(model).largest(strategy)
    if features.fully_sharded:
        elements = math.ceil(elements / strategy.dp)
    return kept - elements * features.gradient_bytes(dtype)


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


def packed_bytes(
    model: DecoderConfig, strategy: ParallelStrategy, dtype: DType, features: EngineFeatures = ENGINE
) -> int:
    """The second copy of the linears' weights while a call generates (`realhf.engine.generate.loop.packed_weights`)."""
    if not features.packs_weights or dtype == "float64":
        return 0
    return linear_elements(model, strategy) * DTYPE_BYTES[dtype]


def cache_bytes(
    model: DecoderConfig, strategy: ParallelStrategy, dtype: DType, tokens: int, features: EngineFeatures = ENGINE
) -> float:
    """Keys and values of a sequence, in whole pages, on the first stage: no other has more layers."""
    layers, page = len(stage_layers(model.num_layers, strategy.pp, 0)), features.page_tokens(model, dtype)
    kept = math.ceil(tokens / page) * page
    return kv_bytes_per_token_layer(model, dtype) / strategy.tp * layers * kept


def chunk_bytes(model: DecoderConfig, strategy: ParallelStrategy, dtype: DType, features: EngineFeatures) -> int:
    """What an optimizer step has on the device of states that wait in host memory."""
    if not features.offloads_states:
        return 0
    is_divided = features.zero1 or features.fully_sharded
    updated = math.ceil(model_sizes(model).largest(strategy) / (strategy.dp if is_divided else 1))
    return min(updated, OFFLOADED_CHUNK) * features.state_bytes(dtype)


def gathered_for_call(
    call: ModelFunctionCallDef, strategy: ParallelStrategy, dtype: DType, features: EngineFeatures
) -> int:
    """Parameters that a call other than a training gathers where it finds them fully sharded, at its model's home: all
    of the device's stage to generate, two units at a time for an inference."""
    if not features.fully_sharded or strategy.dp == 1 or call.trains:
        return 0
    if call.interface_type is GENERATE:
        return parameter_bytes(call.config, strategy, dtype)
    return sum(_largest_units(call.config, strategy.tp)) * DTYPE_BYTES[dtype]


def gathered_bytes(model: DecoderConfig, strategy: ParallelStrategy, dtype: DType, features: EngineFeatures) -> int:
    """What fully sharded training has of whole units at a time: the parameters of two, and the gradients of one, as
    the backward pass gives them and as one vector to reduce."""
    if not features.fully_sharded or strategy.dp == 1:
        return 0
    first, second = _largest_units(model, strategy.tp)
    return (first + second) * DTYPE_BYTES[dtype] + 2 * first * features.gradient_bytes(dtype)


def _largest_units(model: DecoderConfig, tp: int) -> tuple[int, int]:
    """Elements of the two largest units that are gathered together: a layer, an embedding or the head."""
    sizes = model_sizes(model)
    layer = sizes.layer_sharded // tp + sizes.layer_replicated
    embedding = sizes.embedding_sharded // tp + sizes.embedding_replicated
    head = sizes.head_sharded // tp + sizes.head_replicated
    first, second = sorted((layer, layer, embedding, head), reverse=True)[:2]
    return first, second


def logits_bytes_per_token(model: DecoderConfig, dtype: DType, tp: int, features: EngineFeatures = ENGINE) -> float:
    """One array of logits a token, fp32 at least: the whole vocabulary, or 1 / tp of it. A value is one number."""
    item = max(DTYPE_BYTES[dtype], 4)
    if model.head == "scalar":
        return item
    return model.vocab_size / (1 if features.full_logits else tp) * item


def logits_bytes(
    tokens: float, model: DecoderConfig, dtype: DType, tp: int, features: EngineFeatures = ENGINE
) -> float:
    """One array of the logits of `tokens` tokens, as far as they exist at once."""
    size_bytes = tokens * logits_bytes_per_token(model, dtype, tp, features)
    chunk = None if features.full_logits or model.head == "scalar" else features.logits_chunk_bytes
    return size_bytes if chunk is None else min(size_bytes, chunk)


def dynamic_bytes(
    call: ModelFunctionCallDef,
    option: Option,
    batch_size: int,
    workload: Workload,
    dtype: DType,
    features: EngineFeatures = ENGINE,
) -> float:
    """The most that the call allocates on a device while it runs, without a reallocated copy of its parameters.

    Lengths are the maxima. Train: activations of the layers in flight on a stage (`layers_in_flight`), what the
    backward pass has beyond them, the product for the largest weight's gradient, and three fp32 arrays of logits on the
    last stage (logits, probabilities, gradient). Inference: one layer's activations and two arrays of logits. Generate:
    the KV cache of grouped-query heads in whole pages, prefill's activations of one layer, two arrays of logits of one
    token a sequence, and on a CPU the linears' weights once more; of the micro-batches, at least pp, pp are in flight
    at once and the others wait without a cache. Where the call was given less room for keys and values than they need,
    it is that room. In host memory also what malloc and libraries add (`in_process`). A call that does not use its
    model: nothing.
    """
    if not call.uses_model:
        return 0.0
    allocated = _allocated_bytes(call, option, batch_size, workload, dtype, features)
    return in_process(allocated) if features.in_host_memory else allocated


def _allocated_bytes(
    call: ModelFunctionCallDef,
    option: Option,
    batch_size: int,
    workload: Workload,
    dtype: DType,
    features: EngineFeatures,
) -> float:
    """Tensors of a call."""
    model, strategy, lengths = call.config, option.layout.strategy, workload.of(call.name)
    tp, pp, features = strategy.tp, strategy.pp, features.during(call.interface_type)
    item = DTYPE_BYTES[dtype]
    samples = mini_batch_size(call, batch_size) // strategy.dp
    activations = activation_elements(model, tp, sequence_parallel=features.sequence_parallel) * item
    if call.interface_type is GENERATE:
        parts = generation_parts(samples, option.micro_batches, pp)
        per_part = math.ceil(samples / parts)
        prefill = lengths.max_prompt_tokens * activations
        logits = logits_bytes(per_part, model, dtype, tp, features)
        weights = packed_bytes(model, strategy, dtype, features)
        cache = _generation_cache_bytes(call, option, batch_size, lengths, dtype, features)
        return cache + per_part * prefill + 2 * logits + weights
    tokens = samples // option.micro_batches * lengths.max_tokens
    logits = logits_bytes(tokens, model, dtype, tp, features)
    if call.interface_type is not TRAIN_STEP:
        return tokens * activations + 2 * logits

    gathered = gathered_bytes(model, strategy, dtype, features)
    backward = tokens * backward_bytes(model, dtype, tp, features) + largest_weight(model, tp) * item

    def stage_bytes(stage: int) -> float:
        layers = layers_in_flight(model.num_layers, strategy, stage, option.micro_batches)
        kept = kept_bytes(model, dtype, tp, layers, 1, features)
        return tokens * kept + backward + (3 * logits if stage == pp - 1 else 0)

    # The first stage has the most layers and micro-batches in flight, the last one the logits.
    passes = max(stage_bytes(0), stage_bytes(pp - 1)) + gathered
    return max(passes, chunk_bytes(model, strategy, dtype, features))


@lru_cache(maxsize=64)
def largest_weight(model: DecoderConfig, tp: int) -> int:
    """Elements of the largest weight of a layer on a tensor-parallel rank."""
    return max(
        spec.size // (1 if spec.shard_dim is None else tp)
        for spec in decoder_parameters(model)
        if spec.place == "layer"
    )


def in_process(heap_bytes: float) -> float:
    """What a process on a CPU has for a call that needs `heap_bytes` of malloc.

    Around tensors of different sizes that come and go there are holes, of at most an eighth of them where a hole's size
    fits again (`csrc/memory`), and huge pages are taken whole. The rest is the libraries' own.
    """
    return WORKER_BYTES + heap_bytes * (1 + HOLES)


def kept_cache_bytes(
    call: ModelFunctionCallDef,
    option: Option,
    batch_size: int,
    workload: Workload,
    dtype: DType,
    features: EngineFeatures = ENGINE,
) -> float:
    """What of `dynamic_bytes` a call leaves where its model lives: the KV cache, where its graphs are kept."""
    lengths = workload.of(call.name)
    generates = call.uses_model and call.interface_type is GENERATE
    if not generates or not features.keeps_cache(call.config, lengths.decode_graphs):
        return 0.0
    return _generation_cache_bytes(call, option, batch_size, lengths, dtype, features)


def _generation_cache_bytes(
    call: ModelFunctionCallDef,
    option: Option,
    batch_size: int,
    lengths: Workload,
    dtype: DType,
    features: EngineFeatures,
) -> float:
    """The KV cache of the sequences in flight, and for each part the page where the padding of graphs is written."""
    model, strategy = call.config, option.layout.strategy
    samples = mini_batch_size(call, batch_size) // strategy.dp
    parts = generation_parts(samples, option.micro_batches, strategy.pp)
    in_flight = min(parts, strategy.pp)
    sequences = in_flight * math.ceil(samples / parts) / cache_turns(samples, parts, strategy.pp, lengths)
    spare = in_flight if features.replays(model, lengths.decode_graphs) else 0
    return (
        sequences * cache_bytes(model, strategy, dtype, lengths.max_tokens, features)
        + spare * cache_bytes(model, strategy, dtype, 1, features)
    )  # fmt: skip


def layers_in_flight(num_layers: int, strategy: ParallelStrategy, stage: int, micro_batches: int) -> int:
    """The most layers, each counted once a micro-batch, that wait on a stage for their backward pass.

    (Interleaved) 1F1B: without chunks those of pp - stage micro-batches, at most of all (Narayanan et al., 2021,
    section 2.2); with chunks those of pp micro-batches on the first stage too, but more on the others.
    """
    # The third pp micro-batches find as many in flight as the second.
    return _layers_in_flight(num_layers, strategy.pp, strategy.chunks, stage, min(micro_batches, 2 * strategy.pp))


@lru_cache(maxsize=4096)
def _layers_in_flight(num_layers: int, pp: int, chunks: int, stage: int, micro_batches: int) -> int:
    layers = [len(chunk) for chunk in chunk_layers(num_layers, ParallelStrategy(pp=pp, chunks=chunks), stage)]
    order = training_order(pp, stage, chunks, micro_batches)
    return max(accumulate(layers[run.chunk] if run.is_forward else -layers[run.chunk] for run in order))


def cache_turns(samples: int, parts: int, pp: int, lengths: Workload) -> float:
    """How many times as much room as the call was given its sequences in flight would need; 1 where they have it.

    So many turns are taken: with 1 / turns of the sequences at a time, decode steps come to turns times as many.
    """
    in_flight = min(parts, pp) * math.ceil(samples / parts)
    return max(1.0, in_flight * lengths.max_tokens / (lengths.kv_cache_tokens or math.inf))


def generation_parts(samples: int, micro_batches: int, pp: int) -> int:
    """Parts that a rank's samples are generated in: one for every stage at least, none empty."""
    return min(max(micro_batches, pp), samples)
