"""What `--model` takes: a Hugging Face directory, a run, one of its models."""

import dataclasses
import json

import pytest

from realhf.api.model_source import model_source
from realhf.architecture.hugging_face import write_config
from realhf.architecture.model import DecoderConfig
from realhf.base.errors import UserError

SMALL = DecoderConfig(
    hidden_size=16, intermediate_size=32, num_layers=2, num_heads=4, num_kv_heads=2, vocab_size=40, qkv_bias=True
)


@pytest.fixture
def run_dir(tmp_path):
    """A run that has trained an actor and a critic."""
    for name, model in {"actor": SMALL, "critic": SMALL.with_head("scalar")}.items():
        folder = tmp_path / "run" / "checkpoints" / "step-3" / name
        folder.mkdir(parents=True)
        (folder / "index.json").write_text(json.dumps({"format": "x", "architecture": dataclasses.asdict(model)}))
    (tmp_path / "run" / "checkpoints" / "latest").symlink_to("step-3")
    return tmp_path / "run"


def test_a_hugging_face_directory_gives_architecture_and_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(write_config(SMALL, "float32")))
    assert model_source(str(tmp_path)).tokenizer is None
    (tmp_path / "tokenizer.json").write_text("{}")
    found = model_source(str(tmp_path))
    assert (found.checkpoint, found.architecture, found.tokenizer) == (str(tmp_path), SMALL, str(tmp_path))


def test_a_run_gives_its_model_with_the_wanted_head(run_dir):
    assert model_source(str(run_dir)).checkpoint == str(run_dir / "checkpoints" / "latest" / "actor")
    critic = model_source(str(run_dir), head="scalar")
    assert critic.checkpoint == str(run_dir / "checkpoints" / "latest" / "critic")
    assert critic.architecture == SMALL.with_head("scalar")


def test_a_source_says_which_head_its_weights_have(run_dir, tmp_path):
    assert [model_source(str(run_dir), head=head).head for head in ("lm", "scalar")] == ["lm", "scalar"]
    assert model_source("", SMALL).head is None
    config = write_config(SMALL, "float32")
    for named, head in ((config["architectures"], "lm"), (["LlamaForSequenceClassification"], "scalar"), (None, "lm")):
        (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": named}))
        assert model_source(str(tmp_path)).head == head


def test_a_model_of_a_run_is_taken_as_it_is_and_finds_the_tokenizer_of_the_run(run_dir):
    (run_dir / "tokenizer").mkdir()
    (run_dir / "tokenizer" / "tokenizer.json").write_text("{}")
    found = model_source(str(run_dir / "checkpoints" / "latest" / "critic"))
    assert found.architecture.head == "scalar"
    assert found.tokenizer == str(run_dir / "tokenizer")


def test_a_run_with_several_models_of_a_kind_asks_which(run_dir):
    (run_dir / "checkpoints" / "step-3" / "actor").rename(run_dir / "checkpoints" / "step-3" / "cost")
    index = run_dir / "checkpoints" / "step-3" / "critic" / "index.json"
    (run_dir / "checkpoints" / "step-3" / "cost" / "index.json").write_bytes(index.read_bytes())
    with pytest.raises(UserError, match=r"has the models cost, critic, and more than one of them has a head of kind"):
        model_source(str(run_dir), head="scalar")
    with pytest.raises(UserError, match=r"and none of them has a head of kind 'lm'; give one of them: .*latest/cost"):
        model_source(str(run_dir))


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"nowhere': no such directory; give a Hugging Face directory"):
        model_source(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"no checkpoint of a model is there; give a Hugging Face directory"):
        model_source(str(tmp_path))
    (tmp_path / "index.json").write_text('{"architecture": {"hidden_size": "many"}}')
    with pytest.raises(UserError, match=r"index\.json: not an architecture"):
        model_source(str(tmp_path))
