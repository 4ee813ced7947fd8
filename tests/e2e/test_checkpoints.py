"""Checkpoints through whole runs: from Hugging Face and back, and training that goes on with its optimizer."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from realhf.data import sort_task
from realhf.dataflow.plan import CallPlan, ExecutionPlan, save_plan
from realhf.geometry.boxes import Box
from realhf.geometry.parameters import decoder_parameters
from realhf.models.checkpoint import CheckpointReader
from realhf.models.checkpoint_index import STEPS_KEY
from realhf.rundir.paths import RunDirectory
from realhf.rundir.run import load_run
from tests.e2e.forked import quickly_finished
from tests.e2e.runs import ACTOR, realhf

pytestmark = pytest.mark.distributed


@pytest.fixture
def hugging_face(tmp_path: Path) -> Path:
    """A random tiny model, as transformers saves it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=len(sort_task.VOCABULARY), max_position_embeddings=64, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_from_a_hugging_face_directory_to_another(hugging_face: Path, tmp_path: Path) -> None:
    """PPO on two workers, actor, reference and both value models from the directory; one step."""
    words = ("--steps", "1", "--no-evaluate", "--batch-size", "16", "--num-workers", "2", "--evaluations", "200")
    both = ("--model", hugging_face, "--reward-model", hugging_face, "--new-value-head")
    data = ("--data-dir", tmp_path / "data")
    run = quickly_finished(tmp_path / "run", "ppo", *words, *both, *data)
    saved = CheckpointReader(run.path / "checkpoints/latest/actor")
    done = realhf("convert", saved.directory, tmp_path / "back", "--like", hugging_face)
    assert done.returncode == 0, done.stderr
    start, back = (
        AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (hugging_face, tmp_path / "back")
    )
    assert start.keys() == back.keys()
    for name, weight in back.items():
        assert torch.equal(weight, saved.read(Box(name, (0,) * weight.dim(), tuple(weight.shape)))), name
        # What AdamW changes in one step is about its learning rate: it did start from the directory.
        assert 0 < (weight - start[name]).abs().max() < 1e-3, name


def test_training_goes_on_with_the_optimizer_under_another_layout(tmp_path: Path) -> None:
    """Every step has all rows, so that a step does not depend on where in the data a run is."""
    data = tmp_path / "data"
    sort_task.ensure(str(data))
    rows = (data / "sft.jsonl").read_bytes().splitlines(keepends=True)[:8]
    (data / "sft.jsonl").write_bytes(b"".join(rows))
    for name, degrees in {"data": {"dp": 2}, "stages": {"pp": 2, "micro_batches": 2}}.items():
        calls = {"sft_train_step": CallPlan(devices=(0, 2), **degrees)}
        save_plan(ExecutionPlan(num_devices=2, calls=calls), tmp_path / f"{name}.json")
    common = (
        "--no-evaluate", "--batch-size", "8", "--dtype", "float64", "--data-dir", data,
        "--warmup-steps", "1", "--architecture.num-layers", "2",
    )  # fmt: skip
    steps = ("--steps", "4", "--checkpoint-every", "2")
    whole = quickly_finished(tmp_path / "whole", "sft", *common, *steps, "--plan", tmp_path / "data.json")
    middle = whole.path / "checkpoints/step-2/sft"
    size_bytes = sum(file.stat().st_size for file in middle.glob("*.safetensors"))
    assert size_bytes == pytest.approx(load_run(RunDirectory(whole.path)).checkpoint_bytes, rel=0.01)
    onwards = ("--steps", "2", "--plan", tmp_path / "stages.json", "--model", middle, "--with-optimizer")
    continued = quickly_finished(tmp_path / "continued", "sft", *common, *onwards)
    model = replace(ACTOR, num_layers=2)
    expected = whole.parameters("sft", model)
    assert (continued.parameters("sft", model) - expected).abs().max() < 1e-9
    reader = CheckpointReader(continued.path / "checkpoints/latest/sft")
    assert reader.index.metadata[STEPS_KEY] == 4
    names = {spec.name for spec in decoder_parameters(model)}
    assert set(reader.names()) == names | {f"{name}@{kind}" for name in names for kind in ("exp_avg", "exp_avg_sq")}
