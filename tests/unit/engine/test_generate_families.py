"""Generation with a cache of every family against transformers: logits of all tokens that were drawn."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from realhf.api.generation import GenerationOptions
from realhf.engine.batch import Batch
from realhf.engine.interface import GenerationRequest
from tests.unit.models.families import FAMILIES, computing_in, config_class, distance, load, oracle

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 24,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "max_position_embeddings": 64,
}
CHANGES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0}},
    "mistral": {"sliding_window": 5},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    "qwen3": {"head_dim": 6},
    "gemma": {"head_dim": 6},
    "mixtral": {"num_local_experts": 4, "sliding_window": 6},
    "qwen3_moe": {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
}
GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32, "vocab_size": 24}
SAMPLING = GenerationOptions(max_new_tokens=12, temperature=1.0, eos_token=23)


def prompts() -> Batch:
    generator = torch.Generator().manual_seed(1)
    return Batch(tuple(range(5)), {"prompt": [torch.randint(22, (n,), generator=generator) for n in (1, 9, 4, 4, 12)]})


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_drawn_tokens(family: str, tmp_path: Path) -> None:
    config = config_class(family)(**(GPT2 if family == "gpt2" else SIZES | CHANGES[family]))
    theirs = oracle(config, tmp_path, torch.float64)
    ours, batch = load(theirs.directory, theirs.config, torch.float64), prompts()
    output = ours.generate(batch, GenerationRequest(SAMPLING, sample_key=(3, 0), micro_batches=2, return_logits=True))
    assert max(len(s) for s in output.sequences) > 12
    with torch.no_grad():
        for prompt, sequence, logits in zip(batch.data["prompt"], output.sequences, output.logits, strict=True):
            assert distance(logits, theirs.logits([sequence])[len(prompt) - 1 : -1]) < 1e-12


def test_dynamic_rope_beyond_the_original_length(tmp_path: Path) -> None:
    """transformers' own generation: a token is rotated for the length it was generated at, and kept so in the cache."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 500.0}
    config = config_class("llama")(**SIZES | {"max_position_embeddings": 10, "rope_parameters": rope})
    theirs = oracle(config, tmp_path, torch.float64)
    ours, batch = load(theirs.directory, theirs.config, torch.float64), prompts()
    batch = batch.with_data(prompt=[p[:8] for p in batch.data["prompt"]])
    output = ours.generate(batch, GenerationRequest(SAMPLING, sample_key=(3, 0), micro_batches=2, return_logits=True))
    assert max(len(s) for s in output.sequences) > 14
    for prompt, sequence, logits in zip(batch.data["prompt"], output.sequences, output.logits, strict=True):
        assert distance(logits, token_by_token(theirs.hf, sequence)[len(prompt) - 1 : -1]) < 1e-12


@torch.no_grad()
def token_by_token(hf: Any, sequence: Tensor) -> Tensor:
    rows, cache = [], None
    with computing_in(torch.float64):
        for token in sequence:
            output = hf(input_ids=token.view(1, 1), past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            rows.append(output.logits[0, 0])
    return torch.stack(rows)
