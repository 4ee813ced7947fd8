"""Mistral, and Mixtral: a mixture of experts in every layer."""

from realhf.architecture.families.family import Content, Family, Source, same_name
from realhf.architecture.families.fields import Fields
from realhf.architecture.families.llama import read_llama_kin, write_llama_kin
from realhf.architecture.model import DecoderConfig, Experts


def _read_mistral(fields: Fields) -> DecoderConfig:
    fields.refuse("layer_types")
    window = fields.number("sliding_window", 4096) if "sliding_window" not in fields.content else _window(fields)
    kv_heads = fields.number("num_key_value_heads", 8)
    return read_llama_kin(fields, num_kv_heads=kv_heads, sliding_window=window)


def _window(fields: Fields) -> int | None:
    return None if fields.content.get("sliding_window") is None else fields.number("sliding_window")


def _write_mistral(model: DecoderConfig) -> Content:
    return write_llama_kin(model) | {"sliding_window": model.sliding_window}


def _read_mixtral(fields: Fields) -> DecoderConfig:
    experts = Experts(count=fields.number("num_local_experts", 8), per_token=fields.number("num_experts_per_tok", 2))
    kv_heads = fields.number("num_key_value_heads", 8)
    return read_llama_kin(
        fields, theta=1e6, eps=1e-5, num_kv_heads=kv_heads, sliding_window=_window(fields), experts=experts
    )


def _write_mixtral(model: DecoderConfig) -> Content:
    experts = {"num_local_experts": model.experts.count, "num_experts_per_tok": model.experts.per_token}
    return _write_mistral(model) | experts


_LINEARS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def _mixtral_source(parameter: str, shape: tuple[int, ...], model: DecoderConfig) -> Source:
    """`...mlp.experts.3.up_proj.weight` is `...block_sparse_moe.experts.3.w3.weight`."""
    if ".mlp." not in parameter:
        return same_name(parameter, shape, model)
    owner, leaf, weight = parameter.replace(".mlp.", ".block_sparse_moe.").rsplit(".", 2)
    return same_name(f"{owner}.{_LINEARS.get(leaf, leaf)}.{weight}", shape, model)


MISTRAL = Family(model_type="mistral", class_prefix="Mistral", read=_read_mistral, write=_write_mistral)
MIXTRAL = Family(
    model_type="mixtral", class_prefix="Mixtral", read=_read_mixtral, write=_write_mixtral, source=_mixtral_source
)
