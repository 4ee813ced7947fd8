"""Bytes that a call allocates on a device while it runs."""

import math
from functools import lru_cache
from itertools import accumulate

from realhf.architecture.model import DTYPE_BYTES
from realhf.dataflow.graph import TRAIN_STEP
from realhf.geometry.layout import ParallelStrategy, chunk_layers
from realhf.geometry.pipeline_schedule import training_order
from realhf.planning.model.activations import activation_elements, backward_bytes, kept_bytes
from realhf.planning.model.memory import cache_bytes, chunk_bytes, gathered_bytes, logits_bytes, packed_bytes
from realhf.planning.model.rank_work import RankWork
from realhf.planning.model.sizes import largest_weight

# Of a worker on a CPU, beside tensors. Measured: 12 MiB that torch and oneDNN take when they first compute, and 4 MiB
# that it shares with the workers of its tensor-parallel group.
WORKER_BYTES = 16 << 20
HOLES = 1 / 8  # of what malloc gave; measured 4 to 9 %


def dynamic_bytes(work: RankWork) -> float:
    """The most that the call allocates on a device while it runs, without a reallocated copy of its parameters.

    Lengths are the maxima.

    - Training: activations of the layers in flight on a stage (`layers_in_flight`), what the backward pass has beyond
      them, the product for the largest weight's gradient, and three fp32 arrays of logits on the last stage (logits,
      probabilities, gradient).
    - Inference: one layer's activations and two arrays of logits.
    - Generation: the KV cache of the parts in flight in whole pages, or the room that the call was given for it where
      that is less; prefill's activations of one layer, two arrays of logits of one token a sequence, and on a CPU the
      linears' weights once more.

    In host memory also what malloc and libraries add (`in_process`). A call that does not use its model: nothing.
    """
    if not work.call.uses_model:
        return 0.0
    allocated = _generation_bytes(work) if work.generates else _pass_bytes(work)
    return in_process(allocated) if work.features.in_host_memory else allocated


def in_process(heap_bytes: float) -> float:
    """What a process on a CPU has for a call that needs `heap_bytes` of malloc.

    Around tensors of different sizes that come and go there are holes, of at most an eighth of them where a hole's size
    fits again (`csrc/memory`), and huge pages are taken whole. The rest is the libraries' own.
    """
    return WORKER_BYTES + heap_bytes * (1 + HOLES)


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
    logits = logits_bytes(per_part, model, dtype, strategy.tp, features)
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
    logits = logits_bytes(tokens, model, dtype, tp, features)
    if work.call.interface_type is not TRAIN_STEP:
        activations = activation_elements(model, tp) * item
        return tokens * activations + 2 * logits

    gathered = gathered_bytes(model, strategy, dtype, features)
    backward = tokens * backward_bytes(model, dtype, tp, features) + largest_weight(model, tp) * item

    def stage_bytes(stage: int) -> float:
        layers = layers_in_flight(model.num_layers, strategy, stage, work.micro_batches)
        kept = kept_bytes(model, dtype, tp, layers, 1, features)
        return tokens * kept + backward + (3 * logits if stage == pp - 1 else 0)

    # The first stage has the most layers and micro-batches in flight, the last one the logits.
    passes = max(stage_bytes(0), stage_bytes(pp - 1)) + gathered
    return max(passes, chunk_bytes(model, strategy, dtype, features))


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
