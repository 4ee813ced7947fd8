"""`realhf convert`: there and back, exact; what it says; what it refuses."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from realhf.api.experiment import ModelSetup
from realhf.base.errors import UserError
from realhf.cli import main
from realhf.dataflow.graph import TRAIN_STEP, ModelFunctionCallDef
from realhf.dataflow.interface import InterfaceConfig
from realhf.geometry.parameters import decoder_parameters
from realhf.models import convert as module
from realhf.models.checkpoint import CheckpointReader
from realhf.models.convert import Conversion, convert
from tests.unit.checkpoints import save_model
from tests.unit.models.families import Oracle, config_class, distance, oracle, whole_box
from tests.unit.models.test_hugging_face_files import GPT2_SIZES, SIZES


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """Of a family that, without a window, Llama could express too; with a tokenizer and a field of its own."""
    directory = tmp_path_factory.mktemp("mistral")
    config = config_class("mistral")(**SIZES, sliding_window=None, eos_token_id=7)
    theirs = oracle(config, directory, torch.float32)
    (directory / "tokenizer.json").write_text('{"of": "a test"}')
    return theirs


def run(**arguments: object) -> list[str]:
    said: list[str] = []
    convert(Conversion(**arguments), said.append)
    return said


def test_there_and_back(mistral: Oracle, tmp_path: Path) -> None:
    boxes, back = tmp_path / "boxes", tmp_path / "back"
    said = run(source=str(mistral.directory), target=str(boxes), max_file_bytes=4_000)
    assert said[0] == f"{mistral.directory}: Hugging Face mistral, 6,256 parameters, 3 layers, untied"
    assert "copying tokenizer.json" in said
    assert len(list(boxes.glob("boxes-*.safetensors"))) > 2
    reader = CheckpointReader(boxes)
    assert (reader.index.dtype, reader.index.metadata) == ("float32", {"converted_from": str(mistral.directory)})
    said = run(source=str(boxes), target=str(back))
    assert said[-1] == f"{back}: Hugging Face mistral, float32"
    assert re.fullmatch("read back, weights [0-9a-f]{16}", said[-2])
    before, after = (load_file(d / "model.safetensors") for d in (mistral.directory, back))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (back / "tokenizer.json").read_text() == '{"of": "a test"}'
    config = json.loads((back / "config.json").read_text())
    assert (config["model_type"], config["architectures"], config["eos_token_id"]) == (
        "mistral",
        ["MistralForCausalLM"],
        7,
    )
    loaded = AutoModelForCausalLM.from_pretrained(back)
    tokens = torch.arange(9)[None]
    with torch.no_grad():
        assert distance(loaded(input_ids=tokens).logits, mistral.hf(input_ids=tokens).logits) < 1e-6


def test_gpt2_in_bfloat16_and_back_from_a_checkpoint_without_a_tokenizer(tmp_path: Path) -> None:
    theirs = oracle(config_class("gpt2")(**GPT2_SIZES), tmp_path / "theirs", torch.float32)
    save_model(tmp_path / "run", theirs.config, theirs.state("state"))
    said = run(source=str(tmp_path / "run"), target=str(tmp_path / "back"), dtype="bfloat16")
    assert "no tokenizer to copy; --like DIR takes one from there" in said
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert type(loaded).__name__ == "GPT2LMHeadModel"
    ours, wanted = loaded.state_dict(), theirs.hf.state_dict()
    assert ours.keys() == wanted.keys()
    assert all(torch.equal(ours[name], wanted[name].bfloat16()) for name in wanted)


def test_tensors_of_several_dtypes(mistral: Oracle, tmp_path: Path) -> None:
    source = tmp_path / "mixed"
    shutil.copytree(mistral.directory, source)
    tensors = load_file(source / "model.safetensors")
    exact = tensors["model.norm.weight"]
    coarse = {name: tensor.bfloat16() for name, tensor in tensors.items()} | {"model.norm.weight": exact}
    save_file(coarse, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError) as error:
        run(source=str(source), target=str(tmp_path / "boxes"))
    assert re.fullmatch(
        rf"{source} has tensors of several dtypes \((\S+ is BF16, model\.norm\.weight is F32|model\.norm\.weight is "
        rf"F32, \S+ is BF16)\), and a checkpoint of boxes has one; choose it by --dtype, of float32, float64, bfloat16",
        str(error.value),
    )
    assert list(tmp_path.iterdir()) == [source]
    run(source=str(source), target=str(tmp_path / "boxes"), dtype="float32")
    reader = CheckpointReader(tmp_path / "boxes")
    for spec in decoder_parameters(mistral.config):
        assert torch.equal(reader.read(whole_box(spec.name, spec.shape)), coarse[spec.name].float())


def test_a_bit_that_changed_on_the_disk_is_seen(
    mistral: Oracle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path / "boxes", mistral.config, mistral.state("state"))
    rightly = module.write_hugging_face

    def write(*arguments: Any, **more: Any) -> list[Path]:
        files = rightly(*arguments, **more)
        (path,) = [path for path in files if path.suffix == ".safetensors"]
        content = bytearray(path.read_bytes())
        content[-1] ^= 1  # of the last number the sign, or its neighbour
        path.write_bytes(content)
        return files

    monkeypatch.setattr(module, "write_hugging_face", write)
    with pytest.raises(
        UserError, match=r"back: \S+ has other values than in \S+boxes, from which it was written; a disk"
    ):
        run(source=str(tmp_path / "boxes"), target=str(tmp_path / "back"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["boxes"]


@pytest.mark.parametrize("kind", ["hugging face", "boxes"])
def test_a_weight_that_is_not_finite_leaves_nothing_behind(kind: str, mistral: Oracle, tmp_path: Path) -> None:
    """Files were written before the last parameter was read."""
    source = tmp_path / "source"
    if kind == "boxes":
        state = mistral.state("state")
        state["lm_head.weight"][11, 5] = -torch.inf
        save_model(source, mistral.config, state)
    else:
        shutil.copytree(mistral.directory, source)
        tensors = load_file(source / "model.safetensors")
        tensors["lm_head.weight"][11, 5] = -torch.inf
        save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    message = (
        r"safetensors: lm_head\.weight holds -inf at \[11, 5\], which no model can compute with; use another check"
    )
    with pytest.raises(UserError, match=message):
        run(source=str(source), target=str(tmp_path / "out"), max_file_bytes=4_000)
    assert list(tmp_path.iterdir()) == [source]


def test_a_scalar_head(mistral: Oracle, tmp_path: Path) -> None:
    critic = mistral.config.with_head("scalar")
    state = {name: tensor for name, tensor in mistral.state("state").items() if name != "lm_head.weight"}
    state["score.weight"] = torch.randn(1, 16)
    save_model(tmp_path / "critic", critic, state)
    run(source=str(tmp_path / "critic"), target=str(tmp_path / "exported"), like=str(mistral.directory))
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "exported")
    assert torch.equal(loaded.score.weight, state["score.weight"])
    run(source=str(tmp_path / "exported"), target=str(tmp_path / "again"))
    reader = CheckpointReader(tmp_path / "again")
    reader.check_architecture(critic)


def test_the_command(mistral: Oracle, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "realhf.cli", "convert", str(mistral.directory)]
    done = subprocess.run([*command, str(tmp_path / "boxes")], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{tmp_path / 'boxes'}: checkpoint of 1 file, float32" in done.stdout


def test_a_command_that_cannot_work(mistral: Oracle, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(mistral.directory), str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path} exists already; give a new directory, or remove it first\n"
    save_model(tmp_path / "run", mistral.config, mistral.state("run"))
    words = [str(tmp_path / "run"), str(tmp_path / "out"), "--like", str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", "realhf.cli", "convert", *words], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        f"error: --like {tmp_path}: no config.json there; give the directory of a Hugging Face checkpoint\n"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_layers": 10**8}, "num_layers 100000000 is not from 1 to 1,000; give a number in that range"),
        ({"norm": "batch"}, "Invalid enum value 'batch' - at `$.norm`"),
    ],
)
def test_an_index_whose_architecture_is_none(
    mistral: Oracle, tmp_path: Path, change: dict[str, object], reason: str
) -> None:
    save_model(tmp_path / "run", mistral.config, mistral.state("run"))
    path = tmp_path / "run/index.json"
    index = json.loads(path.read_text())
    path.write_text(json.dumps(index | {"architecture": index["architecture"] | change}))
    with pytest.raises(UserError) as error:
        run(source=str(tmp_path / "run"), target=str(tmp_path / "out"))
    assert str(error.value) == f"{path}: not an architecture: {reason}; use another checkpoint"
    path.write_text(json.dumps(index | {"architecture": index["architecture"] | {"surprise": 1}}))
    with pytest.raises(UserError, match=r"is of another architecture: surprise=1 \(the model has None\)"):
        run(source=str(tmp_path / "run"), target=str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("size", ["nan", "inf", "0", "-1"])
def test_a_file_size_that_is_none(size: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "source", str(tmp_path / "out"), "--max-file-gb", size]) == 2
    assert f"--max-file-gb {float(size)} is not from 1e-06 to 1,000,000; give a number in that range" in (
        capsys.readouterr().err
    )


def test_an_experiment_names_the_directory(mistral: Oracle) -> None:
    def call(name: str) -> ModelFunctionCallDef:
        return ModelFunctionCallDef(
            model_name="m",
            model_type=name,
            interface_type=TRAIN_STEP,
            interface_impl=InterfaceConfig(),
        )

    assert call(str(mistral.directory)).config == mistral.config
    assert call(f"{mistral.directory}-critic").config == mistral.config.with_head("scalar")
    assert ModelSetup(checkpoint=str(mistral.directory)).checkpoint == str(mistral.directory)
    with pytest.raises(UserError, match="architecture 'no/where' is not known"):
        call("no/where")


def test_configs_survive_json(mistral: Oracle) -> None:
    """As they do in plans, problem files and the index of checkpoints."""
    content = msgspec.json.encode(mistral.config)
    assert msgspec.json.decode(content, type=type(mistral.config)) == mistral.config
