"""Operators by hand: their names and order, which of them can be cut, and what rules of modes name."""

import re
from dataclasses import replace

import pytest

from realhf.architecture.model import DecoderConfig, Experts
from realhf.base.errors import UserError
from realhf.geometry.operators import (
    can_be_cut,
    cut_dim,
    is_projection,
    kind_of,
    names_operator,
    operator_of,
    operators,
    slice_modes,
)
from realhf.geometry.parameters import ParameterSpec

PLAIN = DecoderConfig(hidden_size=12, intermediate_size=10, num_layers=2, num_heads=6, num_kv_heads=2, vocab_size=7)
PROJECTIONS = ["q", "k", "v", "o", "gate", "up", "down"]
SPARSE = replace(PLAIN, experts=Experts(count=2, per_token=1))


def test_operators_stand_in_the_order_of_the_forward_pass() -> None:
    found = operators(replace(PLAIN, num_layers=1, positions="learned", max_positions=9, qkv_bias=True))
    attention, mlp = "model.layers.0.self_attn.", "model.layers.0.mlp."
    assert {name: [spec.name for spec in specs] for name, specs in found.items()} == {
        "embedding": ["model.embed_tokens.weight"],
        "positions": ["model.embed_positions.weight"],
        "norms": [
            "model.layers.0.input_layernorm.weight",
            *(f"{attention}{part}_proj.bias" for part in "qkv"),
            "model.layers.0.post_attention_layernorm.weight",
            "model.norm.weight",
        ],
        **{f"layers.0.{part}": [f"{attention}{part}_proj.weight"] for part in "qkvo"},
        **{f"layers.0.{part}": [f"{mlp}{part}_proj.weight"] for part in ("gate", "up", "down")},
        "head": ["lm_head.weight"],
    }
    first = ["embedding", "positions", "norms"]
    assert list(found) == [*first, *(f"layers.0.{part}" for part in PROJECTIONS), "head"]


def test_experts_are_one_operator_of_a_layer_with_their_router() -> None:
    found = operators(replace(SPARSE, num_layers=1))
    assert [name for name in found if name.startswith("layers.")] == [
        *(f"layers.0.{n}" for n in "qkvo"),
        "layers.0.experts",
    ]
    parts = ("gate_proj", "up_proj", "down_proj")
    assert [spec.name.removeprefix("model.layers.0.mlp.") for spec in found["layers.0.experts"]] == [
        "gate.weight",
        *(f"experts.{number}.{part}.weight" for number in (0, 1) for part in parts),
    ]


@pytest.mark.parametrize(
    ("name", "shape", "operator"),
    [
        ("score.weight", (1, 12), "head"),
        ("lm_head.weight", (7, 12), "head"),
        ("model.layers.3.self_attn.q_proj.bias", (12,), "norms"),
        ("model.layers.3.mlp.gate.weight", (2, 12), "layers.3.experts"),
        ("model.layers.3.mlp.gate_proj.weight", (10, 12), "layers.3.gate"),
    ],
)
def test_the_operator_of_a_parameter(name: str, shape: tuple[int, ...], operator: str) -> None:
    assert operator_of(ParameterSpec(name, shape, None, "layer", 3)) == operator


def test_kinds_and_projections() -> None:
    names = ["embedding", "norms", "head", "layers.10.q", "layers.0.experts"]
    assert [kind_of(name) for name in names] == ["embedding", "norms", "head", "q", "experts"]
    assert [is_projection(name) for name in names] == [False, False, False, True, False]


@pytest.mark.parametrize(
    ("model", "cut"),
    [
        (PLAIN, ["embedding", "head", "layers.0.q"]),
        (replace(PLAIN, tied_embeddings=True), ["layers.0.q"]),
        (replace(PLAIN, head="scalar"), ["embedding", "layers.0.q"]),
        (SPARSE, ["embedding", "head", "layers.0.q"]),
    ],
    ids=["language model", "tied", "critic", "experts"],
)
def test_what_can_have_several_slices(model: DecoderConfig, cut: list[str]) -> None:
    """Not an embedding that is the head as well, and not a critic's head of one row."""
    names = ["embedding", "head", "layers.0.q", "layers.0.experts", "norms", "positions"]
    assert [name for name in names if can_be_cut(name, model)] == cut


def test_a_head_is_cut_along_the_vocabulary_and_all_else_along_columns() -> None:
    assert [cut_dim(name) for name in ("head", "embedding", "layers.0.q")] == [0, 1, 1]


@pytest.mark.parametrize(
    ("pattern", "name", "names"),
    [
        ("*", "layers.0.q", True),
        ("*", "norms", True),
        ("layers.*.q", "layers.12.q", True),
        ("layers.*.q", "layers.12.k", False),
        ("layers.*", "layers.0.q", False),
        ("*.*", "norms", False),
        ("layers.0-3.q", "layers.0.q", True),
        ("layers.0-3.q", "layers.3.q", True),
        ("layers.2-3.q", "layers.1.q", False),
        ("layers.2-3.q", "layers.4.q", False),
        ("layers.9-11.q", "layers.10.q", True),
        ("layers.a-3.q", "layers.2.q", False),
        ("layers.0-b.q", "layers.2.q", False),
        ("layers.0.0-3", "layers.0.q", False),
        ("layers.0.[qk]", "layers.0.k", True),
        ("layers.0.Q", "layers.0.q", False),
    ],
)
def test_what_a_pattern_names(pattern: str, name: str, names: bool) -> None:
    """Part by part: `*` does not go over a dot, and numbers of a range count as numbers."""
    assert names_operator(pattern, name) is names


def test_a_later_rule_counts() -> None:
    found = slice_modes(PLAIN, (("layers.*.q", "sharded"), ("layers.1.q", "2 replicated"), ("head", "replicated")))
    assert found["layers.0.q"] == ("sharded",)
    assert found["layers.1.q"] == ("replicated", "replicated")
    assert found["head"] == ("replicated",)
    assert found["layers.0.k"] == found["norms"] == found["embedding"] == ("zero1",)
    assert list(found) == list(operators(PLAIN))


@pytest.mark.parametrize(
    ("rules", "norms"),
    [
        ((("*", "replicated"),), ("replicated",)),
        ((("norms", "replicated"), ("*", "sharded")), ("zero1",)),
        ((("norms", "replicated"), ("*", "2 replicated")), ("zero1",)),
        ((("n*", "replicated"),), ("replicated",)),
        ((("norms", "replicated"), ("layers.*.*", "sharded")), ("replicated",)),
    ],
    ids=["one mode for all", "norms are not gathered", "norms are not cut", "a part of the name", "layers alone"],
)
def test_norms_follow_a_rule_for_all_as_far_as_they_can(
    rules: tuple[tuple[str, str], ...], norms: tuple[str, ...]
) -> None:
    found = slice_modes(PLAIN, rules)
    assert found["norms"] == norms
    if rules[-1][0] == "*":
        assert len({modes for name, modes in found.items() if name != "norms"}) == 1


@pytest.mark.parametrize(
    ("model", "rule", "message"),
    [
        (
            PLAIN,
            ("layers.2.q", "zero1"),
            "data_parallel: 'layers.2.q' names no operator of this model; its operators are embedding, norms, head, "
            "layers.N.q, layers.N.k, layers.N.v, layers.N.o, layers.N.gate, layers.N.up, layers.N.down; write one of "
            "them, 'layers.0-3.q' for some layers, 'layers.*.q' for all, or '*'",
        ),
        (PLAIN, ("norms", "sharded"), "'norms' cannot be sharded: norms are used everywhere; write zero1"),
        (PLAIN, ("norms", "2 zero1"), "data_parallel: 'norms' cannot have 2 slices: projections of layers can"),
        (SPARSE, ("layers.1.*", "3 sharded"), "data_parallel: 'layers.1.experts' cannot have 3 slices"),
        (replace(PLAIN, tied_embeddings=True), ("*", "2 zero1"), "data_parallel: 'embedding' cannot have 2 slices"),
    ],
)  # fmt: skip
def test_a_rule_that_an_operator_cannot_follow(model: DecoderConfig, rule: tuple[str, str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        slice_modes(model, (rule,))
