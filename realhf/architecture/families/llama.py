"""Llama, and the fields of `config.json` that its kin share."""

from dataclasses import replace
from typing import Any

from realhf.architecture.families.family import ACTIVATION_NAMES, Content, Family
from realhf.architecture.families.fields import Fields
from realhf.architecture.model import Activation, DecoderConfig, RopeScaling, RopeScalingKind
from realhf.base.errors import UserError

_ROPE_KINDS: dict[str, RopeScalingKind] = {
    "default": "none",
    "linear": "linear",
    "dynamic": "dynamic",
    "llama3": "llama3",
}


def read_llama_kin(
    fields: Fields,
    *,
    tied: bool = False,
    head_dim: int | None = None,
    activation: Activation | None = None,
    theta: float = 10_000.0,
    eps: float = 1e-6,
    **family: Any,
) -> DecoderConfig:
    """The fields that all families but GPT-2 share; the arguments are a family's defaults."""
    heads = fields.number("num_attention_heads")
    scaling, theta = _read_rope(fields, theta)
    config = DecoderConfig(
        hidden_size=fields.number("hidden_size"),
        intermediate_size=fields.number("intermediate_size"),
        num_layers=fields.number("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=fields.number("num_key_value_heads", heads),
        vocab_size=fields.number("vocab_size"),
        tied_embeddings=fields.flag("tie_word_embeddings", tied),
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=fields.real("rms_norm_eps", eps),
        attention_head_dim=fields.number("head_dim", head_dim or 0) or None,
        activation=activation or fields.activation("hidden_act", "silu"),
        max_position_embeddings=fields.number("max_position_embeddings", 0) or None,
    )
    return replace(config, **family)


def _read_rope(fields: Fields, theta: float) -> tuple[RopeScaling, float]:
    """From `rope_parameters` (transformers 5), else from `rope_scaling` and `rope_theta`."""
    given = fields.section("rope_parameters") or fields.section("rope_scaling") or Fields({}, fields.path)
    theta = given.real("rope_theta", fields.real("rope_theta", theta))
    name = "rope_type" if given.content.get("rope_type") else "type"  # in older versions
    kind = given.choice(name, "default", _ROPE_KINDS)
    for of_rotation in (fields, given):
        of_rotation.refuse("partial_rotary_factor", 1, 1.0)
    if kind == "none":
        return RopeScaling(), theta
    if given.content.get("factor") is None:
        raise UserError(f"{given.path}: factor is missing; {name}={kind!r} needs it")
    factor = given.real("factor", 1.0)
    if kind == "linear":
        return RopeScaling(kind=kind, factor=factor), theta
    if kind == "dynamic":
        return RopeScaling(kind=kind, factor=factor, original_positions=fields.number("max_position_embeddings")), theta
    llama3 = RopeScaling(
        kind=kind,
        factor=factor,
        original_positions=given.number("original_max_position_embeddings"),
        low_frequency_factor=given.real("low_freq_factor", 1.0),
        high_frequency_factor=given.real("high_freq_factor", 4.0),
    )
    return llama3, theta


def write_llama_kin(model: DecoderConfig) -> Content:
    content: Content = {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tied_embeddings,
        "rms_norm_eps": model.rms_norm_eps,
        "hidden_act": ACTIVATION_NAMES[model.activation],
        "rope_theta": model.rope_theta,
        "attention_bias": model.qkv_bias and model.attention_output_bias,
    }
    scaling = model.rope_scaling
    if model.max_position_embeddings is not None:
        content["max_position_embeddings"] = model.max_position_embeddings
    if scaling.kind != "none":
        content["rope_scaling"] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "dynamic":
        content["max_position_embeddings"] = scaling.original_positions
    if scaling.kind == "llama3":
        content.setdefault("max_position_embeddings", int(scaling.original_positions * scaling.factor))
        content["rope_scaling"] |= {
            "original_max_position_embeddings": scaling.original_positions,
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
        }
    return content


def _read_llama(fields: Fields) -> DecoderConfig:
    bias = fields.flag("attention_bias")
    return read_llama_kin(fields, qkv_bias=bias, attention_output_bias=bias, mlp_bias=fields.flag("mlp_bias"))


def _write_llama(model: DecoderConfig) -> Content:
    return write_llama_kin(model) | {"mlp_bias": model.mlp_bias}


LLAMA = Family(model_type="llama", class_prefix="Llama", read=_read_llama, write=_write_llama)
