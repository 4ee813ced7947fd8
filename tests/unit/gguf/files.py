"""GGUF files as llama.cpp's converter writes them, of random small models of transformers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from tests.unit.models.families import config_class, oracle

# Rows of 256 numbers, the block of Q4_K and Q6_K; more rows in the embedding than the tokenizers have tokens.
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 352,
    "max_position_embeddings": 512,
}
_TYPES = {"normal": 1, "unknown": 2, "control": 3, "byte": 6}


def random_model(family: str, folder: Path, seed: int = 0, **fields: Any) -> PreTrainedModel:
    """A model of transformers in float32, saved in `folder`."""
    return oracle(config_class(family)(**SIZES | fields), folder, torch.float32, seed).hf


def write_model(path: Path, model: PreTrainedModel, kind: str = "F32", **changed: Any) -> Path:
    """The file of a model whose matrices are of one type; `changed` has fields (None: left out) and tensors by name."""
    config, architecture = model.config, model.config.model_type.replace("mistral", "llama")
    fields = _fields(config, architecture) | {key: value for key, value in changed.items() if "weight" not in key}
    tensors: dict[str, Any] = {}
    places = gguf.get_tensor_name_map(architecture_of(architecture), config.num_hidden_layers)
    for name, parameter in model.named_parameters():  # without the head where it is tied
        place = places.get_name(name, try_suffixes=(".weight", ".bias"))
        values = parameter.detach().numpy()
        for part, heads in (("attn_q.", config.num_attention_heads), ("attn_k.", config.num_key_value_heads)):
            if architecture == "llama" and part in place:  # `LlamaModel.permute` of llama.cpp
                rows = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
                values = rows.swapaxes(1, 2).reshape(values.shape)
        tensors[place] = quantized(values, kind) if values.ndim == 2 else (values, gguf.GGMLQuantizationType.F32)
    tensors |= {name: value for name, value in changed.items() if "weight" in name}
    return write_file(path, architecture, fields, tensors)


def architecture_of(name: str) -> gguf.MODEL_ARCH:
    return next(number for number, known in gguf.MODEL_ARCH_NAMES.items() if known == name)


def _fields(config: PreTrainedConfig, name: str) -> dict[str, Any]:
    rope = config.rope_parameters
    fields = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(rope["rope_theta"]),
        "vocab_size": config.vocab_size,
    }
    if name == "llama":
        fields["rope.dimension_count"] = config.head_dim
    if name == "qwen3":
        fields |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    return {f"{name}.{key}": value for key, value in fields.items()}


def quantized(values: np.ndarray, kind: str) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
    """Numbers in blocks of a type; for the types that the package cannot make, random blocks of like numbers."""
    member = gguf.GGMLQuantizationType[kind]
    if kind not in ("Q4_K", "Q6_K"):
        return gguf.quants.quantize(np.ascontiguousarray(values), member), member
    block, block_bytes = gguf.GGML_QUANT_SIZES[member]
    random = np.random.default_rng(values.size)
    raw = random.integers(0, 256, (values.size // block, block_bytes), np.uint8)
    scales = {"Q4_K": [(0, 0.0006), (2, 0.004)], "Q6_K": [(208, 0.0002)]}[kind]
    for at, scale in scales:
        raw[:, at : at + 2] = np.full(len(raw), scale, "<f2").view(np.uint8).reshape(-1, 2)
    return raw.reshape(len(values), -1), member


def write_file(path: Path, architecture: str, fields: Mapping[str, Any], tensors: Mapping[str, Any]) -> Path:
    """A file of these fields and tensors: (numbers or bytes of blocks, type)."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in fields.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            add[type(value)](key, value)
    for name, (values, kind) in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(values), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tokenizer_fields(folder: Path, pre: str) -> dict[str, Any]:
    """The fields of the tokenizer of a Hugging Face directory; `pre` is empty for SentencePiece's."""
    content = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    special = {token["id"]: token["content"] for token in content["added_tokens"]}
    ids = content["model"]["vocab"] | {text: token for token, text in special.items()}
    tokens = sorted(ids, key=ids.__getitem__)
    kinds = ["control" if token in special.values() else "normal" for token in tokens]
    fields: dict[str, Any] = {"model": "gpt2", "pre": pre, "tokens": tokens}
    if pre:
        fields["merges"] = [" ".join(merge) for merge in content["model"]["merges"]]
    else:
        merged = ["".join(merge) for merge in content["model"]["merges"]]
        fields |= {"model": "llama", "pre": "default"}
        fields["scores"] = [-float(merged.index(token)) if token in merged else -1e3 for token in tokens]
        kinds = ["byte" if token.startswith("<0x") else kind for token, kind in zip(tokens, kinds, strict=True)]
        kinds[0] = "unknown"
    fields["token_type"] = [_TYPES[kind] for kind in kinds]
    for name, key in (("bos_token", "bos_token_id"), ("eos_token", "eos_token_id"), ("pad_token", "padding_token_id")):
        if token := config.get(name):
            fields[key] = ids[token if isinstance(token, str) else token["content"]]
    if isinstance(template := config.get("chat_template"), str):
        fields["template"] = template
    elif (folder / "chat_template.jinja").is_file():
        fields["template"] = (folder / "chat_template.jinja").read_text()
    named = {f"tokenizer.ggml.{key}": value for key, value in fields.items() if key != "template"}
    return named | ({"tokenizer.chat_template": fields["template"]} if "template" in fields else {})
