"""Named architectures against published parameter counts; config.json files, good and bad."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from realhf.architecture import transformers_config
from realhf.architecture.model import DecoderConfig, Experts
from realhf.architecture.named import architecture
from realhf.architecture.transformers_config import transformers_model
from realhf.base.errors import UserError
from realhf.geometry.parameters import parameter_count

# ReaL's table (7B, 13B, 34B, 70B), and the sums of Meta's and Qwen's checkpoints.
PUBLISHED = {
    "llama3-7b": 8_030_261_248,
    "llama3-13b": 14_001_525_760,
    "llama3-34b": 35_321_028_608,
    "llama3-70b": 70_553_706_496,
    "llama3-7b-critic": 7_504_924_672 + 4096,  # the table leaves the scalar head out
    "llama3-13b-critic": 13_344_855_040 + 5120,
    "llama3-34b-critic": 34_270_355_456 + 8192,
    "llama3-70b-critic": 69_503_033_344 + 8192,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-34b": 33_743_970_304,
    "llama2-70b": 68_976_648_192,
    # Sums of Qwen's checkpoints, biases and norms of query and key included.
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
}


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_parameters_are_those_published(name: str, count: int) -> None:
    assert parameter_count(architecture(name)) == count


LLAMA2_13B: dict[str, Any] = {
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "vocab_size": 32000,
    "rms_norm_eps": 1e-5,
    "model_type": "llama",
}


def written(folder: Path, content: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(content))
    return path


def test_a_hugging_face_config(tmp_path: Path) -> None:
    path = written(tmp_path, LLAMA2_13B)
    assert architecture(str(path)) == architecture(str(tmp_path)) == architecture("llama2-13b")
    nested = written(tmp_path, {"text_config": {**LLAMA2_13B, "num_key_value_heads": 8, "tie_word_embeddings": True}})
    config = architecture(str(nested))
    assert (config.num_kv_heads, config.tied_embeddings) == (8, True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": None}, "vocab_size is None; it must be a whole number of at least 1"),
        ({"hidden_size": -5}, "hidden_size is -5; it must be a whole number of at least 1"),
        (
            {"model_type": "bert"},
            "model_type='bert' is not supported; choose a checkpoint of llama, mistral, qwen2, qwen3, gemma, mixtral, "
            "qwen3_moe, gpt2"
            ", or have transformers compute the model (backend='transformers', see docs/models.md)",
        ),
        (
            {"hidden_act": "tanh"},
            "hidden_act='tanh' is not supported, only silu, swish, gelu, gelu_new, gelu_pytorch_tanh, relu",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0}},
            "rope_scaling: type='yarn' is not supported, only default, linear, dynamic, llama3",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing; type='linear' needs it"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; it must be true or false"),
        ({"num_key_value_heads": 7}, "num_kv_heads=7 must divide num_heads=40"),
        (
            {"model_type": ["llama"]},
            "model_type=['llama'] is not supported; choose a checkpoint of llama, mistral, "
            "qwen2, qwen3, gemma, mixtral, qwen3_moe, gpt2"
            ", or have transformers compute the model (backend='transformers', see docs/models.md)",
        ),
        (
            {"model_type": None},
            "model_type is missing, so the model's family is unknown; add it, one of llama, mistral, qwen2, qwen3, "
            "gemma, mixtral, qwen3_moe, gpt2",
        ),
        (
            {"hidden_act": ["silu"]},
            "hidden_act=['silu'] is not supported, only silu, swish, gelu, gelu_new, gelu_pytorch_tanh, relu",
        ),
        (
            {"num_hidden_layers": 10**8},
            "num_layers 100000000 is not from 1 to 1,000; give a number in that range",
        ),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "num_hidden_layers": 10**8},
            "num_hidden_layers 100000000 is not from 1 to 1,000; give a number in that range",
        ),
        ({"hidden_size": 10**12}, "hidden_size 1000000000000 is not from 1 to 100,000; give a number in that range"),
        ({"rms_norm_eps": 10**400}, f"rms_norm_eps {10**400} is not from -1e+12 to 1e+12; give a number in that range"),
        ({"rope_theta": 0}, "rope_theta 0.0 is not from 1 to 1e+12; give a number in that range"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "layer_types": [["full_attention"]]},
            "layer_types=[['full_attention']] must say sliding_attention or full_attention 40 times",
        ),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": "all"},
            "max_window_layers is 'all'; it must be a number",
        ),
        (
            {"model_type": "mixtral", "num_key_value_heads": None, "num_local_experts": 10**6},
            "num_layers x experts.count 40000000 is not from 0 to 100,000; give a number in that range",
        ),
        (
            {"model_type": "qwen3_moe", "mlp_only_layers": [0]},
            "mlp_only_layers=[0] is not supported; choose a checkpoint with mlp_only_layers=[]",
        ),
    ],
)
def test_a_config_that_cannot_be_used(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = written(tmp_path, LLAMA2_13B | change)
    with pytest.raises(UserError) as error:
        architecture(str(path))
    assert str(error.value) == f"{path}: {message}"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"model_type": ' + b"[" * 100_000, "it is nested too deeply"),
        (b'{"model_type": "\xff"}', "'utf-8' codec can't decode byte 0xff"),
        (b"[]", "Expected `object`, got `array`"),
    ],
    ids=["deep", "no text", "a list"],
)
def test_a_file_that_is_no_config(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UserError) as error:
        architecture(str(tmp_path))
    assert str(error.value).startswith(f"{tmp_path / 'config.json'}: not a config.json: {reason}")


def test_the_bytes_of_the_largest_sizes_fit_into_64_bits() -> None:
    """With optimizer states; a thousand models of one layer each stand for one of a thousand layers."""
    largest = DecoderConfig(
        hidden_size=10**5,
        intermediate_size=10**6,
        num_layers=1,
        num_heads=10**4,
        num_kv_heads=10**4,
        vocab_size=10**7,
        attention_head_dim=10**4,
        experts=Experts(count=100, per_token=100),
    )
    assert 5e17 < 1_000 * parameter_count(largest) * 18 < 2**63


def test_a_config_without_a_field(tmp_path: Path) -> None:
    path = written(tmp_path, {key: value for key, value in LLAMA2_13B.items() if key != "num_hidden_layers"})
    with pytest.raises(UserError, match="num_hidden_layers is missing"):
        architecture(str(path))


def test_an_unknown_name() -> None:
    with pytest.raises(UserError, match="architecture 'llama9-7b' is not known; choose one of llama2-7b, "):
        architecture("llama9-7b")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("num_hidden_layers", 10**7, "from -1,000 to 1,000"),
        ("n_layer", 1001, "from -1,000 to 1,000"),
        ("num_experts", 10_001, "from -10,000 to 10,000"),
        ("hidden_size", 2**31 + 1, "from -2,147,483,648 to"),
        ("hidden_size", -(2**63), "from -2,147,483,648 to"),
        ("rope_theta", 1e300, "from -1e+15 to 1e+15"),
        ("layer_types", ["full_attention"] * 10_001, "the length 10001 is not"),
        ("text_config", {"deeper": [{"num_layers": 5000}]}, "num_layers 5000 is not"),
        ("num_local_experts", 2000, "layers times experts 120000 is not"),
    ],
)
def test_a_model_of_transformers_of_no_size_is_never_built(
    field: str, value: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers_config.subprocess, "run", lambda *_, **__: pytest.fail("it was built"))
    content = {"model_type": "elsewhere", "num_hidden_layers": 60, "use_cache": True} | {field: value}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="give a number in that range") as refused:
        transformers_model(tmp_path)
    assert words in str(refused.value)
    assert str(tmp_path) in str(refused.value)


def test_transformers_has_a_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(words: Any, *, timeout: float, **_: Any) -> None:
        raise subprocess.TimeoutExpired(words, timeout)

    monkeypatch.setattr(transformers_config.subprocess, "run", run)
    monkeypatch.setattr(transformers_config.platformdirs, "user_cache_path", lambda _: tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "elsewhere"}))
    with pytest.raises(UserError, match=r"config\.json: transformers did not build the model within 600 s"):
        transformers_model(tmp_path)
