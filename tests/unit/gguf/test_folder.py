"""The model of a GGUF file against transformers' own reading of it, and against the model that it was written from."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from realhf.architecture.hugging_face import config_content, decoder_of
from realhf.gguf.file import TENSOR_TYPES
from realhf.gguf.folder import GGUFModel
from tests.unit.engine.losses import random_batch, split_like
from tests.unit.gguf.files import random_model, write_model
from tests.unit.models.families import Oracle, computing_in, distance, load

LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "rope_theta": 5e5, "original_max_position_embeddings": 8192}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
MODELS = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen3": ("qwen3", {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 128}),
}
# By name: the model, and the fields and tensors of its file that transformers does not read.
LEFT_OUT = {
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}, {}),
    "window": ("mistral", {"sliding_window": 5, "head_dim": 64}, {"llama.attention.sliding_window": 5}),
    "linear": (
        "qwen2",
        {"rope_parameters": LINEAR},
        {"qwen2.rope.scaling.type": "linear", "qwen2.rope.scaling.factor": 4.0},
    ),
    "llama3": ("llama", {"rope_parameters": LLAMA3}, {}),
}


def converted(file: Path, folder: Path) -> Path:
    folder.mkdir()
    GGUFModel(file).write(folder)
    return folder


def check_logits(folder: Path, theirs: PreTrainedModel) -> None:
    """In float64, where two orders of the same sums differ by some 1e-16 of each number."""
    config = decoder_of(config_content(folder / "config.json"))
    batch = random_batch(config, 4, lengths=(1, 20))
    with torch.no_grad():
        expected = Oracle(theirs, folder, torch.float64).logits(batch.data["tokens"])
    assert expected.std() > 0.3  # else the comparison says little
    ours = load(folder, config, torch.float64)
    found = ours.forward(batch, "tokens", split_like, micro_batches=2)["output"]
    assert distance(torch.cat(found), expected) < 1e-12


def read_by_transformers(file: Path) -> PreTrainedModel:
    with computing_in(torch.float64):
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float64)
    return model.eval()


@pytest.mark.parametrize("kind", TENSOR_TYPES)
def test_every_type_of_tensor_as_transformers_reads_it(kind: str, tmp_path: Path) -> None:
    file = write_model(tmp_path / "model.gguf", random_model("llama", tmp_path / "original"), kind)
    check_logits(converted(file, tmp_path / "converted"), read_by_transformers(file))


@pytest.mark.parametrize("name", MODELS)
def test_every_family_as_transformers_reads_it_and_as_it_was_before(name: str, tmp_path: Path) -> None:
    family, fields = MODELS[name]
    original = random_model(family, tmp_path / "original", **fields)
    file = write_model(tmp_path / "model.gguf", original)
    folder = converted(file, tmp_path / "converted")
    check_logits(folder, read_by_transformers(file))
    assert json.loads((folder / "config.json").read_text())["model_type"] == family
    check_same(original, folder)


def check_same(original: PreTrainedModel, folder: Path) -> None:
    before, after = original.state_dict(), AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def divisors(theta: float, factor: float) -> np.ndarray:
    """`rope_freqs.weight` as `LlamaModel.generate_extra_tensors` of llama.cpp computes it: [head_dim / 2] float32."""
    values = []
    for frequency in 1.0 / (theta ** (torch.arange(0, 64, 2, dtype=torch.float32) / 64)):
        wavelength = 2 * torch.pi * frequency.reciprocal().item()
        smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
        if wavelength < 8192 / 4.0:
            values.append(1.0)
        elif wavelength > 8192 / 1.0:
            values.append(factor)
        else:
            values.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(values, dtype=np.float32)


@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_model_is_as_it_was_before_where_transformers_leaves_fields_out(name: str, tmp_path: Path) -> None:
    family, fields, changed = LEFT_OUT[name]
    if name == "llama3":
        changed = {"rope_freqs.weight": (divisors(5e5, 32.0), gguf.GGMLQuantizationType.F32)}
    original = random_model(family, tmp_path / "original", **fields)
    folder = converted(write_model(tmp_path / "model.gguf", original, **changed), tmp_path / "converted")
    check_same(original, folder)
    with computing_in(torch.float64):
        wide = AutoModelForCausalLM.from_pretrained(tmp_path / "original", dtype=torch.float64).eval()
    check_logits(folder, wide)
