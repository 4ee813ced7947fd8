"""The reversal task: the same files from a seed, answers that its rewards call right, a tokenizer of ragged lengths."""

import json
import runpy
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from realhf.base.errors import UserError
from realhf.data import reverse_task


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("task", ["reverse_task", "sort_task"])
def test_the_command_makes_the_files_and_says_so(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [task, str(tmp_path / "data"), "--seed", "3"])
    runpy.run_module(f"realhf.data.{task}", run_name="__main__")
    assert str(tmp_path / "data") in capsys.readouterr().out
    assert json.loads((tmp_path / "data/manifest.json").read_text())["seed"] == 3


def test_a_seed_gives_the_same_files_and_no_word_is_in_two(tmp_path: Path) -> None:
    one, other = (reverse_task.ensure(tmp_path / name, seed=3) for name in ("one", "other"))
    files = sorted(path.relative_to(one) for path in one.rglob("*") if path.is_file())
    assert [str(file) for file in files] == [
        "evaluation.jsonl",
        "manifest.json",
        "rewards.py",
        "sft.jsonl",
        "tokenizer/tokenizer.json",
        "tokenizer/tokenizer_config.json",
        "train.jsonl",
    ]
    assert all((one / file).read_bytes() == (other / file).read_bytes() for file in files)
    prompts = [row["prompt"] for name in reverse_task.SIZES for row in rows(one / name)]
    assert len(prompts) == len(set(prompts)) == sum(reverse_task.SIZES.values())


def test_data_of_another_seed_is_refused_and_not_taken(tmp_path: Path) -> None:
    folder = reverse_task.ensure(tmp_path / "data", seed=3)
    assert reverse_task.ensure(folder, seed=3) == folder
    with pytest.raises(UserError, match="not the data of the task 'reverse' of seed 4; name another folder"):
        reverse_task.ensure(folder, seed=4)


def test_answers_are_right_and_have_several_lengths(tmp_path: Path) -> None:
    folder = reverse_task.ensure(tmp_path / "data")
    rewards = runpy.run_path(str(folder / "rewards.py"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == reverse_task.VOCABULARY_SIZE
    lengths = set()
    for row in rows(folder / "sft.jsonl")[:200]:
        word = row["prompt"].split()[1]
        assert rewards["exact"](row["answer"], word) == rewards["share"](row["answer"], word) == 1
        assert row["prompt"] == reverse_task.prompt_of(word)
        ids = tokenizer.encode(row["prompt"] + row["answer"]).ids
        assert tokenizer.decode(ids) == row["prompt"] + row["answer"]
        lengths.add(len(ids))
    assert len(lengths) >= 5
    assert rewards["exact"]("abx", "cba") == 0
    assert rewards["share"]("abx", "cba") == 2 / 3
    assert rewards["share"]("abcd", "cba") == 3 / 4
