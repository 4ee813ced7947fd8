"""What a data set of text says of itself and of its rows, by hand: `<bos>` is 1, `<eos>` 2, `>` 3, `a` 4."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from realhf.api.experiment import DatasetExtent, KeyExtent, KeyLengths
from realhf.base.errors import UserError
from realhf.data import kept_rows, sort_task
from realhf.data.datasets import PreferenceDataset, PromptDataset, SFTDataset
from realhf.data.rows import DatasetRows
from realhf.data.text_dataset import TextDataset
from realhf.dataflow.interface import Nulls
from tests.unit.data.test_drafts import PLAIN, turns


@pytest.fixture(autouse=True)
def _no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_rows, "user_cache_path", lambda name: tmp_path / "cache")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sort_task.make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def make(folder: Path, kind: type[TextDataset], *rows: dict[str, Any], **options: Any) -> TextDataset:
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return kind(path=str(folder / "data.jsonl"), tokenizer=str(folder), **options)


def refusal(dataset: TextDataset) -> str:
    with pytest.raises(UserError) as error:
        dataset.check()
    return str(error.value)


def test_the_extent_of_examples(folder: Path) -> None:
    """Of two equal maxima the first is named."""
    rows = [{"prompt": "b", "answer": "a"}, {"prompt": "cz", "answer": "b"}, {"prompt": "zc", "answer": "b"}]
    dataset = make(folder, SFTDataset, *rows)
    place = f"{folder}/data.jsonl, line 2"
    tokens = KeyExtent(mean=14 / 3, mean_square=66 / 3, longest=5, longest_at=place, largest=29, largest_at=place)
    assert dataset.check() == DatasetExtent(
        path=f"{folder}/data.jsonl",
        rows=3,
        keys={"tokens": tokens},
        tokenizer=f"{folder}/tokenizer.json",
        largest_token=31,
        columns=("prompt", "answer"),
        nulls={"prompt": Nulls(0, 3, ""), "answer": Nulls(0, 3, "")},
    )
    lengths = dataset.lengths()
    assert lengths == {"tokens": KeyLengths(14 / 3, 5, 22.0), "prompt_length": KeyLengths(1.0, 1, 1.0)}


def test_columns_without_a_value_are_counted_in_the_rows_that_are_kept(folder: Path) -> None:
    rows = [{"prompt": "a", "number": 0, "hint": None}, {"prompt": "a", "number": None}, {"prompt": "abcdef"}]
    dataset = make(folder, PromptDataset, *rows, {"prompt": "b"}, max_prompt_tokens=4, too_long="drop")
    first, second = (f"{folder}/data.jsonl, line {line}" for line in (1, 2))
    expected = {"prompt": Nulls(0, 3, ""), "number": Nulls(2, 3, second), "hint": Nulls(3, 3, first)}
    assert dataset.check().nulls == expected


def test_rows_that_are_cut_and_dropped(folder: Path) -> None:
    rows = [{"prompt": "abc", "answer": "a"}, {"prompt": "a", "answer": "abcdef"}, {"prompt": "b", "answer": "a"}]
    dataset = make(folder, SFTDataset, *rows, max_tokens=5, too_long="truncate_left")
    extent = dataset.check()
    assert (extent.rows, extent.dropped, extent.truncated) == (2, 1, 1)
    assert extent.keys["tokens"].largest_at == f"{folder}/data.jsonl, line 1"
    assert dataset.describe() == (
        f"data set {folder}/data.jsonl: 2 rows; columns prompt, answer; tokens: 4.5 tokens on average, at most 5; 1 "
        "too long and dropped; 1 prompts cut on the left"
    )


def test_the_line_about_a_data_set(folder: Path) -> None:
    one = make(folder, PreferenceDataset, {"question": "a", "better": "a", "rejected": "bc"}, chosen_field="better")
    assert one.describe() == (
        f"data set {folder}/data.jsonl: 1 row; columns prompt from 'question', chosen from 'better', rejected; "
        "prompt: 2.0 tokens on average, at most 2, chosen: 4.0 tokens on average, at most 4, rejected: 5.0 tokens on "
        "average, at most 5"
    )
    row = {"prompt": turns("u:b")}
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    given = make(folder, PromptDataset, row, chat_template=template)
    assert given.describe().endswith(
        "; columns prompt; prompt: 1.0 tokens on average, at most 1; chats by the chat_template given"
    )
    (folder / "chat_template.jinja").write_text(template)
    assert make(folder, PromptDataset, row).describe().endswith("at most 1; chats by the tokenizer's template")


def test_a_changed_file_is_read_again(folder: Path) -> None:
    dataset = make(folder, PromptDataset, {"prompt": "ab"})
    assert dataset.check().keys["prompt"].longest == 3
    before = os.stat(folder / "data.jsonl")
    make(folder, PromptDataset, {"prompt": "abc"})
    os.utime(folder / "data.jsonl", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert dataset.check().keys["prompt"].longest == 4, "it is longer"
    make(folder, PromptDataset, {"prompt": "bbz"})
    os.utime(folder / "data.jsonl", ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert dataset.check().keys["prompt"].largest == 29, "it is newer"
    (folder / "generation_config.json").write_text('{"eos_token_id": 32}')
    assert "eos_token_id has '32'" in refusal(dataset), "a file of the tokenizer is new"


def test_kept_rows_are_all_or_those_within_limits(folder: Path) -> None:
    rows = [{"prompt": "ab"}, {"prompt": "a"}, {"prompt": "abc"}, {"prompt": "b"}]
    assert make(folder, PromptDataset, *rows).kept_rows() is None
    assert make(folder, PromptDataset, *rows, too_long="drop").kept_rows() is None
    assert make(folder, PromptDataset, *rows, max_prompt_tokens=4).kept_rows() is None
    kept = make(folder, PromptDataset, *rows, max_prompt_tokens=2, too_long="drop")
    for _ in range(2):
        found = kept.kept_rows()
        assert found is not None
        assert found.tolist() == [1, 3]
    assert [row for row, _, encoded in kept.open().rows() if encoded is not None] == [1, 3]


def test_columns_are_those_of_the_options() -> None:
    dataset = SFTDataset(path="a", tokenizer="b", text_field="c", prompt_field="d")
    fields = {"prompt_field": "d", "messages_field": "", "response_field": "", "text_field": "c"}
    assert dataset.field_options() == fields


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            {"prompt": "bA"},
            "'A' in 'bA' has no token in the tokenizer; correct the line, or use a tokenizer that has it",
        ),
        (
            {"prompt": "bcd"},
            "the prompt has 4 tokens, more than --max-prompt-tokens 3; shorten it, delete the line, or set --too-long "
            "to drop or truncate_left, or raise --max-prompt-tokens",
        ),
        ({"other": "b"}, "field 'prompt' is missing; every row has the fields prompt; add it or delete the line"),
        ({"prompt": ""}, "field 'prompt' is '', not a text of at least one character; correct it or delete the line"),
        (
            {"prompt": turns("u:b", "a:c")},
            "the chat 'prompt' ends with the assistant's turn, and a prompt ends before it; name it as "
            "--messages-field if it is a whole chat",
        ),
    ],
)
def test_a_broken_row_has_one_remedy(row: dict[str, Any], says: str, folder: Path) -> None:
    dataset = make(folder, PromptDataset, {"prompt": "b"}, row, max_prompt_tokens=3)
    assert refusal(dataset) == f"{folder}/data.jsonl, line 2: {says}"


def test_all_fields_of_a_row_are_named_where_one_is_missing(folder: Path) -> None:
    dataset = make(folder, SFTDataset, {"question": "b", "output": "a"}, {"question": "b"})
    says = "field 'output' is missing; every row has the fields question, output; add it or delete the line"
    assert refusal(dataset) == f"{folder}/data.jsonl, line 2: {says}"


def test_the_token_that_ends_a_response(folder: Path) -> None:
    def end(**options: Any) -> int:
        return make(folder, SFTDataset, {"prompt": "a", "answer": "b"}, **options).open().row(0)["tokens"][-1]

    assert end() == 2
    assert end(end_token=">") == 3
    missing = make(folder, SFTDataset, {"text": "a"}, end_token="<end>")
    assert refusal(missing) == (
        f"tokenizer {folder}/tokenizer.json: it has no token '<end>'; set --end-token to one that it has"
    )
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace("<eos>", "<stop>"))
    assert refusal(make(folder, SFTDataset, {"text": "a"})) == (
        f"tokenizer {file}: no file beside it names the token that ends a text (eos_token in tokenizer_config.json); "
        "set --end-token"
    )
    assert end(end_token="<stop>") == 2
    (folder / "tokenizer_config.json").write_text('{"eos_token": "*"}')
    assert end() == 30


def test_the_template_the_date_and_the_system_turn_of_a_data_set(folder: Path) -> None:
    template = PLAIN + "{{ strftime_now('%d') }}"
    dataset = make(folder, PromptDataset, {"prompt": "a"}, chat_template=template, chat_date="2024-05-17", system="x")
    opened = dataset.open()
    assert not opened.writer.has_written
    with pytest.raises(UserError, match=re.escape("line 1: ':' in 's:x|u:a|a:17' has no token")):
        opened.row(0)
    assert opened.writer.has_written


def test_the_length_of_the_samples_of_a_step(folder: Path) -> None:
    rows = [{"prompt": "a" * n, "answer": "b" * m} for n, m in ((1, 1), (2, 5), (3, 2), (4, 1))]
    reader = DatasetRows(make(folder, PromptDataset, *rows, with_answer=True), None, 2)
    assert (reader.num_rows, reader.rows_per_step, reader.samples_per_prompt) == (4, 2, 1)
    assert reader.lengths(1, ["prompt"]) == {0: 4, 1: 5}
    assert reader.lengths(0, ["prompt", "answer"]) == {0: 2 + 2, 1: 3 + 6}
    assert reader.text([1, 4, 3, 2]) == "<bos>a><eos>"
    assert reader.rows(1, [1, 0]) == [3, 2]
