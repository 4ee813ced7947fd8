"""Qwen2 (and 2.5), Qwen3, and Qwen3's mixture of experts."""

from typing import Any

from realhf.architecture.families.family import Content, Family
from realhf.architecture.families.fields import Fields, shown
from realhf.architecture.families.llama import read_llama_kin, write_llama_kin
from realhf.architecture.model import MAX_LAYERS, DecoderConfig, Experts
from realhf.base.errors import UserError
from realhf.base.numbers import check_range


def _read_layer_windows(fields: Fields) -> dict[str, Any]:
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
        raise UserError(f"{fields.path}: layer_types={shown(types)} must say {' or '.join(kinds)} {layers} times")
    full = tuple(i for i, kind in enumerate(types) if kind == "full_attention")
    return {} if len(full) == layers else {"sliding_window": window, "full_attention_layers": full}


def _write_layer_windows(model: DecoderConfig) -> Content:
    if model.sliding_window is None:
        return {"use_sliding_window": False}
    types = ["full_attention" if model.window(i) is None else "sliding_attention" for i in range(model.num_layers)]
    return {"use_sliding_window": True, "sliding_window": model.sliding_window, "layer_types": types}


def _read_qwen2(fields: Fields) -> DecoderConfig:
    return read_llama_kin(fields, qkv_bias=True, **_read_layer_windows(fields))


def _write_qwen2(model: DecoderConfig) -> Content:
    return write_llama_kin(model) | _write_layer_windows(model)


def _read_qwen3(fields: Fields) -> DecoderConfig:
    bias = fields.flag("attention_bias")
    windows = _read_layer_windows(fields)
    return read_llama_kin(fields, head_dim=128, qk_norm=True, qkv_bias=bias, attention_output_bias=bias, **windows)


def _read_qwen3_moe(fields: Fields) -> DecoderConfig:
    fields.refuse("mlp_only_layers", [])
    fields.refuse("decoder_sparse_step", 1)
    bias = fields.flag("attention_bias")
    return read_llama_kin(
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
    return write_llama_kin(model) | {
        "use_sliding_window": model.sliding_window is not None,
        "sliding_window": model.sliding_window,
        "moe_intermediate_size": model.intermediate_size,
        "num_experts": model.experts.count,
        "num_experts_per_tok": model.experts.per_token,
        "norm_topk_prob": model.experts.normalised,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


QWEN2 = Family(model_type="qwen2", class_prefix="Qwen2", read=_read_qwen2, write=_write_qwen2)
QWEN3 = Family(model_type="qwen3", class_prefix="Qwen3", read=_read_qwen3, write=_write_qwen2)
QWEN3_MOE = Family(model_type="qwen3_moe", class_prefix="Qwen3Moe", read=_read_qwen3_moe, write=_write_qwen3_moe)
