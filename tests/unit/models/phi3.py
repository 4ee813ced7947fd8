"""Phi-3 as the file of a family: what a contributor writes for one that the package does not have."""

from realhf.architecture.families.family import Content, Family, Source, same_name
from realhf.architecture.families.fields import Fields
from realhf.architecture.families.llama import read_llama_kin, write_llama_kin
from realhf.architecture.model import DecoderConfig


def _read(fields: Fields) -> DecoderConfig:
    window = None if fields.content.get("sliding_window") is None else fields.number("sliding_window")
    return read_llama_kin(fields, eps=1e-5, sliding_window=window)


def _write(model: DecoderConfig) -> Content:
    return write_llama_kin(model) | {"sliding_window": model.sliding_window}


def _source(parameter: str, shape: tuple[int, ...], model: DecoderConfig) -> Source:
    """Query, key and value are one tensor, and so are gate and up."""
    owner, _, leaf = parameter.removesuffix(".weight").rpartition(".")
    query, kv, inner = model.query_size, model.kv_size, model.intermediate_size
    joined = {
        "q_proj": ("qkv_proj", 0, query + 2 * kv),
        "k_proj": ("qkv_proj", query, query + 2 * kv),
        "v_proj": ("qkv_proj", query + kv, query + 2 * kv),
        "gate_proj": ("gate_up_proj", 0, 2 * inner),
        "up_proj": ("gate_up_proj", inner, 2 * inner),
    }
    if leaf not in joined:
        return same_name(parameter, shape, model)
    name, start, rows = joined[leaf]
    return Source(f"{owner}.{name}.weight", (rows, *shape[1:]), (start, 0))


PHI3 = Family(model_type="phi3", class_prefix="Phi3", read=_read, write=_write, source=_source)
