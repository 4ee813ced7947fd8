"""What of a config.json would change the model, and is refused."""

from pathlib import Path
from typing import Any

import pytest

from realhf.architecture.hugging_face import decoder_of
from realhf.base.errors import UserError

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 24,
    "rms_norm_eps": 1e-6,
}


@pytest.mark.parametrize(
    "given",
    [
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.25}},
        {"rope_parameters": {"rope_type": "default"}, "partial_rotary_factor": 0},
    ],
)
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "mistral", "mixtral", "gemma"])
def test_partial_rotary_is_refused(given: dict[str, Any], model_type: str) -> None:
    more = {"num_local_experts": 4, "num_experts_per_tok": 2} if model_type == "mixtral" else {}
    content = LLAMA | more | {"model_type": model_type, "head_dim": 8}
    whole = {"partial_rotary_factor": 1.0, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1}}
    assert decoder_of(content | whole, Path("config.json")) == decoder_of(content, Path("config.json"))
    with pytest.raises(UserError, match=r"partial_rotary_factor=\S+ is not supported; choose a checkpoint with "):
        decoder_of(content | given, Path("config.json"))
