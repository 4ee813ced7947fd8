"""The operators of a decoder that is trained, for a choice of their modes."""

from collections import defaultdict
from dataclasses import dataclass

from realhf.architecture.model import DTYPE_BYTES, DecoderConfig, DType
from realhf.base.errors import UserError
from realhf.geometry.parameters import ParameterSpec, decoder_parameters
from realhf.planning.model.features import ENGINE
from realhf.planning.osdp.solver import MODES, Links, Mode, Operator, OsdpProblem


@dataclass(frozen=True, kw_only=True)
class Training:
    """Training with AdamW on samples of `sequence_length` tokens, with `flops` reached a second.

    Parameters and gradients are in `dtype`.
    """

    sequence_length: int
    flops: float
    dtype: DType = "bfloat16"
    recompute: bool = False

    def __post_init__(self) -> None:
        if self.sequence_length < 1:
            raise UserError(f"sequence_length={self.sequence_length} must be at least 1")

    @property
    def item(self) -> int:
        """Bytes of a parameter."""
        return DTYPE_BYTES[self.dtype]


def decoder_problem(
    model: DecoderConfig,
    training: Training,
    *,
    links: Links,
    memory_bytes: int,
    modes: tuple[Mode, ...] = MODES,
    prefetch: bool = False,
) -> OsdpProblem:
    """The training of a decoder, its operators not sliced yet (`sliced`).

    Norms belong to the projection that follows them. Compute: 6 FLOPs a parameter and token (8 with recomputation),
    and causal attention.
    """
    sizes: dict[tuple[int, str], int] = defaultdict(int)
    active: dict[tuple[int, str], float] = defaultdict(float)  # of these, what a token goes through
    for spec in decoder_parameters(model):
        key = (spec.layer, operator_kind(spec, model))
        sizes[key] += spec.size
        active[key] += (model.experts.per_token / model.experts.count if ".experts." in spec.name else 1) * spec.size
    kept = _activation_elements(model)
    layer_bytes = training.sequence_length * sum(kept.values()) * training.item
    return OsdpProblem(
        operators=tuple(
            Operator(
                name=kind if layer < 0 else f"layers.{layer}.{kind}",
                kind=kind,
                parameter_bytes=size * training.item,
                gradient_bytes=size * training.item,
                optimizer_bytes=size * ENGINE.state_bytes(training.dtype),
                activation_bytes=_activation_bytes(model, training, kind, layer >= 0, kept.get(kind, 0)),
                compute_s=_compute_s(model, training, kind, layer >= 0, active[layer, kind]),
            )
            for (layer, kind), size in sizes.items()
        ),
        links=links,
        memory_bytes=memory_bytes,
        modes=modes,
        recompute=training.recompute,
        prefetch=prefetch,
        extra_bytes_per_sample=layer_bytes if training.recompute else 0,
    )


def _activation_bytes(model: DecoderConfig, training: Training, kind: str, in_layer: bool, kept: int) -> int:
    """Of a sample, kept for the backward pass. With recomputation a layer keeps its input alone."""
    if training.recompute and in_layer:
        kept = model.hidden_size if kind == "q" else 0
    activations = training.sequence_length * kept * training.item
    if kind == "head":
        outputs = model.vocab_size if model.head == "lm" else 1
        activations += 3 * training.sequence_length * outputs * max(training.item, 4)  # logits, probabilities, gradient
    return activations


def _compute_s(model: DecoderConfig, training: Training, kind: str, in_layer: bool, active: float) -> float:
    """Of a sample. `active`: the operator's parameters that a token goes through."""
    is_lookup = kind == "embedding" and not model.tied_embeddings  # a tied one is the head's weight, too
    flops_per_token = 0 if is_lookup else (8 if training.recompute and in_layer else 6) * active
    if kind == "o":  # scores and their product with the values, half of each masked
        flops_per_token += (8 if training.recompute else 6) * training.sequence_length * model.query_size
    return flops_per_token * training.sequence_length / training.flops


def operator_kind(spec: ParameterSpec, model: DecoderConfig) -> str:
    """The operator that a parameter belongs to: a bias to its projection, a norm to what follows it."""
    if spec.place != "layer":
        return spec.place
    module = spec.name.rsplit(".", 2)[-2]
    norms = {
        "input_layernorm": "q",
        "q_norm": "q",
        "k_norm": "k",
        "post_attention_layernorm": "gate" if model.mlp == "gated" else "up",
    }
    return norms.get(module, module.removesuffix("_proj"))


def _activation_elements(model: DecoderConfig) -> dict[str, int]:
    """Elements that an operator of a layer keeps a token: `activations.activation_elements`, told apart.

    q: the norm's input and output, q and its rotated copy; o: attention's output; gate: the norm's
    input and output, and its own output; down: silu(gate) and the product.
    """
    hidden, query, kv, inner = model.hidden_size, model.query_size, model.kv_size, model.active_intermediate_size
    attention = {"q": 2 * hidden + 2 * query, "k": 2 * kv, "v": kv, "o": query}
    if model.mlp == "plain":
        return attention | {"up": 2 * hidden + inner, "down": inner}
    routed = 2 * model.experts.per_token * hidden
    return attention | {"gate": 2 * hidden + routed + inner, "up": inner, "down": 2 * inner}
