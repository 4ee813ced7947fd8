"""Hugging Face directories that cannot be loaded: every fault is named; any layout reads exactly its parts."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from realhf.architecture.model import DecoderConfig
from realhf.base.errors import UserError
from realhf.geometry.boxes import device_boxes
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.geometry.parameters import decoder_parameters
from realhf.models.checkpoint_index import read_header
from realhf.models.hugging_face_files import HuggingFaceDirectory, check_checkpoint
from realhf.models.hugging_face_weights import HuggingFaceReader
from tests.unit.engine.losses import random_batch, split_like
from tests.unit.models.families import Oracle, config_class, distance, load, oracle, whole_box

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 12,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}
GPT2_SIZES = {"n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 32, "vocab_size": 12}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 checkpoint in one file."""
    directory = tmp_path_factory.mktemp("qwen2")
    oracle(config_class("qwen2")(**SIZES), directory, torch.float32)
    return directory


def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def edit(directory: Path, **tensors: torch.Tensor | None) -> None:
    """Changes tensors of model.safetensors: `lm_head__weight` is lm_head.weight, None takes it away."""
    path = directory / "model.safetensors"
    content = load_file(path)
    for name, tensor in tensors.items():
        name = name.replace("__", ".")
        content.pop(name, None)
        if tensor is not None:
            content[name] = tensor
    save_file(content, path, metadata={"format": "pt"})


def refused(directory: Path, message: str, model: DecoderConfig | None = None, new_head: bool = False) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        check_checkpoint(directory, model or HuggingFaceDirectory(directory).model, new_head)


def test_a_missing_tensor(saved: Path, tmp_path: Path) -> None:
    directory = copy(saved, tmp_path)
    edit(directory, model__layers__1__self_attn__k_proj__bias=None)
    refused(directory, "lacks the tensor model.layers.1.self_attn.k_proj.bias; choose a complete checkpoint")


def test_a_tensor_too_many(saved: Path, tmp_path: Path) -> None:
    directory = copy(saved, tmp_path)
    edit(directory, model__layers__0__self_attn__q_norm__weight=torch.ones(4))
    refused(
        directory, "has the tensor model.layers.0.self_attn.q_norm.weight, which a qwen2 of its config.json does not"
    )


def test_a_tensor_of_another_shape(saved: Path, tmp_path: Path) -> None:
    directory = copy(saved, tmp_path)
    edit(directory, lm_head__weight=torch.ones(13, 16))
    refused(directory, "lm_head.weight has shape [13, 16], but config.json asks for [12, 16]")


def test_a_dtype_that_is_none_of_a_parameter(saved: Path, tmp_path: Path) -> None:
    directory = copy(saved, tmp_path)
    edit(directory, lm_head__weight=torch.ones(12, 16, dtype=torch.int8))
    refused(directory, "lm_head.weight is of dtype I8, which a parameter cannot be; choose a checkpoint in one of F64,")


def test_a_truncated_file(saved: Path, tmp_path: Path) -> None:
    directory = copy(saved, tmp_path)
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    refused(directory, "is truncated or was changed; restore it or use another checkpoint")
    path.write_bytes(path.read_bytes()[:40])
    refused(directory, f"checkpoint file {path} is truncated or no safetensors file")


def test_another_architecture(saved: Path) -> None:
    model = HuggingFaceDirectory(saved).model
    refused(saved, "is of another architecture: num_layers=3 (the model has 2)", replace(model, num_layers=2))
    refused(saved, "tied_embeddings=False (the model has True)", replace(model, tied_embeddings=True))


def test_another_config(saved: Path, tmp_path: Path) -> None:
    directory = copy(saved, tmp_path)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": {"bits": 4}}))
    refused(directory, "quantization_config={'bits': 4} is not supported")


def test_a_directory_without_safetensors(saved: Path, tmp_path: Path) -> None:
    directory = copy(saved, tmp_path)
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    refused(directory, "(only pytorch_model.bin, which needs pickle and is not read)")


def test_a_critic_starts_from_a_language_model_with_a_new_head(saved: Path) -> None:
    model = HuggingFaceDirectory(saved).model
    critic = model.with_head("scalar")
    refused(saved, "lacks the tensor score.weight; it has no scalar head: start with a new one (new_head=True)", critic)
    reader = HuggingFaceReader(saved, critic, new_head=True)
    whole = load_file(saved / "model.safetensors")
    for spec in decoder_parameters(critic):
        if spec.name != "score.weight":
            assert torch.equal(reader.read(whole_box(spec.name, spec.shape)), whole[spec.name])


def test_an_index_that_names_a_missing_file(saved: Path, tmp_path: Path) -> None:
    directory = copy(saved, tmp_path)
    index = {"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(directory, "model-00002-of-00002.safetensors is missing; restore it")
    index = {"weight_map": {"lm_head.weight": "model.safetensors", "model.more": "model.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(directory, "lacks the tensor model.more that the index puts there")


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_a_weight_that_is_not_finite(family: str, tmp_path: Path) -> None:
    """The rank that loads it names it by the file's own tensor: GPT-2's is transposed, and holds three parameters."""
    theirs = oracle(config_class(family)(**(GPT2_SIZES if family == "gpt2" else SIZES)), tmp_path, torch.float32)
    path = tmp_path / "model.safetensors"
    content = load_file(path)
    name = "transformer.h.1.attn.c_attn.weight" if family == "gpt2" else "model.layers.1.self_attn.k_proj.weight"
    row, column = (7, 16 + 11) if family == "gpt2" else (6, 7)
    content[name][row, column] = torch.nan
    save_file(content, path, metadata={"format": "pt"})
    layout = Layout(DeviceMesh(0, 2), ParallelStrategy(tp=2))
    refusals = []
    for device in layout.mesh.devices:
        reader = HuggingFaceReader(tmp_path, theirs.config)
        for box in device_boxes(theirs.config, layout, device):
            try:
                reader.read(box)
            except UserError as error:
                refusals.append((device, box.name, str(error)))
    message = f"{path}: {name} holds nan at [{row}, {column}], which no model can compute with; use another checkpoint"
    assert refusals == [(1, "model.layers.1.self_attn.k_proj.weight", message)]


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_a_tied_head_that_is_stored_too(family: str, tmp_path: Path) -> None:
    """Equal to the embedding it is no news; else transformers takes both, and so do we where the config says so."""
    sizes = GPT2_SIZES if family == "gpt2" else SIZES
    theirs = oracle(config_class(family)(**sizes | {"tie_word_embeddings": True}), tmp_path, torch.float32)
    embedding = theirs.hf.get_input_embeddings().weight.detach()
    edit(tmp_path, lm_head__weight=embedding.clone())
    check_checkpoint(tmp_path, theirs.config)
    other = embedding + torch.arange(12)[:, None]
    for head in (other, other[:11], embedding.bfloat16()):
        edit(tmp_path, lm_head__weight=head.contiguous())
        refused(
            tmp_path,
            "(tie_word_embeddings of its config.json), but model.safetensors holds another lm_head.weight; set "
            "tie_word_embeddings to false there, which keeps both, or remove lm_head.weight from the file",
        )
    edit(tmp_path, lm_head__weight=other)
    untied = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(untied.lm_head.weight, other)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    model = HuggingFaceDirectory(tmp_path).model
    batch = random_batch(model, 2, lengths=(2, 9))
    ours = load(tmp_path, model, torch.float32).forward(batch, "tokens", split_like, 1)["output"]
    wanted = Oracle(untied, tmp_path, torch.float32).logits(batch.data["tokens"])
    assert distance(torch.cat(ours), wanted) < 1e-5


def test_an_index_that_cannot_be_decoded(saved: Path, tmp_path: Path) -> None:
    directory = copy(saved, tmp_path)
    path = directory / "model.safetensors.index.json"
    for content, reason in (
        (b'{"weight_map": {}, "metadata": ' + b"[" * 100_000, "it is nested too deeply"),
        (b'{"weight_map": {"lm_head.weight": 3}}', "Expected `str`, got `int` - at `$.weight_map[...]`"),
        (b"{}", "Object missing required field `weight_map`"),
    ):
        path.write_bytes(content)
        refused(directory, f"{path} is damaged ({reason}); copy the checkpoint again")


def entry(dtype: str, shape: list[int], start: int, stop: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (entry("F32", [2], 4, 12), "has the bytes from 4 to 12, where 8 are before it"),  # overlaps the first
        (entry("F32", [1], 12, 16), "has the bytes from 12 to 16, where 8 are before it"),  # a gap
        (entry("F32", [2], 16, 8), "has the bytes from 16 to 8,"),
        (entry("F32", [2], -8, 0), "second, F32 of shape [2], has the bytes from -8 to 0, where 0 are before it"),
        (entry("F32", [-1, -2], 8, 16), "second, F32 of shape [-1, -2],"),
        (entry("F32", [2**62, 4], 8, 16), "second, F32 of shape [4611686018427387904, 4],"),  # 0 modulo 2^64
        (entry("F32", [3], 8, 16), "second, F32 of shape [3],"),
        (entry("F32", [1] * 100, 8, 12), "second, F32 of shape [1, 1,"),
    ],
)
def test_a_header_whose_tensors_do_not_lie_one_behind_the_other(
    second: dict[str, object], reason: str, tmp_path: Path
) -> None:
    header = json.dumps({"first": entry("F32", [2], 0, 8), "second": second}).encode()
    ends = max(8, second["data_offsets"][1])  # type: ignore[index]
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(ends))
    with pytest.raises(UserError, match=re.escape(f"checkpoint file {path} is damaged (")) as error:
        read_header(path)
    assert reason in str(error.value)
    assert str(error.value).endswith("; restore it or use another checkpoint")


@pytest.mark.parametrize("header", [b"[" * 100_000, b'{"a": ' + b"[" * 100_000, b'{"a": {"dtype": "\xff"}}'])
def test_a_header_that_cannot_be_decoded(header: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(UserError, match=f"checkpoint file {path} is truncated or no safetensors file "):
        read_header(path)


def test_a_header_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes((2**31).to_bytes(8, "little"))
    with path.open("r+b") as file:
        file.truncate(2**32)  # takes no room
    with pytest.raises(UserError, match=f"checkpoint file {path} is truncated or no safetensors file "):
        read_header(path)


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_every_layout_reads_its_part_of_several_files(family: str, tmp_path: Path) -> None:
    """GPT-2's query, key and value are one transposed tensor, so that tensor parallelism cuts out of its middle."""
    theirs = oracle(config_class(family)(**(GPT2_SIZES if family == "gpt2" else SIZES)), tmp_path, torch.float32)
    whole = theirs.state("whole")
    theirs.hf.save_pretrained(tmp_path / "shards", max_shard_size="4KB")
    assert (tmp_path / "shards/model.safetensors.index.json").is_file()
    reader = HuggingFaceReader(tmp_path / "shards", theirs.config)
    if family == "gpt2":  # by hand: the second head's keys of layer 1
        fused = theirs.hf.transformer.h[1].attn.c_attn.weight.detach()
        assert torch.equal(whole["model.layers.1.self_attn.k_proj.weight"][8:16], fused[:, 16 + 8 : 16 + 16].T)
    for strategy in (ParallelStrategy(tp=2), ParallelStrategy(pp=3), ParallelStrategy(dp=2, tp=2, pp=2)):
        layout = Layout(DeviceMesh(0, strategy.size), strategy)
        for device in layout.mesh.devices:
            for box in device_boxes(theirs.config, layout, device):
                expected = whole[box.name][box.slices_in(whole_box(box.name, tuple(whole[box.name].shape)))]
                assert torch.equal(reader.read(box), expected), box
