"""Bytes a token that a pass through a model's layers has at once: counted from the tensors of `realhf/models`.

`tests/unit/engine/test_planned_memory.py` compares them with what the engine keeps. Of i bytes an element: w = max(i,
4); a = i on a GPU and w on the CPU, where training attends in float32 at least (`realhf/models/attention.py`).
"""

from dataclasses import replace
from typing import NamedTuple

from realhf.architecture.decoding import takes_flash
from realhf.architecture.model import DTYPE_BYTES, DecoderConfig, DType
from realhf.planning.model.features import ENGINE, EngineFeatures


def activation_elements(model: DecoderConfig, tp: int) -> float:
    """Elements that one layer has a token in a pass without gradients, at most.

    Whole: inputs and outputs of both norms, and of every expert of the token. Divided over tp: q, k, v and their
    rotated copies, attention's output, and gate, up, silu(gate) and their product.
    """
    divided = 3 * model.query_size + 3 * model.kv_size + _mlp_arrays(model) * model.active_intermediate_size
    return (4 + 2 * model.experts.per_token) * model.hidden_size + divided / tp


def kept_layer_bytes(model: DecoderConfig, dtype: DType, tp: int, features: EngineFeatures = ENGINE) -> float:
    """Bytes a token that one layer keeps for its backward pass, without recomputation.

    Whole, divided over tp with sequence parallelism only: of each norm its input in w, what it is normalised to, the
    output, and the root. Divided: rotated q and k, v and attention's output (all a), that output again, a number a
    head, and four arrays of a gated MLP or two of a plain one. The rotary tables are those of all layers. A fused norm
    keeps its input and its output, a fused MLP three arrays. Flash attention's output is not copied, nor is that of
    reproducible="layout", which has no numbers by head and is run again for its gradients.
    """
    item, wide, attention = _items(dtype, features)
    copy = 0 if features.ordered or flash_attends(model, dtype, features) else item
    divided = model.query_size * (2 * attention + copy) + model.kv_size * 2 * attention
    divided += 0 if features.ordered else model.num_heads * wide
    if model.qk_norm:
        heads, elements = model.num_heads + model.num_kv_heads, model.query_size + model.kv_size
        is_fused = _is_fused(model, dtype, features)
        divided += elements * item if is_fused else elements * (wide + item) + heads * wide
        if item == wide and not is_fused and (features.on_gpus or dtype == "float64"):
            divided += model.kv_size * item  # their input is not converted: a part of q, k and v, which are one product
    norms = norm_bytes(model, dtype, tp, features) + norm_bytes(model, dtype, tp, features, of_mlp=True)
    return norms + divided / tp + feed_forward_bytes(model, dtype, tp, features)


def kept_selective_bytes(model: DecoderConfig, dtype: DType, tp: int, features: EngineFeatures = ENGINE) -> float:
    """The same with selective recomputation: its input, and what products and attention give
    (`realhf.models.recomputation`).

    Divided over tp: q, k, v, attention's output (a) with a number a head, gate and up. Whole: the outputs of the two
    row-parallel products, which are summed afterwards.
    """
    item, wide, attention = _items(dtype, features)
    experts = model.experts.per_token if model.experts.count else 1
    divided = model.query_size * (attention + item) + model.kv_size * 2 * item + model.num_heads * wide
    divided += _mlp_arrays(model) // 2 * model.active_intermediate_size * item
    kept_input = model.hidden_size / (tp if features.sequence_parallel else 1)
    routed = model.experts.count if features.on_gpus else 0
    return (kept_input + (1 + experts) * model.hidden_size + routed) * item + divided / tp


class InFlight(NamedTuple):
    """Layers that wait for their backward pass, each counted once a micro-batch: those that keep all that they need,
    and those that are recomputed."""

    whole: int
    recomputed: int


def kept_bytes(
    model: DecoderConfig, dtype: DType, tp: int, layers: InFlight, features: EngineFeatures = ENGINE
) -> float:
    """A token's bytes that these layers keep for the backward passes."""
    whole = recomputed = kept_layer_bytes(model, dtype, tp, features)
    if features.recomputation == "selective":
        recomputed = kept_selective_bytes(model, dtype, tp, features)
    elif features.recomputation == "full":  # its input
        recomputed = model.hidden_size / (tp if features.sequence_parallel else 1) * DTYPE_BYTES[dtype]
    return layers.whole * whole + layers.recomputed * recomputed


def repeated_bytes(
    model: DecoderConfig, dtype: DType, tp: int, layers: InFlight, features: EngineFeatures = ENGINE
) -> float:
    """Bytes of a prompt's token for each further sample, where the prompt is computed once for several. A training
    keeps its keys and values in front of the sample's own, in layers that are not recomputed
    (`realhf.models.prefixed_attention`), with one layer's gradients, and the final norm with its own."""
    _, wide, attention = _items(dtype, features)
    return (layers.whole + 1) * 2 * model.kv_size / tp * attention + 6 * model.hidden_size * wide


def beyond_kept_bytes(
    model: DecoderConfig, dtype: DType, tp: int, whole_layers: int, features: EngineFeatures = ENGINE
) -> float:
    """What the backward pass of a model chunk has a token beyond what all layers in flight keep.

    With recomputation one whole layer while it is run again (Korthikanti et al., 2022, section 5). What the
    `whole_layers` behind the recomputed ones kept is freed before that.
    """
    kept_all = backward_bytes(model, dtype, tp, replace(features, recomputation="off"))
    if features.recomputation == "off":
        return kept_all
    layer, backward = kept_layer_bytes(model, dtype, tp, features), backward_bytes(model, dtype, tp, features)
    kept = kept_selective_bytes(model, dtype, tp, features) if features.recomputation == "selective" else 0
    again = max(layer - kept, 0) + backward
    return max(kept_all, again - whole_layers * layer)


def backward_bytes(model: DecoderConfig, dtype: DType, tp: int, features: EngineFeatures = ENGINE) -> float:
    """What a backward pass has a token beyond what was kept: the final norm and its gradients in w; or the gradients of
    both factors of the MLP's product and of the hidden states; or those of attention, when what the MLP behind it kept
    is freed (not where the layer was run again)."""
    item, wide, attention = _items(dtype, features)
    behind = 6 * model.hidden_size * wide
    mlp = 2 * model.active_intermediate_size / tp * item + 2 * model.hidden_size * item
    attending = 2 * (model.query_size + model.kv_size) / tp * attention
    if features.ordered:  # its inputs and its output, widened, the output as one tensor, and the gradients of all
        attending = (5 * model.query_size + 4 * model.kv_size) / tp * wide
    if features.recomputation == "off":
        freed = _mlp_kept_arrays(model, dtype, features) * model.active_intermediate_size / tp * item
        freed += _norm_bytes(model, dtype, features)
        most = max(behind, mlp, attending - freed)
    else:
        most = max(behind, mlp + attending)
    return most + 2 * model.head_dim * item


def flash_attends(model: DecoderConfig, dtype: DType, features: EngineFeatures) -> bool:
    """Whether training attends by flash attention's kernels."""
    return features.on_gpus and takes_flash(dtype, model.head_dim)


def norm_bytes(model: DecoderConfig, dtype: DType, tp: int, features: EngineFeatures, *, of_mlp: bool = False) -> float:
    """A token's bytes that a norm of hidden states keeps; with sequence parallelism the products behind it keep their
    gathered input whole, which is counted on GPUs alone. Experts (`of_mlp`) keep rows of their own instead."""
    kept = _norm_bytes(model, dtype, features)
    if not features.sequence_parallel:
        return kept
    is_gathered = features.on_gpus and not (of_mlp and model.experts.count)
    gathered = model.hidden_size * DTYPE_BYTES[dtype] if is_gathered else 0
    return (kept - gathered) / tp + gathered


def feed_forward_bytes(model: DecoderConfig, dtype: DType, tp: int, features: EngineFeatures) -> float:
    """A token's bytes that an MLP keeps, or its experts with their inputs and outputs. On GPUs these are counted whole
    with sequence parallelism too, with the numbers of the router: probabilities, and eleven for each chosen expert."""
    item, wide, _ = _items(dtype, features)
    inner = _mlp_kept_arrays(model, dtype, features) * model.active_intermediate_size * item / tp
    rows = 2 * model.experts.per_token * model.hidden_size * item
    if not features.on_gpus:
        return inner + rows / (tp if features.sequence_parallel else 1)
    return inner + rows + (model.experts.count + 11 * model.experts.per_token) * wide


def _items(dtype: DType, features: EngineFeatures) -> tuple[int, int, int]:
    """i, w and a."""
    item, wide = DTYPE_BYTES[dtype], max(DTYPE_BYTES[dtype], 4)
    return item, wide, wide if features.in_host_memory and not features.ordered else item


def _is_fused(model: DecoderConfig, dtype: DType, features: EngineFeatures) -> bool:
    """Whether RMS norms are one kernel in training."""
    return features.fuses_training and dtype != "float64" and model.norm == "rms"


def _norm_bytes(model: DecoderConfig, dtype: DType, features: EngineFeatures) -> int:
    item, wide, _ = _items(dtype, features)
    if _is_fused(model, dtype, features):
        return model.hidden_size * 2 * item
    match model.norm:
        case "rms":
            return model.hidden_size * (wide + 2 * item) + wide
        case "rms_plus_one":
            return model.hidden_size * (2 * wide + item) + wide
        case "layer":
            return model.hidden_size * 2 * item + 2 * item


def _mlp_arrays(model: DecoderConfig) -> int:
    return 4 if model.mlp == "gated" else 2


def _mlp_kept_arrays(model: DecoderConfig, dtype: DType, features: EngineFeatures) -> int:
    is_fused = features.fuses_training and dtype != "float64" and model.mlp == "gated" and model.activation == "silu"
    return 3 if is_fused else _mlp_arrays(model)
