"""The tokenizer of a GGUF file against transformers' reading of it, and against the one that it was written from."""

import unicodedata
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from realhf.data.tokenizer import TextTokenizer
from realhf.gguf.folder import GGUFModel
from tests.unit.data.tokenizers_of_families import write_llama3, write_mistral, write_qwen
from tests.unit.gguf.files import random_model, tokenizer_fields, write_model

TEXTS = [
    "then the hen\n\n  in an inn",
    "  two  spaces,\ttabs\r\n\r\n",
    "3.14 and 1234567, a1b2: $12",
    "It's WE'LL don't",
    "naïve café 東京 😀 e\u0301",
    "def f(x):\n    return x**2  # [the] <un>?",
    " ",
    "",
]
KINDS = {
    "llama-bpe": ("llama", write_llama3),
    "qwen2": ("qwen2", write_qwen),
    "smollm": ("llama", write_qwen),
    "default": ("llama", write_qwen),
    "": ("llama", write_mistral),
}


@pytest.mark.parametrize("pre", KINDS)
def test_tokens_and_chats_as_transformers_makes_them(pre: str, tmp_path: Path) -> None:
    family, write = KINDS[pre]
    fields = tokenizer_fields(write(tmp_path / "tokenizer"), pre) | {"tokenizer.ggml.add_bos_token": family == "llama"}
    file = write_model(tmp_path / "model.gguf", random_model(family, tmp_path / "original"), **fields)
    (tmp_path / "folder").mkdir()
    GGUFModel(file).write(tmp_path / "folder")
    ours = TextTokenizer(tmp_path / "folder")
    read = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    again = AutoTokenizer.from_pretrained(tmp_path / "folder")
    special = [token for token in fields["tokenizer.ggml.tokens"] if token.startswith("<|") or token == "</s>"]
    for text in [*TEXTS, f"a{special[-1]}the{special[0]} b"]:
        # Of Qwen's normalisation the file does not say, and transformers does it for the directory alone.
        tokens = read(unicodedata.normalize("NFC", text) if pre == "qwen2" else text).input_ids
        assert ours.encode(text) == tokens == again(text).input_ids, text
        assert ours.decode(tokens) == again.decode(tokens, skip_special_tokens=True)
    if pre:
        assert ours.template.source == read.chat_template == fields["tokenizer.chat_template"]
    assert ours.end_tokens == (fields["tokenizer.ggml.eos_token_id"],)
