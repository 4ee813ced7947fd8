"""What is printed of a data set before a run."""

import json
from pathlib import Path

import pytest

from realhf.data.look import main
from tests.unit.data.tokenizers_of_families import write_qwen

CHAT = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, "abcd", strict=True)]
TEXT = (
    "<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n<|im_start|>user\\na<|im_end|>\\n"
    "<|im_start|>assistant\\n{}<|im_end|>{}\\n<|im_start|>user\\nc<|im_end|>\\n<|im_start|>assistant\\n[[d<|im_end|>]]"
)


def test_rows_with_what_is_in_the_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_qwen(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    words = ["examples", "--path", str(tmp_path / "rows.jsonl"), "--tokenizer", str(tmp_path), "--rows", "5"]
    for options, before, behind in ([], "b", ""), (["--loss-on", "all"], "[[b", "]]"):
        assert main([*words, *options]) == 0
        description, _, place, row = capsys.readouterr().out.splitlines()
        says = "1 row; columns messages; tokens: 74.0 tokens on average, at most 74; chats by the tokenizer's template"
        assert description == f"data set {tmp_path}/rows.jsonl: {says}"
        assert place == f"{tmp_path}/rows.jsonl, line 1"
        assert row == f"  tokens (74 tokens): {TEXT.format(before, behind)}"


def test_pairs_and_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_qwen(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c\n"}) + "\n")
    words = ["--path", str(tmp_path / "rows.jsonl"), "--tokenizer", str(tmp_path)]
    assert main(["pairs", *words]) == 0
    assert capsys.readouterr().out.splitlines()[3:] == [
        "  prompt (1 tokens): a",
        "  chosen (3 tokens): a[[b<|im_end|>]]",
        "  rejected (4 tokens): a[[c\\n<|im_end|>]]",
    ]
    assert main(["examples", *words]) == 2
    assert "is known as the answer" in capsys.readouterr().err
    assert main(["prompt", *words]) == 2
    assert "KIND is `prompts`, `examples` or `pairs`" in capsys.readouterr().out
