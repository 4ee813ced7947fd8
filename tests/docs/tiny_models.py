"""Random models of real families, as directories of Hugging Face, that stand for large ones in tests of recipes."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from tests.unit.data.tokenizers_of_families import write_llama3, write_qwen

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 2048,
}


def write_tiny_model(folder: Path) -> Path:
    """A model of the family in the folder's name ("Qwen2.5-1.5B", "Llama-3.1-70B"), with a tokenizer of its kind."""
    is_qwen = folder.name.startswith("Qwen")
    config = Qwen2Config(**SIZES, tie_word_embeddings=True) if is_qwen else LlamaConfig(**SIZES)
    (write_qwen if is_qwen else write_llama3)(folder)
    generation = (folder / "generation_config.json").read_bytes()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    (folder / "generation_config.json").write_bytes(generation)
    return folder
