"""Data sets: what the columns hold, and what a broken file says."""

import json
import subprocess
import sys

import pytest

from realhf.api.experiment import Dataset
from realhf.base.errors import UserError
from realhf.data import sort_task
from realhf.data.datasets import PreferenceDataset, PromptDataset, SFTDataset
from realhf.data.rows import DatasetRows
from realhf.data.text_dataset import OpenDataset

GOOD = {"prompt": "ba>", "answer": "ab", "chosen": "ab", "rejected": "ba"}


@pytest.fixture
def folder(tmp_path):
    sort_task.make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def make(folder, kind, lines, **settings):
    content = b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)
    (folder / "data.jsonl").write_bytes(content)
    settings = {"tokenizer": str(folder / "tokenizer.json"), "max_prompt_tokens": 4} | settings
    return kind(path=str(folder / "data.jsonl"), **settings)


def read(dataset) -> dict[str, list[int]]:
    [tokens] = DatasetRows(dataset, None, 1).tokens(0, [0])
    return tokens


def test_columns_of_every_kind(folder):
    # <bos> b a > is 1 5 4 3; the answer a b <eos> is 4 5 2.
    assert read(make(folder, PromptDataset, [GOOD])) == {"prompt": [1, 5, 4, 3]}
    with_answer = make(folder, PromptDataset, [GOOD], with_answer=True)
    assert read(with_answer) == {"prompt": [1, 5, 4, 3], "answer": [4, 5, 2]}
    assert read(make(folder, SFTDataset, [GOOD])) == {"tokens": [1, 5, 4, 3, 4, 5, 2], "prompt_length": [4]}
    assert read(make(folder, PreferenceDataset, [GOOD])) == {
        "prompt": [1, 5, 4, 3],
        "chosen": [1, 5, 4, 3, 4, 5, 2],
        "rejected": [1, 5, 4, 3, 5, 4, 2],
    }


def test_they_are_data_sets_and_count_their_rows(folder):
    for kind in (PromptDataset, SFTDataset, PreferenceDataset):
        dataset = make(folder, kind, [GOOD] * 3)
        assert isinstance(dataset, Dataset)
        assert dataset.check().rows == 3


def test_lengths_are_mean_and_maximum(folder):
    dataset = make(folder, PromptDataset, [GOOD, {"prompt": "a>", "answer": "a"}], with_answer=True)
    assert dataset.lengths() == {"prompt": (3.5, 4, (9 + 16) / 2), "answer": (2.5, 3, (4 + 9) / 2)}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"prompt": "ba>", \n', ["broken JSON", "column", "correct the line"]),
        (b"\n", ["the line is empty", "delete it"]),
        (b'["ba>"]\n', ["a list instead of an object"]),
        (b'{"prompt": "b\xff>"}\n', ["not UTF-8"]),
        ({"prompt": "ba>"}, ["field 'answer' is missing", "prompt, answer", "add it"]),
        ({"prompt": "", "answer": "a"}, ["field 'prompt' is ''", "at least one character"]),
        ({"prompt": 7, "answer": "a"}, ["field 'prompt' is 7", "not a text"]),
        ({"prompt": "abc>", "answer": "abc"}, ["5 tokens", "--max-prompt-tokens 4", "shorten"]),
        ({"prompt": "bA>", "answer": "ab"}, ["'A' in 'bA>'", "no token"]),
        ({"prompt": "ba>", "answer": "a7"}, ["'7' in 'a7'", "no token"]),
    ],
)
def test_a_broken_line_is_named_with_its_number_and_a_remedy(folder, line, says):
    dataset = make(folder, SFTDataset, [GOOD, GOOD, line, GOOD])
    with pytest.raises(UserError) as error:
        dataset.check()
    message = str(error.value)
    assert message.startswith(f"{folder / 'data.jsonl'}, line 3: ")
    assert "\n" not in message
    for part in says:
        assert part in message


def test_the_answer_is_needed_only_where_it_is_asked_for(folder):
    lines = [{"prompt": "ba>"}]
    assert make(folder, PromptDataset, lines).check().rows == 1
    with pytest.raises(
        UserError, match=r"none of its columns \(prompt\) is known as the answer \(.*\); name the column"
    ):
        make(folder, PromptDataset, lines, with_answer=True).check()


def test_missing_and_empty_files(folder):
    dataset = make(folder, SFTDataset, [])
    with pytest.raises(UserError, match="file is empty"):
        dataset.check()
    (folder / "data.jsonl").unlink()
    with pytest.raises(UserError, match=r"data\.jsonl: no such file or directory; correct the path$"):
        dataset.check()
    with pytest.raises(UserError, match=r"tokenizer nowhere\.json: no such file"):
        make(folder, SFTDataset, [GOOD], tokenizer="nowhere.json").check()


def test_a_broken_tokenizer_and_an_unknown_end_token(folder):
    with pytest.raises(UserError, match="it has no token '<end>'; set --end-token"):
        make(folder, SFTDataset, [GOOD], end_token="<end>").check()
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer .*tokenizer\.json: .*; give a tokenizer\.json"):
        make(folder, SFTDataset, [GOOD]).check()


def test_a_reader_takes_every_row_once_an_epoch_and_depends_on_the_seed(folder):
    prompts = [f"{a}{b}>" for a in "abc" for b in "abcd"]
    dataset = make(folder, PromptDataset, [{"prompt": p} for p in prompts])

    def epoch(seed):
        reader = DatasetRows(dataset, seed, 4)
        return [tuple(row["prompt"]) for step in range(3) for row in reader.tokens(step, range(4))]

    assert len(set(epoch(1))) == 12
    assert epoch(1) == epoch(1)
    assert epoch(1) != epoch(2)
    assert epoch(None) == [(1, *(sort_task.VOCABULARY.index(c) for c in p)) for p in prompts]


@pytest.mark.parametrize("seed", [None, 3])
def test_samples_of_one_prompt_share_a_row(folder, seed):
    """An epoch has every row once, for all its samples, whatever the seed; without groups the rows are the same."""
    dataset = make(folder, PromptDataset, [{"prompt": f"{a}{b}>"} for a in "abc" for b in "abcd"])
    alone, groups = DatasetRows(dataset, seed, 4), DatasetRows(dataset, seed, 12, samples_per_prompt=3)
    for step in range(3):
        rows = alone.rows(step, range(4))
        assert groups.rows(step, range(12)) == [row for row in rows for _ in range(3)]
        assert groups.tokens(step, [5, 3, 11]) == alone.tokens(step, [1, 1, 3])
    assert sorted(row for step in range(3) for row in groups.rows(step, range(0, 12, 3))) == list(range(12))


def test_a_reader_gives_any_samples_of_any_step(folder):
    dataset = make(folder, PromptDataset, [{"prompt": f"{a}>"} for a in "abcdefgh"])
    whole = DatasetRows(dataset, 3, 4).tokens(5, range(4))
    assert DatasetRows(dataset, 3, 4).tokens(5, [3, 1]) == [whole[3], whole[1]]


def test_records_are_the_rows_of_the_same_samples_with_all_columns(folder):
    lines = [{"prompt": f"{a}>", "level": i, "tests": [a]} for i, a in enumerate("abcdefgh")]
    rows = DatasetRows(make(folder, PromptDataset, lines), 3, 4)
    for record, tokens in zip(rows.records(5, [3, 1]), rows.tokens(5, [3, 1]), strict=True):
        assert record == lines[record["level"]]
        assert tokens["prompt"][1] == sort_task.VOCABULARY.index(record["tests"][0])


@pytest.mark.parametrize(("batch_size", "sizes"), [(10, [10]), (64, [10]), (4, [3, 3, 4]), (5, [5, 5]), (1, [1] * 10)])
@pytest.mark.parametrize("group", [1, 3])
def test_batches_in_the_order_of_the_file_have_each_row_once(folder, batch_size, sizes, group):
    dataset = make(folder, PromptDataset, [{"prompt": f"{a}>"} for a in "abcdefghij"])
    rows = DatasetRows(dataset, None, batch_size * group, samples_per_prompt=group)
    assert [rows.samples(batch) for batch in range(rows.batches)] == [size * group for size in sizes]
    taken = [row for batch in range(rows.batches) for row in rows.rows(batch, range(rows.samples(batch)))]
    assert taken == [row for row in range(10) for _ in range(group)]
    drawn = DatasetRows(dataset, 3, 4 * group, samples_per_prompt=group)
    assert [drawn.samples(step) for step in range(5)] == [4 * group] * 5, "steps of training are whole"


def test_a_reader_keeps_the_rows_of_the_last_steps_only(folder, monkeypatch):
    """So that what a worker has in memory does not grow with the steps; what comes again is tokenised once more."""
    dataset = make(folder, PromptDataset, [{"prompt": f"{a}{b}>"} for a in "abcd" for b in "abcd"])
    tokenised = []
    row = OpenDataset.row
    monkeypatch.setattr(OpenDataset, "row", lambda *words: tokenised.append(words[1]) or row(*words))
    reader = DatasetRows(dataset, None, 2)

    def rows_of(step):
        return reader.tokens(step, range(2))

    first = [rows_of(step) for step in range(8)]
    assert tokenised == list(range(16))
    assert [rows_of(step) for step in range(4, 8)] == first[4:]
    assert len(tokenised) == 16, "those are still there"
    assert [rows_of(step) for step in range(8)] == first
    assert len(tokenised) == 32


def test_a_row_that_was_just_used_stays(folder, monkeypatch):
    dataset = make(folder, PromptDataset, [{"prompt": f"{a}>"} for a in "abcdef"])
    tokenised = []
    row = OpenDataset.row
    monkeypatch.setattr(OpenDataset, "row", lambda *words: tokenised.append(words[1]) or row(*words))
    rows = DatasetRows(dataset, None, 1)
    for step in (0, 1, 2, 3, 0, 4, 0, 1):
        assert rows.tokens(step, [0]) == [{"prompt": [1, 4 + step, 3]}]
    assert tokenised == [0, 1, 2, 3, 4, 1], "four of them"


def test_validation_needs_no_torch():
    modules = "realhf.data.datasets, realhf.data.sort_task, realhf.data.row_order"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
