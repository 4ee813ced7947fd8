"""Bytes of a model on a device: what its home keeps there, and what a call allocates while it runs."""

import math
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate

from realhf.architecture.model import DTYPE_BYTES, DecoderConfig, DType
from realhf.dataflow.graph import GENERATE, TRAIN_STEP, ModelFunctionCallDef
from realhf.geometry.layout import ParallelStrategy, chunk_layers, stage_layers
from realhf.geometry.pipeline_schedule import training_order
from realhf.planning.model.activations import activation_elements, backward_bytes, kept_bytes
from realhf.planning.model.features import ENGINE, EngineFeatures
from realhf.planning.model.rank_work import RankWork
from realhf.planning.model.sizes import largest_units, largest_weight, linear_elements, model_sizes
from realhf.planning.model.timings import kv_bytes_per_token_layer
from realhf.realloc.plan.planner import DEFAULT_BUCKET_BYTES

OFFLOADED_CHUNK = 2**26  # elements, as in realhf/engine/train/optimizer.py

# Of a worker on a CPU, beside tensors. Measured: 12 MiB that torch and oneDNN take when they first compute, and 4 MiB
# that it shares with the workers of its tensor-parallel group.
WORKER_BYTES = 16 << 20
# Of what malloc gave: between tensors of different sizes that come and go there are holes, of at most an eighth of them
# where a hole's size fits again (`csrc/memory`); measured 4 to 9 %.
HOLES = 1 / 8


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

    An untrained model: its parameters, in each of `versions`. A trained one: parameters, gradients, the two states of
    AdamW (at least in fp32), and below fp32 a master copy in fp32 (ReaL, section 5.1, "static memory"). Every rank of a
    data-parallel group has all of it; ZeRO-1 divides states and master copy over the group (16 or 4 + 12 / dp bytes a
    parameter in bf16, 2 more with gradients in fp32; ZeRO, section 5.1), full sharding divides all. States that wait in
    host memory count nothing. `copies_checkpoints` adds what this device writes, a part of a data-parallel group's.
    """
    item, state_bytes = DTYPE_BYTES[dtype], features.state_bytes(dtype)
    elements = _elements(model, strategy, is_divided=features.fully_sharded)
    if not trained:
        return versions * elements * item
    states = 0 if features.offloads_states else _updated_elements(model, strategy, features) * state_bytes
    written = _elements(model, strategy, is_divided=True) if features.copies_checkpoints else 0
    return elements * (item + features.gradient_bytes(dtype)) + states + written * (item + state_bytes)


def offloaded_bytes(
    model: DecoderConfig,
    strategy: ParallelStrategy,
    dtype: DType,
    *,
    trained: bool,
    features: EngineFeatures = ENGINE,
    versions: int = 1,
) -> int:
    """What goes from a device to host memory and back: `static_bytes` without gradients and copies."""
    kept_features = replace(features, copies_checkpoints=False)
    kept = static_bytes(model, strategy, dtype, trained=trained, features=kept_features, versions=versions)
    elements = _elements(model, strategy, is_divided=features.fully_sharded) if trained else 0
    return kept - elements * features.gradient_bytes(dtype)


def _elements(model: DecoderConfig, strategy: ParallelStrategy, *, is_divided: bool) -> int:
    """Parameters on the device that holds the most of them, whole or divided over dp."""
    return math.ceil(model_sizes(model).largest(strategy) / (strategy.dp if is_divided else 1))


def _updated_elements(model: DecoderConfig, strategy: ParallelStrategy, features: EngineFeatures) -> int:
    """Parameters whose optimizer states a device has."""
    return _elements(model, strategy, is_divided=features.zero1 or features.fully_sharded)


def chunk_bytes(model: DecoderConfig, strategy: ParallelStrategy, dtype: DType, features: EngineFeatures) -> int:
    """What an optimizer step has on the device of states that wait in host memory."""
    if not features.offloads_states:
        return 0
    return min(_updated_elements(model, strategy, features), OFFLOADED_CHUNK) * features.state_bytes(dtype)


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


def gathered_for_call(
    call: ModelFunctionCallDef, strategy: ParallelStrategy, dtype: DType, features: EngineFeatures
) -> int:
    """Parameters that a call gathers at a fully sharded home: a generation all of the device's stage, an inference two
    units at a time. A training: see `gathered_bytes`."""
    if not features.fully_sharded or strategy.dp == 1 or call.trains:
        return 0
    if call.interface_type is GENERATE:
        return parameter_bytes(call.config, strategy, dtype)
    return sum(largest_units(call.config, strategy.tp)) * DTYPE_BYTES[dtype]


def gathered_bytes(model: DecoderConfig, strategy: ParallelStrategy, dtype: DType, features: EngineFeatures) -> int:
    """Whole units that fully sharded training has at a time: parameters of two, and gradients of one, once as the
    backward pass gives them and once as a vector to reduce."""
    if not features.fully_sharded or strategy.dp == 1:
        return 0
    first, second = largest_units(model, strategy.tp)
    return (first + second) * DTYPE_BYTES[dtype] + 2 * first * features.gradient_bytes(dtype)


def dynamic_bytes(work: RankWork) -> float:
    """The most that the call allocates on a device while it runs, without a reallocated copy of its parameters; lengths
    are the maxima.

    - Training: activations of the layers in flight on a stage (`layers_in_flight`), what the backward pass has beyond
      them, the product for the largest weight's gradient, and three fp32 arrays of logits on the last stage (logits,
      probabilities, gradient).
    - Inference: one layer's activations and two arrays of logits.
    - Generation: the KV cache of the parts in flight in whole pages, or the room that the call was given for it where
      that is less; prefill's activations of one layer, two arrays of logits of one token a sequence, and on a CPU the
      linears' weights once more.

    In host memory also HOLES and WORKER_BYTES. A call that does not use its model: nothing.
    """
    if not work.call.uses_model:
        return 0.0
    allocated = _generation_bytes(work) if work.generates else _pass_bytes(work)
    return WORKER_BYTES + allocated * (1 + HOLES) if work.features.in_host_memory else allocated


def kept_cache_bytes(work: RankWork) -> float:
    """What of `dynamic_bytes` a call leaves where its model lives: the KV cache, where its graphs are kept."""
    generates = work.call.uses_model and work.generates
    if not generates or not work.features.keeps_cache(work.model, work.lengths.decode_graphs):
        return 0.0
    return _generation_cache_bytes(work)


def _generation_bytes(work: RankWork) -> float:
    model, strategy, dtype, features = work.model, work.strategy, work.dtype, work.features
    per_part = math.ceil(work.samples / work.parts)
    activations = activation_elements(model, strategy.tp) * DTYPE_BYTES[dtype]
    prefill = work.lengths.max_prompt_tokens * activations
    logits = _logits_bytes(work, per_part)
    weights = packed_bytes(model, strategy, dtype, features)
    return _generation_cache_bytes(work) + per_part * prefill + 2 * logits + weights


def _generation_cache_bytes(work: RankWork) -> float:
    """The KV cache of the sequences in flight, and for each part the page where the padding of graphs is written."""
    model, strategy, in_flight = work.model, work.strategy, work.parts_in_flight
    sequences = in_flight * math.ceil(work.samples / work.parts) / work.cache_turns
    spare = in_flight if work.features.replays(model, work.lengths.decode_graphs) else 0
    return (
        sequences * cache_bytes(model, strategy, work.dtype, work.lengths.max_tokens, work.features)
        + spare * cache_bytes(model, strategy, work.dtype, 1, work.features)
    )  # fmt: skip


def _pass_bytes(work: RankWork) -> float:
    """An inference, or a forward and a backward pass."""
    model, strategy, dtype, features = work.model, work.strategy, work.dtype, work.features
    tp, pp, item = strategy.tp, strategy.pp, DTYPE_BYTES[dtype]
    tokens = work.samples // work.micro_batches * work.lengths.max_tokens
    logits = _logits_bytes(work, tokens)
    if work.call.interface_type is not TRAIN_STEP:
        return tokens * (activation_elements(model, tp) * item) + 2 * logits

    backward = tokens * backward_bytes(model, dtype, tp, features) + largest_weight(model, tp) * item

    def stage_bytes(stage: int) -> float:
        layers = layers_in_flight(model.num_layers, strategy, stage, work.micro_batches)
        kept = kept_bytes(model, dtype, tp, layers, 1, features)
        return tokens * kept + backward + (3 * logits if stage == pp - 1 else 0)

    # The first stage has the most layers and micro-batches in flight, the last one the logits.
    passes = max(stage_bytes(0), stage_bytes(pp - 1)) + gathered_bytes(model, strategy, dtype, features)
    return max(passes, chunk_bytes(model, strategy, dtype, features))


def _logits_bytes(work: RankWork, tokens: float) -> float:
    """One array of the logits of `tokens` tokens that exist at once, fp32 at least: of the whole vocabulary, or 1 / tp
    of it. A value is one number."""
    item, features = max(DTYPE_BYTES[work.dtype], 4), work.features
    if work.model.head == "scalar":
        return tokens * item
    size_bytes = tokens * (work.model.vocab_size / (1 if features.full_logits else work.strategy.tp) * item)
    chunk = None if features.full_logits else features.logits_chunk_bytes
    return size_bytes if chunk is None else min(size_bytes, chunk)


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
