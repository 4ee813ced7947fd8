"""The operators of a decoder that is trained, for a choice of their modes."""

from collections import defaultdict
from dataclasses import dataclass

from realhf.architecture.model import DTYPE_BYTES, DecoderConfig, DType
from realhf.base.errors import UserError
from realhf.geometry.parameters import ParameterSpec, decoder_parameters
from realhf.planning.model.features import ENGINE
from realhf.planning.model.operator_modes import MODES, Links, Mode, Operator, OsdpProblem

OUTSIDE = ("embedding", "head")  # kinds of operators that lie in no layer


@dataclass(frozen=True, kw_only=True)
class Training:
    """Training with AdamW on samples of `sequence_length` tokens, with `flops` reached a second.

    Parameters and gradients are in `dtype`. The other fields: see `OsdpProblem`.
    """

    sequence_length: int
    flops: float
    links: Links
    memory_bytes: int
    dtype: DType = "bfloat16"
    modes: tuple[Mode, ...] = MODES
    recompute: bool = False
    prefetch: bool = False

    def __post_init__(self) -> None:
        if self.sequence_length < 1:
            raise UserError(f"sequence_length={self.sequence_length} must be at least 1")


def decoder_problem(model: DecoderConfig, training: Training) -> OsdpProblem:
    """The training of a decoder, its operators not sliced yet (`sliced`).

    Norms belong to the projection that follows them. Compute: 6 FLOPs a parameter and token (8 with recomputation),
    and causal attention.
    """
    item = DTYPE_BYTES[training.dtype]
    sizes: dict[tuple[str, str], int] = defaultdict(int)
    active: dict[tuple[str, str], float] = defaultdict(float)  # of these, what a token goes through
    for spec in decoder_parameters(model):
        key = operator_of(spec, model)
        sizes[key] += spec.size
        active[key] += (model.experts.per_token / model.experts.count if ".experts." in spec.name else 1) * spec.size
    kept = _activation_elements(model)
    layer_bytes = training.sequence_length * sum(kept.values()) * item
    return OsdpProblem(
        operators=tuple(
            Operator(
                name=name,
                kind=kind,
                parameter_bytes=size * item,
                gradient_bytes=size * item,
                optimizer_bytes=size * ENGINE.state_bytes(training.dtype),
                activation_bytes=_activation_bytes(model, training, kind, kept.get(kind, 0)),
                compute_s=_compute_s(model, training, kind, active[name, kind]),
            )
            for (name, kind), size in sizes.items()
        ),
        links=training.links,
        memory_bytes=training.memory_bytes,
        modes=training.modes,
        recompute=training.recompute,
        prefetch=training.prefetch,
        extra_bytes_per_sample=layer_bytes if training.recompute else 0,
    )


def _activation_bytes(model: DecoderConfig, training: Training, kind: str, kept: int) -> int:
    """Of a sample, kept for the backward pass. With recomputation a layer keeps its input alone."""
    if training.recompute and kind not in OUTSIDE:
        kept = model.hidden_size if kind == "q" else 0
    item = DTYPE_BYTES[training.dtype]
    activations = training.sequence_length * kept * item
    if kind == "head":
        outputs = model.vocab_size if model.head == "lm" else 1
        activations += 3 * training.sequence_length * outputs * max(item, 4)  # logits, probabilities, gradient
    return activations


def _compute_s(model: DecoderConfig, training: Training, kind: str, active: float) -> float:
    """Of a sample. `active`: the operator's parameters that a token goes through."""
    is_lookup = kind == "embedding" and not model.tied_embeddings  # a tied one is the head's weight, too
    flops_per_token = 0 if is_lookup else (8 if training.recompute and kind not in OUTSIDE else 6) * active
    if kind == "o":  # scores and their product with the values, half of each masked
        flops_per_token += (8 if training.recompute else 6) * training.sequence_length * model.query_size
    return flops_per_token * training.sequence_length / training.flops


def operator_of(spec: ParameterSpec, model: DecoderConfig) -> tuple[str, str]:
    """(name, kind) of the operator that a parameter belongs to: a bias to its projection, a norm to what follows it."""
    if spec.place in OUTSIDE:
        return spec.place, spec.place
    module = spec.name.rsplit(".", 2)[-2]
    norms = {
        "input_layernorm": "q",
        "q_norm": "q",
        "k_norm": "k",
        "post_attention_layernorm": "gate" if model.mlp == "gated" else "up",
    }
    kind = norms.get(module, module.removesuffix("_proj"))
    return f"layers.{spec.layer}.{kind}", kind


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
