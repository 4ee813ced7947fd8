"""A run keeps its tokenizer as transformers reads it, also where a tokenizer.json is all that there is."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from realhf.api.experiment import ModelSetup, OptimizerConfig
from realhf.base.errors import UserError
from realhf.data import sort_task
from realhf.data.tokenizer import TextTokenizer
from realhf.lifecycle.tokenizer import keep_tokenizer
from realhf.rundir.paths import RunDirectory
from tests.unit.data.tokenizers_of_families import write_qwen


def run_of(tokenizer: Path | None, checkpoint: Path | None = None, **fields: str) -> SimpleNamespace:
    """What of a run is asked: an actor that is trained. `fields`: of the data set."""
    dataset = SimpleNamespace(**({"tokenizer": str(tokenizer)} if tokenizer else {}), **fields)
    setup = ModelSetup(checkpoint=str(checkpoint) if checkpoint else None, optimizer=OptimizerConfig())
    return SimpleNamespace(
        experiment=SimpleNamespace(
            dataset=dataset,
            setups={"actor": setup},
            graph=SimpleNamespace(models={"actor": SimpleNamespace(head="lm")}),
        ),
        changing_models=["actor"],
        optimizer_steps=lambda name: 1,
    )


def kept(tmp_path: Path, run: SimpleNamespace) -> Path:
    directory = RunDirectory(tmp_path / "run")
    directory.path.mkdir(exist_ok=True, parents=True)
    keep_tokenizer(run, directory)
    return directory.tokenizer


def test_a_directory_is_copied_and_a_second_start_leaves_it(tmp_path: Path) -> None:
    source = write_qwen(tmp_path / "model")
    (source / "weights.bin").write_text("many bytes")
    folder = kept(tmp_path, run_of(source))
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        name: (source / name).read_bytes() for name in names
    }
    shutil.rmtree(source)
    assert kept(tmp_path, run_of(source)) == folder


def test_the_trained_model_s_configuration_is_preferred(tmp_path: Path) -> None:
    source, model = write_qwen(tmp_path / "tokenizer"), tmp_path / "model"
    saved = tmp_path / "b/run/checkpoints/latest/actor"
    for path, of in ((source, "the tokenizer"), (model, "the model")):
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(of)
    saved.mkdir(parents=True)
    (saved / "index.json").write_text("{}")
    assert (kept(tmp_path / "a", run_of(source)) / "config.json").read_text() == "the tokenizer"
    assert (kept(tmp_path / "b", run_of(source, model)) / "config.json").read_text() == "the model"
    assert (kept(tmp_path / "c", run_of(source, saved)) / "config.json").read_text() == "the model", "through a run"


def test_a_bare_tokenizer_is_completed_for_transformers(tmp_path: Path) -> None:
    sort_task.ensure(str(tmp_path / "data"))
    folder = kept(tmp_path, run_of(tmp_path / "data/tokenizer.json"))
    ours, theirs = TextTokenizer(tmp_path / "data/tokenizer.json"), AutoTokenizer.from_pretrained(folder)
    assert theirs("cab").input_ids == ours.encode("cab")
    assert theirs.eos_token_id == ours.end_tokens[0]
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == list(ours.end_tokens)


def test_the_template_and_the_end_token_of_the_data_set_count(tmp_path: Path) -> None:
    source = write_qwen(tmp_path / "model")
    (source / "generation_config.json").unlink()
    template = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
    folder = kept(tmp_path, run_of(source, chat_template=template, end_token="<|endoftext|>"))
    theirs = AutoTokenizer.from_pretrained(folder)
    assert theirs.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False) == "[hello]"
    ids = theirs.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == ids


def test_a_data_set_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    assert not kept(tmp_path, run_of(None)).exists()


def test_a_tokenizer_that_cannot_be_read_leaves_nothing_under_its_name(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError):
        kept(tmp_path, run_of(tmp_path / "tokenizer.json"))
    assert not (tmp_path / "run/tokenizer").exists()
