"""The decoder that the fields of a GGUF file describe, and the tensor that holds each of its parameters."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from realhf.architecture.families.fields import Fields, shown
from realhf.architecture.model import DecoderConfig, RopeScaling
from realhf.base.errors import UserError
from realhf.geometry.parameters import decoder_parameters
from realhf.gguf.file import GGUFFile, StoredTensor, gguf_package

# By `general.architecture`; Mistral's models are of "llama". llama.cpp stores the rows of queries and keys of these in
# another order.
_HAS_PERMUTED_ROWS = {"llama": True, "qwen2": False, "qwen3": False}
_EMBEDDING, _HEAD, _ROPE = "token_embd.weight", "output.weight", "rope_freqs.weight"
# Llama 3.1 to 3.3, the only models with such angles; their files have the resulting divisors alone.
_LLAMA3 = {"original_positions": 8192, "low_frequency_factor": 1.0, "high_frequency_factor": 4.0}
_REMEDY = "choose another file of the model, or give its original Hugging Face directory"


def decoder_of(file: GGUFFile) -> DecoderConfig:
    """The decoder under its language-model head.

    Raises:
        UserError: the model is split over files, its architecture is unknown, a field is missing, or has a value that
            the decoder cannot have.
    """
    if (parts := file.fields.get("split.count", 1)) not in (0, 1):
        raise UserError(
            f"{file.path}: it is one of {shown(parts)} files of a split model, and only a whole one is read; merge "
            "them (llama-gguf-split --merge)"
        )
    name = file.fields.get("general.architecture")
    if name not in _HAS_PERMUTED_ROWS:
        raise UserError(
            f"{file.path}: general.architecture={shown(name)} is not supported, only {', '.join(_HAS_PERMUTED_ROWS)}; "
            "give the model's original Hugging Face directory"
        )
    given = {key.removeprefix(f"{name}."): value for key, value in file.fields.items() if key.startswith(f"{name}.")}
    fields = Fields(given, f"{file.path}: {name}")
    for field in ("attention.scale", "logit_scale", "residual_scale", "embedding_scale", "final_logit_softcapping"):
        fields.refuse(field, 0)
    fields.refuse("expert_count", 0)
    fields.refuse("attention.causal", True)
    try:
        return _decoder(file, name, fields)
    except UserError as error:
        text = str(error)
        raise UserError(text if text.startswith(str(file.path)) else f"{file.path}: {text}; {_REMEDY}") from None


def _decoder(file: GGUFFile, name: str, fields: Fields) -> DecoderConfig:
    hidden, heads = fields.number("embedding_length"), fields.number("attention.head_count")
    head_dim = fields.number("attention.key_length", hidden // heads)
    fields.refuse("attention.value_length", head_dim)
    fields.refuse("rope.dimension_count", head_dim)
    theta = fields.real("rope.freq_base", 10_000.0)
    return DecoderConfig(
        hidden_size=hidden,
        intermediate_size=fields.number("feed_forward_length"),
        num_layers=fields.number("block_count"),
        num_heads=heads,
        num_kv_heads=fields.number("attention.head_count_kv", heads),
        vocab_size=stored(file, _EMBEDDING).shape[0],  # which may have more rows than there are tokens
        tied_embeddings=_HEAD not in file.tensors,
        rope_theta=theta,
        rope_scaling=_rope_scaling(file, fields, theta, head_dim),
        rms_norm_eps=fields.real("attention.layer_norm_rms_epsilon", 1e-6),
        attention_head_dim=head_dim,
        qkv_bias=name == "qwen2" or "blk.0.attn_q.bias" in file.tensors,
        attention_output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        qk_norm=name == "qwen3",
        sliding_window=fields.number("attention.sliding_window", 0) or None,
        max_position_embeddings=fields.number("context_length", 0) or None,
    )


def _rope_scaling(file: GGUFFile, fields: Fields, theta: float, head_dim: int) -> RopeScaling:
    kind = fields.content.get("rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise UserError(
            f"{fields.path}: rope.scaling.type={shown(kind)} is not supported, only none, linear; {_REMEDY}"
        )
    if _ROPE in file.tensors:
        return _llama3(file, theta, head_dim)
    return (
        RopeScaling(kind="linear", factor=fields.real("rope.scaling.factor", 1.0))
        if kind == "linear"
        else RopeScaling()
    )


def _llama3(file: GGUFFile, theta: float, head_dim: int) -> RopeScaling:
    """The scaling by which `rope_freqs.weight` was computed."""
    divisors = file.read(file.tensors[_ROPE]).astype(np.float64)  # [head_dim / 2]
    factor = float(divisors.max())
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = _LLAMA3["low_frequency_factor"], _LLAMA3["high_frequency_factor"]
    kept = ((_LLAMA3["original_positions"] / wavelengths - low) / (high - low)).clip(0, 1)
    if divisors.shape != kept.shape or not np.allclose(divisors, 1 / (kept + (1 - kept) / factor), rtol=1e-5):
        raise UserError(f"{file.path}: {_ROPE} has other divisors of rotary angles than Llama 3.1's; {_REMEDY}")
    return RopeScaling(
        kind="llama3",
        factor=factor,
        original_positions=int(_LLAMA3["original_positions"]),
        low_frequency_factor=low,
        high_frequency_factor=high,
    )


def stored(file: GGUFFile, name: str) -> StoredTensor:
    """The tensor of that name. Raises UserError where the file lacks it."""
    if name not in file.tensors:
        raise UserError(f"{file.path}: it lacks the tensor {name}; {_REMEDY}")
    return file.tensors[name]


def tensors_of(file: GGUFFile, model: DecoderConfig) -> dict[str, StoredTensor]:
    """The tensor that holds each parameter of `model`, by the parameter's name.

    Raises:
        UserError: a tensor is missing, has another shape than the fields ask for, or belongs to no parameter.
    """
    package: Any = gguf_package(file.path)
    names = {name: kind for kind, name in package.MODEL_ARCH_NAMES.items()}
    places = package.get_tensor_name_map(names[file.fields["general.architecture"]], model.num_layers)
    found: dict[str, StoredTensor] = {}
    for spec in decoder_parameters(model):
        tensor = stored(file, places.get_name(spec.name, try_suffixes=(".weight", ".bias")))
        if tensor.shape != spec.shape:
            raise UserError(
                f"{file.path}: the tensor {tensor.name} has shape {list(tensor.shape)}, but the file's fields ask for "
                f"{list(spec.shape)}; {_REMEDY}"
            )
        found[spec.name] = tensor
    if surplus := file.tensors.keys() - {tensor.name for tensor in found.values()} - {_ROPE}:
        raise UserError(
            f"{file.path}: it has the tensor {min(surplus)}, which a model of its fields does not have; {_REMEDY}"
        )
    return found


def in_order(file: GGUFFile, model: DecoderConfig, parameter: str, content: np.ndarray) -> np.ndarray:
    """The numbers of a parameter in Hugging Face's order of rows."""
    heads: Mapping[str, int] = {"q_proj": model.num_heads, "k_proj": model.num_kv_heads}
    module = parameter.rsplit(".", 2)[-2]
    if module not in heads or not _HAS_PERMUTED_ROWS[file.fields["general.architecture"]]:
        return content
    # [heads, head_dim / 2, 2, ...]: the two numbers that are rotated together lie beside each other in the file.
    pairs = content.reshape(heads[module], -1, 2, *content.shape[1:])
    return pairs.swapaxes(1, 2).reshape(content.shape)
