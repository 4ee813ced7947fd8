"""The operators of a decoder that is trained, for a choice of their modes."""

from dataclasses import dataclass
from functools import partial

from realhf.architecture.model import DTYPE_BYTES, DecoderConfig, DType
from realhf.base.errors import UserError
from realhf.geometry.operators import EMBEDDING, HEAD, NORMS, can_be_cut, kind_of, operators
from realhf.geometry.parameters import ParameterSpec
from realhf.planning.model.features import ENGINE
from realhf.planning.model.operator_modes import MODES, MOST_SLICES, Links, Mode, Operator, OsdpProblem

OUTSIDE = (EMBEDDING, "positions", HEAD, NORMS)  # kinds of operators that lie in no layer


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

    The operators are those of the engine (`realhf.geometry.operators`). Compute: 6 FLOPs a parameter and token (8 with
    recomputation), and causal attention.
    """
    item = DTYPE_BYTES[training.dtype]
    kept = _activation_elements(model)
    layer_bytes = training.sequence_length * sum(kept.values()) * item
    return OsdpProblem(
        operators=tuple(
            Operator(
                name=name,
                kind=kind_of(name),
                parameter_bytes=(size := sum(spec.size for spec in specs)) * item,
                gradient_bytes=size * item,
                optimizer_bytes=size * ENGINE.state_bytes(training.dtype),
                activation_bytes=_activation_bytes(model, training, kind_of(name), kept.get(kind_of(name), 0)),
                compute_s=_compute_s(model, training, kind_of(name), sum(map(partial(_active, model), specs))),
                modes=MODES if name != NORMS else ("replicated", "zero1"),
                most_slices=MOST_SLICES if can_be_cut(name, model) else 1,
            )
            for name, specs in operators(model).items()
        ),
        links=training.links,
        memory_bytes=training.memory_bytes,
        modes=training.modes,
        recompute=training.recompute,
        prefetch=training.prefetch,
        extra_bytes_per_sample=layer_bytes if training.recompute else 0,
    )


def _activation_bytes(model: DecoderConfig, training: Training, kind: str, kept: int) -> int:
    """Of a sample, kept for the backward pass. With recomputation a layer keeps its input alone. What the norms of the
    layers keep counts with the projection behind each."""
    if training.recompute and kind not in OUTSIDE:
        kept = model.hidden_size if kind == "q" else 0
    item = DTYPE_BYTES[training.dtype]
    activations = training.sequence_length * kept * item
    if kind == _head_of(model):
        outputs = model.vocab_size if model.head == "lm" else 1
        activations += 3 * training.sequence_length * outputs * max(item, 4)  # logits, probabilities, gradient
    return activations


def _compute_s(model: DecoderConfig, training: Training, kind: str, active: float) -> float:
    """Of a sample. `active`: the operator's parameters that a token goes through."""
    # A tied embedding is the head's weight, too.
    has_no_product = kind == "positions" or (kind == EMBEDDING and not model.tied_embeddings)
    flops_per_token = 0 if has_no_product else (8 if training.recompute and kind not in OUTSIDE else 6) * active
    if kind == "o":  # scores and their product with the values, half of each masked
        flops_per_token += (8 if training.recompute else 6) * training.sequence_length * model.query_size
    return flops_per_token * training.sequence_length / training.flops


def _active(model: DecoderConfig, spec: ParameterSpec) -> float:
    """Of a parameter the elements that a token goes through."""
    return (model.experts.per_token / model.experts.count if ".experts." in spec.name else 1) * spec.size


def _head_of(model: DecoderConfig) -> str:
    """The operator that gives the logits."""
    return EMBEDDING if model.tied_embeddings else HEAD


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
    if model.experts.count:
        return attention | {"experts": 2 * hidden + routed + 4 * inner}
    return attention | {"gate": 2 * hidden + inner, "up": inner, "down": 2 * inner}
