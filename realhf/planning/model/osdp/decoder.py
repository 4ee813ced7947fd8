"""The operators of a decoder that is trained, for a choice of their modes."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from realhf.architecture.compute import MODES
from realhf.architecture.model import DTYPE_BYTES, DecoderConfig, DType
from realhf.base.errors import UserError
from realhf.geometry.operators import EMBEDDING, HEAD, NORMS, can_be_cut, kind_of, operators
from realhf.geometry.parameters import ParameterSpec
from realhf.planning.model.features import ENGINE
from realhf.planning.model.osdp.problem import MOST_SLICES, Operator, OsdpProblem

OUTSIDE = (EMBEDDING, "positions", HEAD, NORMS)  # kinds of operators that lie in no layer


def decoder_problem(
    model: DecoderConfig, given: OsdpProblem, *, sequence_length: int, flops: float, dtype: DType = "bfloat16"
) -> OsdpProblem:
    """The `given` problem with the operators of a decoder, not sliced yet (`sliced`), that AdamW trains on samples of
    `sequence_length` tokens, with `flops` reached a second; parameters and gradients are in `dtype`.

    The operators are those of the engine (`realhf.geometry.operators`). Compute: 6 FLOPs a parameter and token (8 with
    recomputation), and causal attention.

    Raises:
        UserError: a sample has no tokens.
    """
    if sequence_length < 1:
        raise UserError(f"sequence_length={sequence_length} must be at least 1")
    item, states, kept = DTYPE_BYTES[dtype], ENGINE.state_bytes(dtype), _activation_elements(model)

    def operator(name: str, specs: Sequence[ParameterSpec]) -> Operator:
        kind, size = kind_of(name), sum(spec.size for spec in specs)
        is_run_again = given.recompute and kind not in OUTSIDE
        elements = kept.get(kind, 0)
        if is_run_again:  # a layer keeps its input alone
            elements = model.hidden_size if kind == "q" else 0
        activations = sequence_length * elements * item
        if kind == (EMBEDDING if model.tied_embeddings else HEAD):
            outputs = model.vocab_size if model.head == "lm" else 1
            activations += 3 * sequence_length * outputs * max(item, 4)  # logits, probabilities, gradient
        # A tied embedding is the head's weight, too.
        has_no_product = kind == "positions" or (kind == EMBEDDING and not model.tied_embeddings)
        active = sum(map(partial(_active, model), specs))
        flops_per_token = 0 if has_no_product else (8 if is_run_again else 6) * active
        if kind == "o":  # scores and their product with the values, half of each masked
            flops_per_token += (8 if given.recompute else 6) * sequence_length * model.query_size
        compute_s = flops_per_token * sequence_length / flops
        forward_s = compute_s / (4 if is_run_again else 3)
        ahead_s = (forward_s, 2 * forward_s, *[forward_s] * is_run_again)
        return Operator(
            name=name,
            kind=kind,
            parameter_bytes=size * item,
            gradient_bytes=size * item,
            optimizer_bytes=size * states,
            activation_bytes=activations,
            compute_s=compute_s,
            gathers=len(ahead_s),
            ahead_s=ahead_s,
            modes=MODES if name != NORMS else ("replicated", "zero1"),
            most_slices=MOST_SLICES if can_be_cut(name, model) else 1,
        )

    layer_bytes = sequence_length * sum(kept.values()) * item
    return replace(
        given,
        operators=tuple(operator(name, specs) for name, specs in operators(model).items()),
        extra_bytes_per_sample=layer_bytes if given.recompute else 0,
    )


def _active(model: DecoderConfig, spec: ParameterSpec) -> float:
    """The elements of a parameter that a token goes through."""
    return (model.experts.per_token / model.experts.count if ".experts." in spec.name else 1) * spec.size


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
