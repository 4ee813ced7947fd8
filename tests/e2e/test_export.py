"""A run's checkpoint in transformers: one command, then the same tokens, chats and probabilities."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from realhf.data.tokenizer import TextTokenizer
from tests.docs.tiny_models import SIZES, write_tiny_model
from tests.e2e.forked import quickly_finished
from tests.e2e.runs import realhf

CHAT = [{"role": "user", "content": "Sort the letters: the\nend, naïve 文"}]

EXPERIMENT = '''
from dataclasses import dataclass

import experiments.sft as sft
from realhf.api import auto, model_source
from realhf.data.datasets import SFTDataset


@auto(batch_size=2)
@dataclass(frozen=True, kw_only=True)
class Tuned(sft.SFTExperiment):
    """The ready experiment on a file of this test's."""

    @property
    def dataset(self) -> SFTDataset:
        path, tokenizer = f"{self.data_dir}/rows.jsonl", model_source(self.model).tokenizer + "/tokenizer.json"
        return SFTDataset(path=path, tokenizer=tokenizer, max_prompt_tokens=64, end_token="END")
'''


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["Qwen2.5-1.5B", pytest.param("Llama-3.1-8B", marks=pytest.mark.slow)])
def test_the_model_of_a_run_opens_in_transformers(name: str, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / name)
    tokenizer = TextTokenizer(model)
    end = tokenizer.decode(tokenizer.end_tokens[:1], skip_special=False)
    theirs = AutoModelForCausalLM.from_pretrained(model)
    generation = (model / "generation_config.json").read_text()
    (tmp_path / "rows.jsonl").write_text('{"prompt": "the end", "answer": "an answer"}\n' * 4)
    (tmp_path / "tuned.py").write_text(EXPERIMENT.replace("END", end))
    run = quickly_finished(
        tmp_path / "run", tmp_path / "tuned.py", "--model", model, "--data-dir", tmp_path, "--steps", "2",
        "--no-evaluate", "--num-workers", "1", "--evaluations", "50", "--batch-size", "2",
    )  # fmt: skip
    assert {path.name for path in (run.path / "tokenizer").iterdir()} == {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
        *(["chat_template.jinja"] if name.startswith("Qwen") else []),
    }  # fmt: skip

    done = realhf("convert", run.path, tmp_path / "exported")
    assert done.returncode == 0, done.stderr
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert loaded.config.max_position_embeddings == SIZES["max_position_embeddings"]
    assert loaded.generation_config.eos_token_id == json.loads(generation)["eos_token_id"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    ours = TextTokenizer(run.path / "tokenizer")
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True, date_string="26 Jul 2024")
    assert text == ours.template.render(CHAT, add_generation_prompt=True)
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokens == ours.encode(text, special=False)
    assert tokenizer.decode(tokens) == text

    assert not torch.equal(loaded.lm_head.weight, theirs.lm_head.weight), "it was trained"
    again = quickly_finished(
        tmp_path / "again", tmp_path / "tuned.py", "--model", run.path, "--data-dir", tmp_path, "--steps", "1",
        "--no-evaluate", "--num-workers", "1", "--evaluations", "50", "--batch-size", "2",
    )  # fmt: skip
    with torch.no_grad():
        row = torch.tensor([ours.encode("the end", special=True) + ours.encode("an answer", special=False)])
        row = torch.cat([row, torch.tensor([[ours.end_tokens[0]]])], dim=1)
        prompt = len(ours.encode("the end", special=True))
        logprobs = loaded(input_ids=row).logits.log_softmax(-1)[0, prompt - 1 : -1]
    wanted = -logprobs.gather(-1, row[0, prompt:, None]).mean().item()
    assert again.metrics[0]["loss"] == pytest.approx(wanted, rel=1e-4), "the run's model and the exported one"
    assert (again.path / "tokenizer/config.json").read_bytes() == (run.path / "tokenizer/config.json").read_bytes()
