"""The sorting task: its files, its rule and its determinism."""

import hashlib
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from realhf.base.errors import UserError
from realhf.data import sort_task
from realhf.data.datasets import PreferenceDataset, PromptDataset, SFTDataset
from realhf.data.task_folder import MANIFEST, ensure_folder
from realhf.geometry.parameters import parameter_count

# Of the files of seed 0: the first 16 digits of their SHA-256.
DIGESTS = {
    "sft": "a39a8bde940a803e",
    "preferences": "9939ef10d9a61521",
    "preferences_held_out": "d6602960c8b8e4ac",
    "prompts": "728f0deded7588b0",
    "evaluation": "85e754e6634a0953",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return sort_task.ensure(tmp_path_factory.mktemp("sort") / "data", seed=0)


def rows(folder: Path, name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_folder_is_written_beside_its_place_and_appears_whole(tmp_path: Path) -> None:
    """In another place it could be on another disk, and no rename leads from there."""
    seen: list[Path] = []

    def write(work: Path) -> None:
        seen.append(work.parent)
        assert not (tmp_path / "made").exists()
        (work / "rows").write_text("1")

    assert ensure_folder(tmp_path / "made", {"seed": 1}, write) == tmp_path / "made"
    assert seen == [tmp_path]
    assert sorted(contents(tmp_path / "made")) == sorted(("rows", MANIFEST))
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o755


def test_sizes_and_disjoint_prompts(data):
    prompts = []
    for name, size in sort_task.SIZES.items():
        part = [row["prompt"] for row in rows(data, name)]
        assert len(part) == size
        prompts += part
    assert len(set(prompts)) == len(prompts)
    assert {len(p) for p in prompts} == {5, 6, 7, 8}  # four to seven letters and ">"
    wrong = [row["rejected"] for row in rows(data, "preferences.jsonl")]
    assert max(map(len, wrong)) + 1 == sort_task.MAX_NEW_TOKENS, "with the end token"


def test_every_file_passes_its_check(data):
    common = {"tokenizer": str(data / "tokenizer.json"), "max_prompt_tokens": sort_task.MAX_PROMPT_TOKENS}
    sft = SFTDataset(path=str(data / "sft.jsonl"), **common)
    assert sft.check().rows == 20_000
    assert sft.lengths()["tokens"][1] <= sort_task.MAX_PROMPT_TOKENS + sort_task.MAX_NEW_TOKENS
    for name in ("preferences.jsonl", "preferences_held_out.jsonl"):
        assert PreferenceDataset(path=str(data / name), **common).check().rows == sort_task.SIZES[name]
    assert PromptDataset(path=str(data / "prompts.jsonl"), **common).check().rows == 20_000
    assert PromptDataset(path=str(data / "evaluation.jsonl"), with_answer=True, **common).check().rows == 512


@pytest.mark.parametrize(("letters", "share"), [("abcdefghijklm", 0.25), ("nopqrstuvwxyz", 0.75)])
def test_fine_tuning_answers_are_wrong_as_often_as_meant(data, letters, share):
    part = [row for row in rows(data, "sft.jsonl") if row["prompt"][0] in letters]
    wrong = [row for row in part if row["answer"] != "".join(sorted(row["prompt"][:-1]))]
    assert abs(len(wrong) / len(part) - share) < 0.02  # four standard deviations at 10,000 rows
    descending = [row for row in wrong if row["answer"] == "".join(sorted(row["prompt"][:-1], reverse=True))]
    assert 0.8 < len(descending) / len(wrong) < 0.9


def test_chosen_answers_are_right_and_rejected_ones_are_wrong(data):
    for name in ("preferences.jsonl", "preferences_held_out.jsonl"):
        for row in rows(data, name):
            assert row["chosen"] == "".join(sorted(row["prompt"][:-1]))
            assert row["rejected"] != row["chosen"]
            assert 3 <= len(row["rejected"]) <= 8


def test_the_tokenizer_has_a_token_for_every_character():
    tokenizer = sort_task.make_tokenizer()
    assert tokenizer.get_vocab_size() == 32 == sort_task.SORT_MODEL.vocab_size
    assert tokenizer.encode("db>").ids == [1, 7, 5, 3]
    assert tokenizer.encode("a* z<eos>", add_special_tokens=False).ids == [4, 30, 31, 29, 2]
    assert tokenizer.token_to_id("<eos>") == sort_task.EOS_TOKEN


def test_the_same_seed_gives_the_same_bytes(data, tmp_path):
    again = sort_task.ensure(tmp_path / "again", seed=0)
    assert contents(again) == contents(data)
    other = sort_task.ensure(tmp_path / "other", seed=1)
    assert contents(other)["sft.jsonl"] != contents(data)["sft.jsonl"]


def test_what_seed_0_gives_stays_as_it_is(data):
    """Other files have another FORMAT_VERSION, so that data of this one is not taken for them."""
    assert sort_task.FORMAT_VERSION == 2
    sizes = {"sft": 20_000, "preferences": 5_600, "preferences_held_out": 400, "prompts": 20_000, "evaluation": 512}
    assert {f"{name}.jsonl": size for name, size in sizes.items()} == sort_task.SIZES
    manifest = {"task": "sort", "format_version": 2, "seed": 0, "sizes": sort_task.SIZES}
    assert json.loads((data / MANIFEST).read_text()) == manifest
    digests = {path.stem: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in data.glob("*.jsonl")}
    assert digests == DIGESTS


def test_wrong_answers_by_hand():
    """Right would be `abcd`."""
    wrong = sort_task
    assert wrong._descending("dbca>", None) == "dcba"
    assert wrong._copied("dbca>", None) == "dbca"
    seen = {
        make: {make("dbca>", random.Random(seed)) for seed in range(200)}
        for make in (wrong._swapped, wrong._substituted, wrong._dropped, wrong._duplicated)
    }
    assert seen[wrong._swapped] == {"bacd", "cbad", "dbca", "acbd", "adcb", "abdc"}
    assert seen[wrong._dropped] == {"bcd", "acd", "abd", "abc"}
    assert seen[wrong._duplicated] == {"aabcd", "abbcd", "abccd", "abcdd"}
    assert all(len(word) == 4 and sum(a != b for a, b in zip(word, "abcd", strict=True)) <= 1
               for word in seen[wrong._substituted])  # fmt: skip
    assert {i for word in seen[wrong._substituted] for i in range(4) if word[i] != "abcd"[i]} == {0, 1, 2, 3}


def test_a_wrong_answer_is_never_the_right_one():
    """Of a prompt that is sorted, a copy is right, so it is drawn again."""
    kinds = (sort_task._copied, sort_task._descending)
    assert {sort_task.corrupted("abc>", random.Random(seed), kinds) for seed in range(20)} == {"cba"}


def test_the_model_and_the_lengths_of_the_task():
    """1.8 million parameters, and heads for tensor parallelism over 8."""
    layer = 4 * 192 * 192 + 3 * 192 * 512 + 2 * 192
    assert parameter_count(sort_task.SORT_MODEL) == 4 * layer + 192 + 2 * 32 * 192 == 1_783_488
    assert (sort_task.SORT_MODEL.num_heads, sort_task.SORT_MODEL.num_kv_heads) == (8, 8)
    assert (sort_task.MAX_PROMPT_TOKENS, sort_task.MAX_NEW_TOKENS) == (1 + 7 + 1, 8 + 1)
    assert "".join(sort_task.VOCABULARY) == "<pad><bos><eos>>abcdefghijklmnopqrstuvwxyz* "
    assert sort_task.EOS_TOKEN == 2


def test_the_tokenizer_and_what_is_said_of_the_files(data):
    tokenizer = sort_task.make_tokenizer()
    assert tokenizer.decode([1, 4, 5, 2], skip_special_tokens=True) == "ab"
    assert tokenizer.decode([1, 4, 5, 2], skip_special_tokens=False) == "<bos>ab<eos>"
    assert Tokenizer.from_file(str(data / "tokenizer.json")).get_vocab() == tokenizer.get_vocab()
    assert sort_task._described(data).splitlines() == [
        f"{data}/sft.jsonl: 20000 lines",
        f"{data}/preferences.jsonl: 5600 lines",
        f"{data}/preferences_held_out.jsonl: 400 lines",
        f"{data}/prompts.jsonl: 20000 lines",
        f"{data}/evaluation.jsonl: 512 lines",
    ]


def test_data_that_is_there_stays_untouched(data):
    before = {path: path.stat().st_mtime_ns for path in data.iterdir()}
    assert sort_task.ensure(data, seed=0) == sort_task.ensure(data) == data
    assert {path: path.stat().st_mtime_ns for path in data.iterdir()} == before


def test_another_seed_or_a_strangers_folder_is_refused(data, tmp_path):
    with pytest.raises(UserError, match=r"not the data of the task 'sort' of seed 5; name another folder"):
        sort_task.ensure(data, seed=5)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="holds other files"):
        sort_task.ensure(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_data_of_another_version_says_that_it_is_made_anew(tmp_path):
    data = sort_task.ensure(tmp_path / "data")
    manifest = data / MANIFEST
    manifest.write_text(
        manifest.read_text().replace(f'"format_version": {sort_task.FORMAT_VERSION}', '"format_version": 1')
    )
    with pytest.raises(UserError, match="as another version of realhf made it; remove the folder, and it is made anew"):
        sort_task.ensure(data)


def test_a_failure_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(sort_task, "_distinct_prompts", fail)
    with pytest.raises(OSError, match="disk full"):
        sort_task.ensure(tmp_path / "data")
    assert list(tmp_path.iterdir()) == []


def test_processes_that_make_it_at_once_agree(data, tmp_path):
    command = [sys.executable, "-m", "realhf.data.sort_task", str(tmp_path / "data"), "--seed", "0"]
    processes = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert contents(tmp_path / "data") == contents(data)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_the_command_refuses_with_exit_code_2(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    command = [sys.executable, "-m", "realhf.data.sort_task", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert "holds other files" in result.stderr
