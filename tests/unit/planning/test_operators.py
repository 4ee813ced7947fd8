"""The operators of a decoder in numbers worked out by hand: states, activations and compute of each."""

from dataclasses import replace
from typing import Any

import pytest

from realhf.architecture.compute import MODES
from realhf.architecture.model import DecoderConfig, Experts
from realhf.base.errors import UserError
from realhf.planning.model.osdp.decoder import decoder_problem
from realhf.planning.model.osdp.problem import Links, OsdpProblem

# 64 hidden, keys and values of 32, 96 intermediate, 256 tokens in the vocabulary; samples of 32 tokens.
SMALL = DecoderConfig(hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=2, vocab_size=256)
LINKS = Links(num_devices=8, latency_s=0.0, seconds_per_byte=1e-10)
TOKENS = 32
# Elements of each operator of a layer, and those that it keeps of a token.
SIZES = {"q": 4096, "k": 2048, "v": 2048, "o": 4096, "gate": 6144, "up": 6144, "down": 6144}
KEPT = {"q": 2 * 64 + 2 * 64, "k": 2 * 32, "v": 32, "o": 64, "gate": 2 * 64 + 96, "up": 96, "down": 2 * 96}


def problem(model: DecoderConfig = SMALL, **changes: Any) -> OsdpProblem:
    own = {name: changes.pop(name) for name in ("sequence_length", "flops", "dtype") if name in changes}
    given = OsdpProblem(**{"operators": (), "links": LINKS, "memory_bytes": 2**30} | changes)
    return decoder_problem(model, given, **{"sequence_length": TOKENS, "flops": 1e6} | own)


def by_name(found: OsdpProblem) -> dict[str, tuple[int, int, float]]:
    """Bytes of parameters, of activations, and FLOPs of a sample."""
    return {op.name: (op.parameter_bytes, op.activation_bytes, round(op.compute_s * 1e6, 3)) for op in found.operators}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("dtype", "item", "states", "wide"), [
    ("bfloat16", 2, 12, 4), ("float32", 4, 8, 4), ("float64", 8, 16, 8),
])  # fmt: skip
def test_every_operator(recompute: bool, dtype: Any, item: int, states: int, wide: int) -> None:
    found = problem(dtype=dtype, recompute=recompute)
    inside = 8 if recompute else 6  # FLOPs a parameter and token in a layer
    expected: dict[str, tuple[int, int, float]] = {"embedding": (256 * 64 * item, 0, 0)}
    for layer in (0, 1):
        for kind, size in SIZES.items():
            kept = KEPT[kind] if not recompute else 64 if kind == "q" else 0
            flops = inside * (size + (TOKENS * 64 if kind == "o" else 0)) * TOKENS
            expected[f"layers.{layer}.{kind}"] = (size * item, TOKENS * kept * item, flops)
    expected["head"] = (256 * 64 * item, 3 * TOKENS * 256 * wide, 6 * 256 * 64 * TOKENS)
    expected["norms"] = (5 * 64 * item, 0, 6 * 5 * 64 * TOKENS)
    assert by_name(found) == expected
    for op in found.operators:
        assert op.gradient_bytes == op.parameter_bytes
        assert op.optimizer_bytes == op.parameter_bytes // item * states
        assert op.kind == op.name.rpartition(".")[2]
        assert op.modes == (("replicated", "zero1") if op.name == "norms" else MODES)
        assert op.most_slices == (1 if op.name == "norms" else 64)
        assert op.slices == 1
    # One whole layer while it is run again.
    assert found.extra_bytes_per_sample == (TOKENS * sum(KEPT.values()) * item if recompute else 0)


def test_a_training_is_asked_for_as_it_is() -> None:
    plain, other = problem(), problem(modes=("sharded", "zero1"), recompute=True, prefetch=True, memory_bytes=5)
    assert (plain.modes, plain.recompute, plain.prefetch, plain.memory_bytes) == (MODES, False, False, 2**30)
    assert (other.modes, other.recompute, other.prefetch, other.memory_bytes) == (("sharded", "zero1"), True, True, 5)
    assert plain.links == other.links == LINKS
    assert plain == problem(dtype="bfloat16")


def test_a_tied_embedding_gives_the_logits() -> None:
    found = problem(replace(SMALL, tied_embeddings=True))
    assert by_name(found)["embedding"] == (256 * 64 * 2, 3 * TOKENS * 256 * 4, 6 * 256 * 64 * TOKENS)
    assert "head" not in by_name(found)
    assert next(op.most_slices for op in found.operators if op.name == "embedding") == 1
    again = problem(replace(SMALL, tied_embeddings=True), recompute=True)
    assert by_name(again)["embedding"] == by_name(found)["embedding"], "it is not run again"


def test_learned_positions_are_looked_up() -> None:
    found = problem(replace(SMALL, positions="learned", max_positions=48))
    assert by_name(found)["positions"] == (48 * 64 * 2, 0, 0)


def test_a_critic_gives_a_number_a_token() -> None:
    found = problem(SMALL.with_head("scalar"))
    assert by_name(found)["head"] == (64 * 2, 3 * TOKENS * 4, 6 * 64 * TOKENS)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_token_goes_through_some_experts(recompute: bool) -> None:
    """Two of four, of 3 x 64 x 96 each, and the whole router."""
    found = problem(replace(SMALL, experts=Experts(count=4, per_token=2)), recompute=recompute)
    elements, active = 4 * 3 * 64 * 96 + 4 * 64, 2 * 3 * 64 * 96 + 4 * 64
    kept = 2 * 64 + 2 * 2 * 64 + 4 * 2 * 96
    flops = (8 if recompute else 6) * active * TOKENS
    assert by_name(found)["layers.1.experts"] == (elements * 2, 0 if recompute else TOKENS * kept * 2, flops)
    assert next(op.most_slices for op in found.operators if op.kind == "experts") == 1


def test_a_plain_mlp_has_two_projections() -> None:
    found = by_name(problem(replace(SMALL, mlp="plain")))
    assert found["layers.0.up"][1] == TOKENS * (2 * 64 + 96) * 2
    assert found["layers.0.down"][1] == TOKENS * 96 * 2
    assert "layers.0.gate" not in found


def test_samples_have_a_token_at_least() -> None:
    assert problem(sequence_length=1).operators
    with pytest.raises(UserError, match="sequence_length=0 must be at least 1"):
        problem(sequence_length=0)
