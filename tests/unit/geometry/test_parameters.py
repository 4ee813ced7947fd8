"""The parameters of a decoder, by hand: names, shapes, what tensor parallelism divides, stages, values at the start."""

from dataclasses import replace

import pytest

from realhf.architecture.model import DecoderConfig, Experts
from realhf.architecture.transformers_config import TransformersConfig
from realhf.geometry.boxes import Box, box_of
from realhf.geometry.parameters import ParameterSpec, decoder_parameters, parameter_count, sees_own_tokens

PLAIN = DecoderConfig(hidden_size=12, intermediate_size=10, num_layers=2, num_heads=6, num_kv_heads=2, vocab_size=7)
LAYER = "model.layers.1."


def row(spec: ParameterSpec) -> tuple[tuple[int, ...], int | None, str]:
    return spec.shape, spec.shard_dim, spec.initial


def layer_of(model: DecoderConfig) -> dict[str, tuple[tuple[int, ...], int | None, str]]:
    """The second layer, in order."""
    found = {spec.name.removeprefix(LAYER): spec for spec in decoder_parameters(model) if spec.name.startswith(LAYER)}
    assert {(spec.place, spec.layer, spec.tied) for spec in found.values()} == {("layer", 1, False)}
    return {name: row(spec) for name, spec in found.items()}


LLAMA_LAYER = {
    "input_layernorm.weight": ((12,), None, "one"),
    "self_attn.q_proj.weight": ((12, 12), 0, "normal"),
    "self_attn.k_proj.weight": ((4, 12), 0, "normal"),
    "self_attn.v_proj.weight": ((4, 12), 0, "normal"),
    "self_attn.o_proj.weight": ((12, 12), 1, "normal"),
    "post_attention_layernorm.weight": ((12,), None, "one"),
    "mlp.gate_proj.weight": ((10, 12), 0, "normal"),
    "mlp.up_proj.weight": ((10, 12), 0, "normal"),
    "mlp.down_proj.weight": ((12, 10), 1, "normal"),
}


def test_a_layer_of_llama() -> None:
    """Outputs of q, k, v, gate and up are divided, and inputs of o and down (Shoeybi et al., 2019, section 3)."""
    assert list(layer_of(PLAIN).items()) == list(LLAMA_LAYER.items())
    assert parameter_count(PLAIN) == 2 * (2 * 144 + 2 * 48 + 3 * 120 + 2 * 12) + 12 + 2 * 7 * 12


def test_biases_are_divided_with_the_outputs_or_whole() -> None:
    found = layer_of(replace(PLAIN, qkv_bias=True, attention_output_bias=True, mlp_bias=True))
    assert {name: values for name, values in found.items() if name.endswith(".bias")} == {
        "self_attn.q_proj.bias": ((12,), 0, "zero"),
        "self_attn.k_proj.bias": ((4,), 0, "zero"),
        "self_attn.v_proj.bias": ((4,), 0, "zero"),
        "self_attn.o_proj.bias": ((12,), None, "zero"),
        "mlp.gate_proj.bias": ((10,), 0, "zero"),
        "mlp.up_proj.bias": ((10,), 0, "zero"),
        "mlp.down_proj.bias": ((12,), None, "zero"),
    }
    assert {name: values for name, values in found.items() if not name.endswith(".bias")} == LLAMA_LAYER
    qkv = layer_of(replace(PLAIN, qkv_bias=True))
    assert [name for name in qkv if name.endswith(".bias")] == [f"self_attn.{n}_proj.bias" for n in "qkv"]


def test_what_other_families_add_or_leave_out() -> None:
    normed = layer_of(replace(PLAIN, qk_norm=True, norm="rms_plus_one"))
    assert normed["self_attn.q_norm.weight"] == normed["self_attn.k_norm.weight"] == ((2,), None, "one")
    assert normed["input_layernorm.weight"] == ((12,), None, "zero")  # multiplied by 1 + weight
    layer_norm = layer_of(replace(PLAIN, norm="layer", mlp="plain"))
    assert layer_norm["input_layernorm.weight"] == ((12,), None, "one")
    assert layer_norm["input_layernorm.bias"] == layer_norm["post_attention_layernorm.bias"] == ((12,), None, "zero")
    assert [name for name in layer_norm if name.startswith("mlp.")] == ["mlp.up_proj.weight", "mlp.down_proj.weight"]


def test_a_mixture_of_experts_has_a_router_that_is_not_divided() -> None:
    found = layer_of(replace(PLAIN, experts=Experts(count=2, per_token=1)))
    one = {name.removeprefix("mlp."): values for name, values in LLAMA_LAYER.items() if name.startswith("mlp.")}
    assert {name: values for name, values in found.items() if name.startswith("mlp.")} == {
        "mlp.gate.weight": ((2, 12), None, "normal"),
        **{f"mlp.experts.{number}.{name}": values for number in (0, 1) for name, values in one.items()},
    }


HEADS = {
    "lm": (PLAIN, [("lm_head.weight", (7, 12), 0, "head", False)]),
    "tied": (replace(PLAIN, tied_embeddings=True), []),
    "scalar": (replace(PLAIN, head="scalar"), [("score.weight", (1, 12), None, "head", False)]),
}


@pytest.mark.parametrize("name", HEADS)
def test_outside_of_the_layers(name: str) -> None:
    model, head = HEADS[name]
    found = [
        (spec.name, spec.shape, spec.shard_dim, spec.place, spec.tied)
        for spec in decoder_parameters(model)
        if spec.layer == -1
    ]
    embedding = ("model.embed_tokens.weight", (7, 12), 0, "embedding", name == "tied")
    assert found == [embedding, ("model.norm.weight", (12,), None, "head", False), *head]


def test_learned_positions_are_on_every_rank_of_the_first_stage() -> None:
    spec = decoder_parameters(replace(PLAIN, positions="learned", max_positions=9))[1]
    assert spec == ParameterSpec("model.embed_positions.weight", (9, 12), None, "embedding")


def test_stages_of_a_parameter() -> None:
    def stages(spec: ParameterSpec) -> list[int]:
        return [stage for stage in range(3) if spec.is_on_stage({0: [0, 3], 1: [1], 2: [2]}[stage], stage, 3)]

    embedding, head = ParameterSpec("e", (4, 4), 0, "embedding"), ParameterSpec("h", (4, 4), 0, "head")
    assert (stages(embedding), stages(replace(embedding, tied=True)), stages(head)) == ([0], [0, 2], [2])
    assert [stages(ParameterSpec("a", (4,), None, "layer", layer)) for layer in range(4)] == [[0], [1], [2], [0]]


def test_what_a_tensor_parallel_rank_holds() -> None:
    rows, columns = ParameterSpec("a", (6, 4), 0, "head"), ParameterSpec("b", (6, 4), 1, "head")
    whole = ParameterSpec("c", (6, 4), None, "head")
    assert box_of(rows, 2, 1) == Box("a", (3, 0), (3, 4))
    assert box_of(columns, 4, 2) == Box("b", (0, 2), (6, 1))
    assert box_of(whole, 4, 2) == Box("c", (0, 0), (6, 4))
    with pytest.raises(ValueError, match="tp=4 does not divide dimension 0 of a, whose extent is 6"):
        box_of(rows, 4, 0)


def test_gradients_that_sequence_parallelism_sums() -> None:
    """Of replicated parameters that see only the rank's own tokens; norms of heads see all tokens of its heads."""
    found = {spec.name for spec in decoder_parameters(replace(PLAIN, qk_norm=True)) if sees_own_tokens(spec)}
    norms = {f"model.layers.{n}.{kind}_layernorm.weight" for n in (0, 1) for kind in ("input", "post_attention")}
    assert found == {*norms, "model.norm.weight"}


def test_stages_of_models_of_transformers() -> None:
    """What stands before the first layer is of the embedding, what stands behind it of the head."""
    names = ["wte.weight", "h.0.attn.weight", "h.1.mlp.weight", "ln_f.weight", "lm_head.2.weight", "lm_head.weight"]
    sizes = {"hidden_size": 12, "intermediate_size": 10, "num_heads": 6, "num_kv_heads": 2, "vocab_size": 7}
    model = TransformersConfig(
        config="{}",
        parameters=tuple((name, (3,)) for name in names),
        head_parameters=("lm_head.weight",),
        num_layers=2,
        **sizes,
    )
    found = [(spec.name, spec.place, spec.layer) for spec in decoder_parameters(model)]
    assert found == [
        ("wte.weight", "embedding", -1),
        ("h.0.attn.weight", "layer", 0),
        ("h.1.mlp.weight", "layer", 1),
        ("ln_f.weight", "head", -1),
        ("lm_head.2.weight", "head", -1),
        ("lm_head.weight", "head", -1),
    ]
    scalar = decoder_parameters(replace(model, head="scalar"))
    assert scalar[-1] == ParameterSpec("score.weight", (1, 12), None, "head")
    assert [spec.name for spec in scalar[:-1]] == names[:-1]
    assert {spec.shard_dim for spec in scalar} == {None}
