"""A GGUF file from the command line: trained, and converted."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from realhf import cli
from realhf.gguf.cache import hugging_face_directory
from tests.unit.data.tokenizers_of_families import write_qwen
from tests.unit.gguf.files import random_model, tokenizer_fields, write_model

FORKED = ("--num-workers", "1", "--launcher", "tests.e2e.forked:ForkedLauncher")


def test_a_file_is_trained_and_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = tokenizer_fields(write_qwen(tmp_path / "tokenizer"), "smollm")
    model = random_model("llama", tmp_path / "original", tie_word_embeddings=True)
    file = write_model(tmp_path / "tiny.Q4_1.gguf", model, "Q4_1", **fields)
    monkeypatch.chdir(tmp_path)
    rows = [{"messages": [{"role": "user", "content": f"{i} and {i}?"}], "answer": str(2 * i)} for i in range(8)]
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("rewards.py").write_text("def correct(response, answer): return float(len(response) % 2)\n")
    data = ["--data", "train.jsonl", "--reward", "rewards.py:correct", "--batch-size", "8"]
    words = ["--steps", "1", "--grpo.max-new-tokens", "4", "--run-dir", "run", *FORKED]
    assert cli.main(["run", "grpo", "--model", file.name, *data, *words]) == 0
    assert cli.main(["convert", "run", "exported"]) == 0
    capsys.readouterr()
    assert cli.main(["convert", file.name, "converted"]) == 0
    converted, kept = Path("converted"), hugging_face_directory(file)
    for path in converted.iterdir():
        assert path.read_bytes() == (kept / path.name).read_bytes()
    # One step of AdamW moves a number by about the learning rate, 1e-6 here, from where the file has it.
    before, after = (load_file(folder / "model.safetensors") for folder in (converted, Path("exported")))
    moved = max((before[name] - after[name]).abs().max().item() for name in before)
    assert before.keys() == after.keys()
    assert 0 < moved < 1e-4
    template = json.loads((converted / "tokenizer_config.json").read_text())["chat_template"]
    assert json.loads(Path("exported/tokenizer_config.json").read_text())["chat_template"] == template
    assert torch.equal(before["model.norm.weight"], model.model.norm.weight)


def test_what_convert_does_not_do_with_a_file_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    for option in ("--dtype", "--like"):
        value = "bfloat16" if option == "--dtype" else str(tmp_path)
        assert cli.main(["convert", str(file), str(tmp_path / "out"), option, value]) == 2
        assert "--dtype and --like are not for GGUF files" in capfd.readouterr().err
        assert list(tmp_path.iterdir()) == [file]
