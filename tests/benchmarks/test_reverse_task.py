"""The reversal task: the same files from a seed, answers that its rewards call right, a tokenizer of ragged lengths."""

import hashlib
import json
import runpy
import sys
from pathlib import Path

import pytest
from lib import reverse_task
from tokenizers import Tokenizer

from realhf.base.errors import UserError

# Of the files of seed 0: the first 16 digits of their SHA-256.
DIGESTS = {
    "sft.jsonl": "50d21e109b258694",
    "train.jsonl": "cb31205aee47fb5c",
    "evaluation.jsonl": "31be88622bae3d30",
    "rewards.py": "dc9cfb9b129a6c78",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reverse_task.ensure(tmp_path_factory.mktemp("reverse") / "data")


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("task", ["lib.reverse_task", "realhf.data.sort_task"])
def test_the_command_makes_the_files_and_says_so(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [task, str(tmp_path / "data"), "--seed", "3"])
    monkeypatch.delitem(sys.modules, task, raising=False)
    runpy.run_module(task, run_name="__main__")
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


def test_what_seed_0_gives_stays_as_it_is(data: Path) -> None:
    """Other files have another FORMAT_VERSION, so that data of this one is not taken for them."""
    assert reverse_task.FORMAT_VERSION == 2
    assert reverse_task.SIZES == {"sft.jsonl": 20_000, "train.jsonl": 20_000, "evaluation.jsonl": 512}
    manifest = {"task": "reverse", "format_version": 2, "seed": 0, "sizes": reverse_task.SIZES}
    assert json.loads((data / "manifest.json").read_text()) == manifest
    names = [*reverse_task.SIZES, "rewards.py"]
    assert {name: hashlib.sha256((data / name).read_bytes()).hexdigest()[:16] for name in names} == DIGESTS
    assert rows(data / "sft.jsonl")[0] == {"prompt": "reverse vobipos ->", "answer": " sopibov"}
    assert rows(data / "evaluation.jsonl")[0] == {"prompt": "reverse sozidur ->", "word": "sozidur"}
    assert (data / "tokenizer/tokenizer_config.json").read_text() == '{\n  "eos_token": "<|end|>"\n}\n'
    tokenizer = Tokenizer.from_file(str(data / "tokenizer" / "tokenizer.json"))
    end = tokenizer.token_to_id("<|end|>")
    assert tokenizer.encode("sopibov<|end|>").ids[-1] == end
    assert tokenizer.decode([*tokenizer.encode("a").ids, end]) == "a"
    assert tokenizer.decode(tokenizer.encode("sopibov").ids) == "sopibov", "no space is put before a text"
    assert all(tokenizer.decode(tokenizer.encode(text).ids) == text for text in ("é 漢字 🙂", "\n\t~"))
    assert tokenizer.get_vocab_size() == 512
    made = "sft.jsonl (20000 lines), train.jsonl (20000 lines), evaluation.jsonl (512 lines), tokenizer/, rewards.py"
    assert reverse_task._described(data) == f"{data}: {made}"


def test_data_of_another_seed_is_refused_and_not_taken(data: Path) -> None:
    assert reverse_task.ensure(data, seed=0) == data
    with pytest.raises(UserError, match="not the data of the task 'reverse' of seed 4; name another folder"):
        reverse_task.ensure(data, seed=4)


def test_answers_are_right_and_have_several_lengths(data: Path) -> None:
    rewards = runpy.run_path(str(data / "rewards.py"))
    tokenizer = Tokenizer.from_file(str(data / "tokenizer" / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == reverse_task.VOCABULARY_SIZE
    lengths = set()
    for row in rows(data / "sft.jsonl")[:200]:
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
