"""Named architectures, and those of `config.json` files, for plans of models without their weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from realhf.architecture.hugging_face import config_content, decoder_of
from realhf.architecture.model import DecoderConfig
from realhf.base.errors import UserError

CRITIC = "-critic"  # the suffix of an architecture's name that asks for a scalar head
_SIZES = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "vocab_size")
_QWEN: Mapping[str, Any] = {"rope_theta": 1e6, "rms_norm_eps": 1e-6}
_QWEN2: Mapping[str, Any] = {**_QWEN, "qkv_bias": True}
_QWEN3: Mapping[str, Any] = {**_QWEN, "qk_norm": True, "attention_head_dim": 128}


def _decoder(*sizes: int, **fields: Any) -> DecoderConfig:
    """The decoder of some `_SIZES`, with the fields in which its family differs from Llama."""
    fields |= dict(zip(_SIZES, sizes, strict=True))
    return DecoderConfig(**fields)


# The architectures of ReaL's measurements (arXiv 2406.14088; Meta calls 7b 8B).
LLAMA: dict[str, DecoderConfig] = {
    "llama7b": _decoder(4096, 14336, 32, 32, 8, 128256),
    "llama13b": _decoder(5120, 13824, 40, 40, 40, 128256),
    "llama34b": _decoder(8192, 22016, 48, 64, 8, 128256),
    "llama70b": _decoder(8192, 28672, 80, 64, 8, 128256),
}
# llama2-*: as Meta published them, 34b as Code Llama. Qwen2.5 and Qwen3: as published by Qwen.
ARCHITECTURES: dict[str, DecoderConfig] = {
    "llama2-7b": _decoder(4096, 11008, 32, 32, 32, 32000),
    "llama2-13b": _decoder(5120, 13824, 40, 40, 40, 32000),
    "llama2-34b": _decoder(8192, 22016, 48, 64, 8, 32000),
    "llama2-70b": _decoder(8192, 28672, 80, 64, 8, 32000),
    "llama3-7b": LLAMA["llama7b"],
    "llama3-8b": LLAMA["llama7b"],
    "llama3-13b": LLAMA["llama13b"],
    "llama3-34b": LLAMA["llama34b"],
    "llama3-70b": LLAMA["llama70b"],
    "qwen2.5-0.5b": _decoder(896, 4864, 24, 14, 2, 151936, tied_embeddings=True, **_QWEN2),
    "qwen2.5-1.5b": _decoder(1536, 8960, 28, 12, 2, 151936, tied_embeddings=True, **_QWEN2),
    "qwen2.5-3b": _decoder(2048, 11008, 36, 16, 2, 151936, tied_embeddings=True, **_QWEN2),
    "qwen2.5-7b": _decoder(3584, 18944, 28, 28, 4, 152064, **_QWEN2),
    "qwen2.5-14b": _decoder(5120, 13824, 48, 40, 8, 152064, **_QWEN2),
    "qwen2.5-32b": _decoder(5120, 27648, 64, 40, 8, 152064, **_QWEN2),
    "qwen2.5-72b": _decoder(8192, 29568, 80, 64, 8, 152064, **_QWEN2),
    "qwen3-0.6b": _decoder(1024, 3072, 28, 16, 8, 151936, tied_embeddings=True, **_QWEN3),
    "qwen3-1.7b": _decoder(2048, 6144, 28, 16, 8, 151936, tied_embeddings=True, **_QWEN3),
    "qwen3-4b": _decoder(2560, 9728, 36, 32, 8, 151936, tied_embeddings=True, **_QWEN3),
    "qwen3-8b": _decoder(4096, 12288, 36, 32, 8, 151936, **_QWEN3),
    "qwen3-14b": _decoder(5120, 17408, 40, 40, 8, 151936, **_QWEN3),
    "qwen3-32b": _decoder(5120, 25600, 64, 64, 8, 151936, **_QWEN3),
}


def model_type(name: str) -> DecoderConfig:
    """The architecture of a named model type (`llama7b`, `llama7b-critic`, ...).

    Raises:
        UserError: no model type has that name.
    """
    if name.removesuffix(CRITIC) not in LLAMA:
        names = [base + suffix for base in LLAMA for suffix in ("", CRITIC)]
        raise UserError(f"model_type={name!r} is not known; choose one of {', '.join(names)} or pass a DecoderConfig")
    return architecture(name)


def architecture(name: str) -> DecoderConfig:
    """The architecture of a name (`llama3-70b`, with `-critic` for a scalar head), or of a Hugging Face
    `config.json`, given as the file or its folder.

    Raises:
        UserError: the name is unknown, or the file cannot be read.
    """
    base = name.removesuffix(CRITIC)
    known = ARCHITECTURES | LLAMA
    if base in known:
        config = known[base]
    elif (path := Path(base)).is_dir() or path.suffix == ".json":
        path = path / "config.json" if path.is_dir() else path
        config = decoder_of(config_content(path), path)
    else:
        raise UserError(
            f"architecture {name!r} is not known; choose one of {', '.join(ARCHITECTURES)}, "
            "or give the path of a Hugging Face config.json"
        )
    return config.with_head("scalar") if base != name else config
