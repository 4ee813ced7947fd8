"""Hugging Face's `config.json`: what it says of a decoder, for every family there is, and how to write one.

A family is how Hugging Face calls a set of fields of `DecoderConfig`. A decoder can be written as any family whose
fields are enough to read the same decoder back.
"""

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from realhf.architecture.model import MAX_LAYERS, Activation, DecoderConfig, Experts, RopeScaling, RopeScalingKind
from realhf.base.errors import UserError
from realhf.base.files import BadContentError, decode_json
from realhf.base.numbers import check_range

Content = dict[str, Any]
T = TypeVar("T")

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
_ACTIVATION_NAMES: dict[Activation, str] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "relu": "relu",
}
_MAX_REAL = 10**12  # above every range that is checked where a field is used

_ROPE_KINDS: dict[str, RopeScalingKind] = {
    "default": "none",
    "linear": "linear",
    "dynamic": "dynamic",
    "llama3": "llama3",
}


@dataclass(frozen=True)
class Family:
    """One `model_type` of Hugging Face: how its config.json is read and written, and the names of its classes."""

    model_type: str
    class_prefix: str
    read: "Callable[[_Fields], DecoderConfig]"
    write: Callable[[DecoderConfig], Content]


class _Fields:
    """The fields of a config.json, each checked when it is asked for; a null counts as missing."""

    def __init__(self, content: Mapping[str, Any], path: Path | str):
        self.content, self.path = content, path

    def number(self, name: str, default: int | None = None) -> int:
        value = self.content.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            what = "is missing" if name not in self.content else f"is {_shown(value)}"
            raise UserError(f"{self.path}: {name} {what}; it must be a whole number of at least 1")
        return value

    def real(self, name: str, default: float) -> float:
        value = self.content.get(name)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise UserError(f"{self.path}: {name} is {_shown(value)}; it must be a number")
        return float(check_range(f"{self.path}: {name}", value, -_MAX_REAL, _MAX_REAL))

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.content.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise UserError(f"{self.path}: {name} is {_shown(value)}; it must be true or false")
        return value

    def choice(self, name: str, default: str, known: Mapping[str, T]) -> T:
        value = self.content.get(name) or default
        if not isinstance(value, str) or value not in known:
            raise UserError(f"{self.path}: {name}={_shown(value)} is not supported, only {', '.join(known)}")
        return known[value]

    def activation(self, name: str, default: str) -> Activation:
        return self.choice(name, default, _ACTIVATIONS)

    def section(self, name: str) -> "_Fields | None":
        value = self.content.get(name)
        return _Fields(value, f"{self.path}: {name}") if isinstance(value, Mapping) else None

    def refuse(self, name: str, *allowed: object) -> None:
        """Raises UserError where a field is given and is none of the `allowed` values: it would change the model."""
        value = self.content.get(name)
        if value is not None and value not in allowed:
            raise UserError(
                f"{self.path}: {name}={_shown(value)} is not supported; choose a checkpoint with {name}="
                + " or ".join(map(repr, allowed))
            )


def _shown(value: object) -> str:
    """A value from outside, for a message: cut where it is long or nested deeply."""
    return reprlib.repr(value)


def read_config(path: Path) -> DecoderConfig:
    """The decoder, under a language-model head, that a Hugging Face `config.json` describes.

    Raises:
        UserError: the file cannot be read, lacks a field, is of an unknown family or asks for what is not supported.
    """
    return decoder_of(config_content(path), path)


def config_content(path: Path) -> Content:
    """What a config.json holds; the language model's part of it, where it describes more.

    Raises:
        UserError: the file cannot be read or is not JSON.
    """
    try:
        content = decode_json(path.read_bytes(), dict[str, Any])
    except OSError as error:
        raise UserError(f"{path}: cannot read the architecture ({error.strerror}); give a config.json") from None
    except BadContentError as error:
        raise UserError(f"{path}: not a config.json: {error}; give that of a Hugging Face model") from None
    if "hidden_size" not in content and isinstance(content.get("text_config"), dict):
        nested: Content = content["text_config"]
        return nested
    return content


def family_of(content: Mapping[str, Any], path: Path | str = "config.json") -> Family:
    """The family a config.json is of. Raises UserError where it does not say, and for one that is not supported."""
    model_type = content.get("model_type")
    if model_type is None:
        raise UserError(
            f"{path}: model_type is missing, so the model's family is unknown; add it, one of {', '.join(FAMILIES)}"
        )
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UserError(
            f"{path}: model_type={_shown(model_type)} is not supported; choose a checkpoint of {', '.join(FAMILIES)}"
        )
    return FAMILIES[model_type]


def decoder_of(content: Mapping[str, Any], path: Path | str = "config.json") -> DecoderConfig:
    """The decoder of the content of a config.json; `path` is for errors. Raises as `read_config`."""
    fields = _Fields(content, path)
    family = family_of(content, path)
    fields.refuse("quantization_config")
    try:
        return family.read(fields)
    except UserError as error:
        text = str(error)
        raise UserError(text if text.startswith(str(path)) else f"{path}: {text}") from None


def write_config(model: DecoderConfig, dtype: str, like: Mapping[str, Any] | None = None) -> Content:
    """The content of a config.json from which transformers makes the same decoder.

    `like` is the config.json of the checkpoint that the model came from: it is kept, with the family and the fields
    that the decoder does not know (end tokens, longest sequence), if it describes the same decoder.

    Raises:
        UserError: no family has all that the decoder needs.
    """
    lm = model.with_head("lm")
    content = _content(lm, like)
    content["tie_word_embeddings"] = model.tied_embeddings
    prefix = family_of(content).class_prefix
    content["architectures"] = [f"{prefix}For{'CausalLM' if model.head == 'lm' else 'SequenceClassification'}"]
    if prefix == "GPT2" and model.head == "lm":
        content["architectures"] = ["GPT2LMHeadModel"]
    if model.head == "scalar":
        content |= {"num_labels": 1, "id2label": {"0": "VALUE"}, "label2id": {"VALUE": 0}}
    return content | {"torch_dtype": dtype}


def _content(lm: DecoderConfig, like: Mapping[str, Any] | None) -> Content:
    if like is not None and _trunk(decoder_of(like)) == _trunk(lm):
        return {key: value for key, value in like.items() if key not in ("dtype", "transformers_version")}
    for family in FAMILIES.values():
        content = family.write(lm) | {"model_type": family.model_type}
        try:
            if decoder_of(content) == lm:
                return content
        except UserError:
            continue
    raise UserError(
        f"no Hugging Face family has all that this decoder needs ({lm}); those there are: {', '.join(FAMILIES)}"
    )


def _trunk(model: DecoderConfig) -> DecoderConfig:
    return model.with_head("scalar").with_head("lm")


def _read_llama_kin(
    fields: _Fields,
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


def _read_rope(fields: _Fields, theta: float) -> tuple[RopeScaling, float]:
    """From `rope_parameters` (transformers 5), else from `rope_scaling` and `rope_theta`."""
    given = fields.section("rope_parameters") or fields.section("rope_scaling") or _Fields({}, fields.path)
    theta = given.real("rope_theta", fields.real("rope_theta", theta))
    name = "rope_type" if given.content.get("rope_type") else "type"  # of older versions
    kind = given.choice(name, "default", _ROPE_KINDS)
    given.refuse("partial_rotary_factor", 1, 1.0)
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


def _write_llama_kin(model: DecoderConfig) -> Content:
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
        "hidden_act": _ACTIVATION_NAMES[model.activation],
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


def _read_llama(fields: _Fields) -> DecoderConfig:
    bias = fields.flag("attention_bias")
    return _read_llama_kin(fields, qkv_bias=bias, attention_output_bias=bias, mlp_bias=fields.flag("mlp_bias"))


def _write_llama(model: DecoderConfig) -> Content:
    return _write_llama_kin(model) | {"mlp_bias": model.mlp_bias}


def _read_mistral(fields: _Fields) -> DecoderConfig:
    fields.refuse("layer_types")
    window = fields.number("sliding_window", 4096) if "sliding_window" not in fields.content else _window(fields)
    kv_heads = fields.number("num_key_value_heads", 8)
    return _read_llama_kin(fields, num_kv_heads=kv_heads, sliding_window=window)


def _window(fields: _Fields) -> int | None:
    return None if fields.content.get("sliding_window") is None else fields.number("sliding_window")


def _write_mistral(model: DecoderConfig) -> Content:
    return _write_llama_kin(model) | {"sliding_window": model.sliding_window}


def _read_layer_windows(fields: _Fields) -> dict[str, Any]:
    """Qwen's: a window in the layers of `layer_types`, or in those from `max_window_layers` on."""
    if not fields.flag("use_sliding_window") or fields.content.get("sliding_window", 4096) is None:
        return {}
    layers = check_range("num_hidden_layers", fields.number("num_hidden_layers"), 1, MAX_LAYERS)
    window, types = fields.number("sliding_window", 4096), fields.content.get("layer_types")
    if types is None:
        first = fields.real("max_window_layers", 28)
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    kinds = ("sliding_attention", "full_attention")
    if not isinstance(types, list) or len(types) != layers or not all(kind in kinds for kind in types):
        raise UserError(f"{fields.path}: layer_types={_shown(types)} must say {' or '.join(kinds)} {layers} times")
    full = tuple(i for i, kind in enumerate(types) if kind == "full_attention")
    return {} if len(full) == layers else {"sliding_window": window, "full_attention_layers": full}


def _write_layer_windows(model: DecoderConfig) -> Content:
    if model.sliding_window is None:
        return {"use_sliding_window": False}
    types = ["full_attention" if model.window(i) is None else "sliding_attention" for i in range(model.num_layers)]
    return {"use_sliding_window": True, "sliding_window": model.sliding_window, "layer_types": types}


def _read_qwen2(fields: _Fields) -> DecoderConfig:
    return _read_llama_kin(fields, qkv_bias=True, **_read_layer_windows(fields))


def _write_qwen2(model: DecoderConfig) -> Content:
    return _write_llama_kin(model) | _write_layer_windows(model)


def _read_qwen3(fields: _Fields) -> DecoderConfig:
    bias = fields.flag("attention_bias")
    windows = _read_layer_windows(fields)
    return _read_llama_kin(fields, head_dim=128, qk_norm=True, qkv_bias=bias, attention_output_bias=bias, **windows)


def _read_gemma(fields: _Fields) -> DecoderConfig:
    fields.refuse("use_bidirectional_attention", False)
    bias = fields.flag("attention_bias")
    activation = fields.activation("hidden_act", "gelu_pytorch_tanh")
    return _read_llama_kin(
        fields,
        tied=True,
        head_dim=256,
        # Google's own files say "gelu" and mean the approximation; transformers corrects it, too.
        activation="gelu_tanh" if activation == "gelu" else activation,
        qkv_bias=bias,
        attention_output_bias=bias,
        norm="rms_plus_one",
        scale_embeddings=True,
    )


def _read_mixtral(fields: _Fields) -> DecoderConfig:
    experts = Experts(count=fields.number("num_local_experts", 8), per_token=fields.number("num_experts_per_tok", 2))
    kv_heads = fields.number("num_key_value_heads", 8)
    return _read_llama_kin(
        fields, theta=1e6, eps=1e-5, num_kv_heads=kv_heads, sliding_window=_window(fields), experts=experts
    )


def _write_mixtral(model: DecoderConfig) -> Content:
    experts = {"num_local_experts": model.experts.count, "num_experts_per_tok": model.experts.per_token}
    return _write_mistral(model) | experts


def _read_qwen3_moe(fields: _Fields) -> DecoderConfig:
    fields.refuse("mlp_only_layers", [])
    fields.refuse("decoder_sparse_step", 1)
    bias = fields.flag("attention_bias")
    return _read_llama_kin(
        fields,
        qk_norm=True,
        qkv_bias=bias,
        attention_output_bias=bias,
        intermediate_size=fields.number("moe_intermediate_size", 768),
        sliding_window=fields.number("sliding_window", 4096) if fields.flag("use_sliding_window") else None,
        experts=Experts(
            count=fields.number("num_local_experts", fields.number("num_experts", 128)),  # by version
            per_token=fields.number("num_experts_per_tok", 8),
            normalised=fields.flag("norm_topk_prob"),
        ),
    )


def _write_qwen3_moe(model: DecoderConfig) -> Content:
    return _write_llama_kin(model) | {
        "use_sliding_window": model.sliding_window is not None,
        "sliding_window": model.sliding_window,
        "moe_intermediate_size": model.intermediate_size,
        "num_experts": model.experts.count,
        "num_experts_per_tok": model.experts.per_token,
        "norm_topk_prob": model.experts.normalised,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _read_gpt2(fields: _Fields) -> DecoderConfig:
    fields.refuse("scale_attn_weights", True)
    fields.refuse("scale_attn_by_inverse_layer_idx", False)
    fields.refuse("add_cross_attention", False)
    hidden, heads = fields.number("n_embd"), fields.number("n_head")
    return DecoderConfig(
        hidden_size=hidden,
        intermediate_size=fields.number("n_inner", 4 * hidden),
        num_layers=fields.number("n_layer"),
        num_heads=heads,
        num_kv_heads=heads,
        vocab_size=fields.number("vocab_size"),
        tied_embeddings=fields.flag("tie_word_embeddings", True),
        rms_norm_eps=fields.real("layer_norm_epsilon", 1e-5),
        norm="layer",
        activation=fields.activation("activation_function", "gelu_new"),
        mlp="plain",
        qkv_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        positions="learned",
        max_positions=fields.number("n_positions"),
    )


def _write_gpt2(model: DecoderConfig) -> Content:
    return {
        "n_embd": model.hidden_size,
        "n_inner": model.intermediate_size,
        "n_layer": model.num_layers,
        "n_head": model.num_heads,
        "n_positions": model.max_positions,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tied_embeddings,
        "layer_norm_epsilon": model.rms_norm_eps,
        "activation_function": _ACTIVATION_NAMES[model.activation],
    }


# The order is that in which a family is looked for that can express a decoder.
FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family("llama", "Llama", _read_llama, _write_llama),
        Family("mistral", "Mistral", _read_mistral, _write_mistral),
        Family("qwen2", "Qwen2", _read_qwen2, _write_qwen2),
        Family("qwen3", "Qwen3", _read_qwen3, _write_qwen2),
        Family("gemma", "Gemma", _read_gemma, _write_llama_kin),
        Family("mixtral", "Mixtral", _read_mixtral, _write_mixtral),
        Family("qwen3_moe", "Qwen3Moe", _read_qwen3_moe, _write_qwen3_moe),
        Family("gpt2", "GPT2", _read_gpt2, _write_gpt2),
    )
}
