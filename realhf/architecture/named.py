"""Named architectures, and those of `config.json` files, for plans of models without their weights."""

from dataclasses import replace
from pathlib import Path

from realhf.architecture.hugging_face import read_config
from realhf.architecture.model import LLAMA, DecoderConfig
from realhf.base.errors import UserError

CRITIC = "-critic"  # the suffix of an architecture's name that asks for a scalar head


def _llama(
    hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int, num_kv_heads: int, vocab_size: int
) -> DecoderConfig:
    return DecoderConfig(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        vocab_size=vocab_size,
    )


def _qwen2(*sizes: int, tied: bool = False) -> DecoderConfig:
    return replace(_llama(*sizes), qkv_bias=True, tied_embeddings=tied, rope_theta=1e6, rms_norm_eps=1e-6)


def _qwen3(
    hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int, *, tied: bool = False
) -> DecoderConfig:
    return DecoderConfig(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        vocab_size=151936,
        attention_head_dim=128,
        qk_norm=True,
        tied_embeddings=tied,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
    )


# llama3-*: the architectures of ReaL's measurements (arXiv 2406.14088; Meta calls 7b 8B).
# llama2-*: as Meta published them, 34b as Code Llama. Qwen2.5 and Qwen3: as published by Qwen.
ARCHITECTURES: dict[str, DecoderConfig] = {
    "llama2-7b": _llama(4096, 11008, 32, 32, 32, 32000),
    "llama2-13b": _llama(5120, 13824, 40, 40, 40, 32000),
    "llama2-34b": _llama(8192, 22016, 48, 64, 8, 32000),
    "llama2-70b": _llama(8192, 28672, 80, 64, 8, 32000),
    "llama3-7b": LLAMA["llama7b"],
    "llama3-8b": LLAMA["llama7b"],
    "llama3-13b": LLAMA["llama13b"],
    "llama3-34b": LLAMA["llama34b"],
    "llama3-70b": LLAMA["llama70b"],
    "qwen2.5-0.5b": _qwen2(896, 4864, 24, 14, 2, 151936, tied=True),
    "qwen2.5-1.5b": _qwen2(1536, 8960, 28, 12, 2, 151936, tied=True),
    "qwen2.5-3b": _qwen2(2048, 11008, 36, 16, 2, 151936, tied=True),
    "qwen2.5-7b": _qwen2(3584, 18944, 28, 28, 4, 152064),
    "qwen2.5-14b": _qwen2(5120, 13824, 48, 40, 8, 152064),
    "qwen2.5-32b": _qwen2(5120, 27648, 64, 40, 8, 152064),
    "qwen2.5-72b": _qwen2(8192, 29568, 80, 64, 8, 152064),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64),
}


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
        config = read_config(path / "config.json" if path.is_dir() else path)
    else:
        raise UserError(
            f"architecture {name!r} is not known; choose one of {', '.join(ARCHITECTURES)}, "
            "or give the path of a Hugging Face config.json"
        )
    return config.with_head("scalar") if base != name else config
