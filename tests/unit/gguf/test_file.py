"""Blocks of every type by hand, and the refusal of files that are damaged or of another kind."""

import contextlib
import random
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from transformers import PreTrainedModel

from realhf.base.errors import UserError
from realhf.gguf.file import TENSOR_TYPES, GGUFFile
from realhf.gguf.folder import GGUFModel
from tests.unit.data.tokenizers_of_families import write_qwen
from tests.unit.gguf.files import quantized, random_model, tokenizer_fields, write_file, write_model

Numbers = list[float]


def half(raw: bytes, at: int) -> float:
    return float(struct.unpack_from("<e", raw, at)[0])


def plain(form: str, raw: bytes) -> Numbers:
    return list(struct.unpack(f"<{len(raw) // struct.calcsize(form)}{form}", raw))


def bf16(raw: bytes) -> Numbers:
    """The upper half of a float32."""
    return [struct.unpack("<f", b"\0\0" + raw[at : at + 2])[0] for at in range(0, len(raw), 2)]


def q8_0(raw: bytes) -> Numbers:
    return [half(raw, 0) * q for q in struct.unpack_from("<32b", raw, 2)]


def nibbles(raw: bytes) -> list[int]:
    """The lower four bits of all bytes, then the upper ones."""
    return [byte & 15 for byte in raw] + [byte >> 4 for byte in raw]


def q4_0(raw: bytes) -> Numbers:
    return [half(raw, 0) * (q - 8) for q in nibbles(raw[2:])]


def q4_1(raw: bytes) -> Numbers:
    return [half(raw, 0) * q + half(raw, 2) for q in nibbles(raw[4:])]


def q4_k(raw: bytes) -> Numbers:
    """Eight parts of 32, each with a scale and a minimum of six bits in the twelve bytes from the fourth on."""
    packed, found = raw[4:16], []
    for part in range(8):
        if part < 4:
            scale, least = packed[part] & 63, packed[part + 4] & 63
        else:
            scale = (packed[part + 4] & 15) | (packed[part - 4] >> 6) << 4
            least = (packed[part + 4] >> 4) | (packed[part] >> 6) << 4
        quarter = nibbles(raw[16 + part // 2 * 32 :][:32])
        numbers = quarter[32:] if part % 2 else quarter[:32]
        found += [half(raw, 0) * scale * q - half(raw, 2) * least for q in numbers]
    return found


def q6_k(raw: bytes) -> Numbers:
    """Six bits a number: four in `low`, two in `high`; a scale of eight bits for sixteen numbers."""
    found = []
    for i in range(256):
        half_block, quarter, place = i // 128, i % 128 // 32, i % 32
        low = raw[half_block * 64 + quarter % 2 * 32 + place] >> (quarter // 2 * 4) & 15
        high = raw[128 + half_block * 32 + place] >> (quarter * 2) & 3
        scale = struct.unpack_from("b", raw, 192 + i // 16)[0]
        found.append(half(raw, 208) * scale * ((low | high << 4) - 32))
    return found


BY_HAND: dict[str, Callable[[bytes], Numbers]] = {
    "F32": lambda raw: plain("f", raw),
    "F16": lambda raw: plain("e", raw),
    "BF16": bf16,
    "Q8_0": q8_0,
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q4_K": q4_k,
    "Q6_K": q6_k,
}


@pytest.mark.parametrize("kind", TENSOR_TYPES)
def test_a_block_by_hand(kind: str, tmp_path: Path) -> None:
    """In float32, which the package computes in: a few roundings of 6e-8 each."""
    values, member = quantized(np.random.default_rng(0).normal(size=(1, 256)).astype(np.float32), kind)
    raw = values.tobytes()
    block_bytes = gguf.GGML_QUANT_SIZES[member][1]
    expected = [
        number for at in range(0, len(raw), block_bytes) for number in BY_HAND[kind](raw[at : at + block_bytes])
    ]
    file = GGUFFile(write_file(tmp_path / "one.gguf", "llama", {}, {"one": (values, member)}))
    found = file.read(file.tensors["one"])
    if kind == "BF16":
        found = (found.astype(np.uint32) << 16).view(np.float32)
    assert found.shape == (1, 256)
    assert np.std(expected) > 0.1
    np.testing.assert_allclose(found[0], expected, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel, dict[str, Any]]:
    """A folder with model.gguf, its model, and the fields of its tokenizer."""
    folder = tmp_path_factory.mktemp("files")
    model, fields = (
        random_model("llama", folder / "original"),
        tokenizer_fields(write_qwen(folder / "tokenizer"), "qwen2"),
    )
    write_model(folder / "model.gguf", model, **fields)
    return folder, model, fields


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as refused:
        GGUFModel(path)
    text = str(refused.value)
    assert text.startswith(str(path))
    return text


Q5_0 = gguf.quants.quantize(np.ones((256, 256), np.float32), gguf.GGMLQuantizationType.Q5_0)
OTHER = np.ones((256, 128), np.float32)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": (
        {"general.architecture": None},
        "general.architecture=None is not supported, only llama, qwen2, qwen3",
    ),
    "field": ({"llama.block_count": None}, "llama: block_count is missing; it must be a whole number of at least 1"),
    "split": ({"split.count": 3}, "it is one of 3 files of a split model, and only a whole one is read; merge"),
    "experts": ({"llama.expert_count": 8}, "llama: expert_count=8 is not supported"),
    "rotation": ({"llama.rope.dimension_count": 32}, "llama: rope.dimension_count=32 is not supported"),
    "scaling": ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.type='yarn' is not supported, only none, linear"),
    "divisors": (
        {"rope_freqs.weight": (np.full(32, 3.0, np.float32), gguf.GGMLQuantizationType.F32)},
        "rope_freqs.weight has other divisors of rotary angles than Llama 3.1's",
    ),
    "layers": ({"llama.block_count": 3}, "it lacks the tensor blk.2.attn_norm.weight"),
    "fewer layers": (
        {"llama.block_count": 1},
        "it has the tensor blk.1.attn_k.weight, which a model of its fields does",
    ),
    "shape": (
        {"blk.0.ffn_up.weight": (OTHER, gguf.GGMLQuantizationType.F32)},
        "the tensor blk.0.ffn_up.weight has shape [256, 128], but the file's fields ask for [256, 256]",
    ),
    "heads": ({"llama.attention.head_count_kv": 3}, "num_kv_heads=3 must divide num_heads=4"),
    "type": (
        {"blk.0.ffn_up.weight": (Q5_0, gguf.GGMLQuantizationType.Q5_0)},
        "the tensor blk.0.ffn_up.weight is of type Q5_0, which is not read; choose a file with tensors of F32, F16",
    ),
    "tokenizer": ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model='t5': it is not supported, only gpt2, llama"),
    "pre-tokenizer": (
        {"tokenizer.ggml.pre": "tekken"},
        "tokenizer.ggml.pre='tekken': it is not supported, only default",
    ),
    "no tokens": ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens=None: it must be a list of str"),
    "tokens": ({"tokenizer.ggml.tokens": ["a"] * 353}, "it must have 1 to 352 texts of up to 4,096 characters"),
    "a long token": ({"tokenizer.ggml.tokens": ["a" * 5000]}, "it must have 1 to 352 texts of up to 4,096 characters"),
    "kinds of tokens": ({"tokenizer.ggml.token_type": [1]}, "it must have one value for each of the 267 tokens"),
    "a merge of nothing": ({"tokenizer.ggml.merges": ["ab"]}, "tokenizer.ggml.merges='ab': it must be two tokens"),
    "a merge": ({"tokenizer.ggml.merges": ["zz zz"]}, "tokenizer.ggml: "),
    "end token": ({"tokenizer.ggml.eos_token_id": 267}, "eos_token_id=267: it must be a token's number, below 267"),
    "template": ({"tokenizer.chat_template": 7}, "tokenizer.chat_template=7 is no text"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_file_of_another_kind_is_refused(
    what: str, made: tuple[Path, PreTrainedModel, dict[str, Any]], tmp_path: Path
) -> None:
    _, model, fields = made
    changed, message = REFUSED[what]
    if what == "architecture":
        path = write_file(tmp_path / "model.gguf", "gemma3", {}, {})
        message = message.replace("None", "'gemma3'")
    else:
        path = write_model(tmp_path / "model.gguf", model, **(fields | changed))
    found = refusal(path)
    assert message in found
    assert any(
        word in found for word in ("original Hugging Face directory", "choose a", "must be a whole number", "merge")
    )


def test_a_damaged_file_is_refused(made: tuple[Path, PreTrainedModel, dict[str, Any]], tmp_path: Path) -> None:
    content, path = (made[0] / "model.gguf").read_bytes(), tmp_path / "model.gguf"
    damages = {
        b"": "not a GGUF file: it begins with b''",
        b"PK\3\4" + content[4:]: "not a GGUF file: it begins with b'PK\\x03\\x04'",
        content[:20]: "truncated: it ends at byte 20",
        content[:300]: "truncated",
        content[:-1]: "ends at",
        content[:4] + struct.pack("<I", 1) + content[8:]: "GGUF version 1 is not read, only 2 and 3",
        content[:4] + struct.pack(">I", 3) + content[8:]: "or of the other byte order is not read",
        content[:8] + struct.pack("<Q", 2**60) + content[16:]: "it states 1,152,921,504,606,846,976 tensors",
        content[:16] + struct.pack("<Q", 2**60) + content[24:]: "it states 1,152,921,504,606,846,976 fields",
        content[:24] + struct.pack("<Q", 2**60) + content[32:]: "it states 1,152,921,504,606,846,976 bytes of a text",
        content.replace(b"general.architecture", b"general.architect\xff\xff\xff", 1): "is not UTF-8",
        content.replace(b"blk.0.attn_norm.weight", b"blk.1.attn_norm.weight", 1): "tensor blk.1.attn_norm.weight twice",
    }
    for damaged, message in damages.items():
        path.write_bytes(damaged)
        found = refusal(path)
        assert message in found
        assert "again" in found or "give" in found or "choose" in found or "must be" in found


def test_no_changed_byte_raises_anything_else(
    made: tuple[Path, PreTrainedModel, dict[str, Any]], tmp_path: Path
) -> None:
    content, path = (made[0] / "model.gguf").read_bytes(), tmp_path / "model.gguf"
    header = content.index(b"blk.1.ffn_up.weight") + 100
    draw = random.Random(0)
    for _ in range(150):
        changed = bytearray(content)
        changed[draw.randrange(header)] = draw.choice((0, 1, 9, 127, 128, 255))
        path.write_bytes(changed)
        with contextlib.suppress(UserError):
            GGUFModel(path)


def test_without_the_package_the_remedy_is_named(
    made: tuple[Path, PreTrainedModel, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "which is not installed; `python -m pip install 'realhf[gguf]'` installs it" in refusal(
        made[0] / "model.gguf"
    )
