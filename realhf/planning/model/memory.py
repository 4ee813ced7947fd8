"""Bytes of a model on a device: what its home keeps there, and what single calls have of it beside."""

import math
from dataclasses import replace

from realhf.architecture.model import DTYPE_BYTES, DecoderConfig, DType
from realhf.dataflow.graph import GENERATE, ModelFunctionCallDef
from realhf.geometry.layout import ParallelStrategy, stage_layers
from realhf.planning.model.features import ENGINE, EngineFeatures
from realhf.planning.model.sizes import largest_units, linear_elements, model_sizes
from realhf.planning.model.timings import kv_bytes_per_token_layer
from realhf.realloc.plan.planner import DEFAULT_BUCKET_BYTES

OFFLOADED_CHUNK = 2**26  # elements, as in realhf/engine/train/optimizer.py


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
    host memory count nothing. On a CPU a run that saves on its way also holds a copy of what this device writes: its
    part of parameters and states, which the ranks of a data-parallel group divide.
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
    """What goes from a device to host memory and back: `static_bytes` without gradients."""
    features = replace(features, copies_checkpoints=False)
    kept = static_bytes(model, strategy, dtype, trained=trained, features=features, versions=versions)
    if not trained:
        return kept
    elements = model_sizes(model).largest(strategy)
    if features.fully_sharded:
        elements = math.ceil(elements / strategy.dp)
    return kept - elements * features.gradient_bytes(dtype)


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
