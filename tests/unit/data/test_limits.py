"""Rows that are too long: named, dropped or cut, counted, and never in a step."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from realhf.base.errors import UserError
from realhf.data import kept_rows, sort_task, text_dataset
from realhf.data.datasets import PreferenceDataset, PromptDataset, SFTDataset
from realhf.data.rows import DatasetRows
from realhf.data.text_dataset import TextDataset
from tests.unit.data.tokenizers_of_families import write_llama3


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(kept_rows, "user_cache_path", lambda name: folder)
    return folder / "data"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sort_task.make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def make(folder: Path, kind: type[TextDataset], rows: list[dict[str, Any]], **options: Any) -> TextDataset:
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return kind(path=str(folder / "data.jsonl"), tokenizer=str(folder), **options)


def letters(*lengths: int) -> list[str]:
    """Texts of that many letters; a prompt has one token more, <bos>."""
    return ["abcdefghijklmnopqrstuvwxyz"[i : i + length] for i, length in enumerate(lengths)]


def test_dropped_rows_are_counted_and_named_nowhere(folder: Path) -> None:
    rows = [{"prompt": text} for text in letters(3, 8, 4, 9, 1)]
    dataset = make(folder, PromptDataset, rows, max_prompt_tokens=5, too_long="drop")
    extent = dataset.check()
    assert (extent.rows, extent.dropped, extent.truncated) == (3, 2, 0)
    assert (extent.keys["prompt"].longest, extent.keys["prompt"].longest_at) == (5, f"{folder}/data.jsonl, line 3")
    assert dataset.lengths() == {"prompt": (11 / 3, 5, 15.0)}
    assert dataset.describe() == (
        f"data set {folder}/data.jsonl: 3 rows; columns prompt; prompt: 3.7 tokens on average, at most 5; 2 too long "
        "and dropped"
    )


def test_the_limit_of_a_sequence(folder: Path) -> None:
    rows = [{"prompt": "abc", "answer": "abc"}, {"prompt": "a", "answer": "abcde"}, {"prompt": "a", "answer": "b"}]
    with pytest.raises(
        UserError, match=r"line 1: the sequence has 8 tokens, more than --max-tokens 7; shorten it, .*drop"
    ):
        make(folder, SFTDataset, rows, max_tokens=7).check()
    for options in ({"max_tokens": 7}, {"max_prompt_tokens": 2, "max_tokens": 8}):
        found = make(folder, SFTDataset, rows, too_long="drop", **options)
        assert found.kept_rows().tolist() == ([2] if options == {"max_tokens": 7} else [1, 2])
    # An answer to compare with is no part of the prompt's sequence.
    assert make(folder, PromptDataset, rows, max_tokens=4, with_answer=True).check().rows == 3


def test_a_longer_response_of_two_counts(folder: Path) -> None:
    rows = [{"prompt": "a", "chosen": "b", "rejected": "bcdef"}, {"prompt": "a", "chosen": "b", "rejected": "c"}]
    assert make(folder, PreferenceDataset, rows, max_tokens=6, too_long="drop").kept_rows().tolist() == [1]


def test_prompts_are_cut_at_their_beginning(folder: Path, tmp_path: Path) -> None:
    rows = [
        {"prompt": "abcdef", "answer": "abc"},
        {"prompt": "a", "answer": "abcdefgh"},
        {"prompt": "a", "answer": "b"},
    ]
    dataset = make(folder, SFTDataset, rows, max_tokens=7, too_long="truncate_left")
    extent = dataset.check()
    assert (extent.rows, extent.dropped, extent.truncated) == (2, 1, 1)
    opened = dataset.open()
    assert opened.row(0) == {"tokens": [1, 8, 9, 4, 5, 6, 2], "prompt_length": [3]}
    assert dataset.kept_rows().tolist() == [0, 2]
    llama = write_llama3(tmp_path / "llama3")
    dataset = make(folder, PromptDataset, [{"prompt": "uvwxyz"}], max_prompt_tokens=4, too_long="truncate_left")
    cut = replace(dataset, tokenizer=str(llama))
    tokens = cut.open().row(0)["prompt"]
    assert cut.open().tokenizer.decode(tokens, skip_special=False) == "<|begin_of_text|>xyz", "the begin token stays"


def test_texts_are_cut_too(folder: Path) -> None:
    dataset = make(folder, SFTDataset, [{"text": "abcdef"}], max_tokens=4, too_long="truncate_left")
    dataset.check()
    assert dataset.open().row(0) == {"tokens": [7, 8, 9, 2], "prompt_length": [1]}


def test_a_data_set_without_a_row_left_is_refused(folder: Path) -> None:
    dataset = make(folder, PromptDataset, [{"prompt": "abcd"}] * 3, max_prompt_tokens=2, too_long="drop")
    with pytest.raises(
        UserError, match=r"all of its 3 rows are too long for --max-prompt-tokens 2, --max-tokens None, .*raise"
    ):
        dataset.check()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=30),
    limit=st.integers(2, 10),
    seed=st.integers(0, 5),
    batch_size=st.integers(1, 4),
)
def test_the_order_is_that_of_a_file_of_the_kept_rows(folder: Path, lengths, limit, seed, batch_size) -> None:
    """Dropped rows reach no step, and every sample of any step is what it would be without them in the file."""
    rows = [{"prompt": text, "i": i} for i, text in enumerate(letters(*lengths))]
    kept = [row for row in rows if len(row["prompt"]) + 1 <= limit]
    dataset = make(folder, PromptDataset, rows, max_prompt_tokens=limit, too_long="drop")
    if not kept:
        with pytest.raises(UserError, match="so that none is left"):
            dataset.check()
        return
    found = DatasetRows(dataset, seed, batch_size)
    assert (found.num_rows, dataset.check().dropped) == (len(kept), len(rows) - len(kept))
    steps = range(2 * len(kept) // batch_size + 1)
    seen = [(found.tokens(step, range(batch_size)), found.records(step, range(batch_size))) for step in steps]
    (folder / "small").mkdir(exist_ok=True)
    sort_task.make_tokenizer().save(str(folder / "small" / "tokenizer.json"))
    alone = DatasetRows(make(folder / "small", PromptDataset, kept), seed, batch_size)
    assert seen == [(alone.tokens(step, range(batch_size)), alone.records(step, range(batch_size))) for step in steps]


def test_rows_are_kept_for_the_content_of_a_tokenizer_and_not_for_its_name(folder: Path, cache: Path) -> None:
    """In the second tokenizer "ab" is one token, so that "abab" fits."""
    dataset = make(folder, PromptDataset, [{"prompt": "abab"}, {"prompt": "a"}], max_prompt_tokens=3, too_long="drop")
    assert dataset.kept_rows().tolist() == [1]
    content = json.loads((folder / "tokenizer.json").read_text())
    merged = {"content": "ab", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    content["added_tokens"].append(merged | {"id": 1 + max(content["model"]["vocab"].values()), "special": False})
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert dataset.kept_rows().tolist() == [0, 1]
    assert len(list(cache.iterdir())) == 2


def known(dataset: TextDataset) -> tuple[str, dict[str, Any]]:
    """What kept rows are found by, beside the files."""
    return type(dataset).__name__, msgspec.to_builtins(dataset)


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "generation_config.json",
        "chat_template.jinja",
        "additional_chat_templates/tools.jinja",
        "given.jinja",
        "data.jsonl",
    ],
)
def test_every_file_that_decides_which_rows_are_kept_is_in_the_name(name: str, folder: Path, cache: Path) -> None:
    (folder / "additional_chat_templates").mkdir()
    for each in ("given.jinja", "chat_template.jinja", "additional_chat_templates/tools.jinja"):
        (folder / each).write_text("one")
    options = {"max_prompt_tokens": 5, "too_long": "drop", "chat_template": str(folder / "given.jinja")}
    dataset = make(folder, PromptDataset, [{"prompt": "abc"}], **options)
    names = {kept_rows._path(*known(dataset))}
    for text in ("{}", "[]"):
        (folder / name).write_text(text)
        names.add(kept_rows._path(*known(dataset)))
    assert len(names) == 3


def test_the_name_of_kept_rows_does_not_depend_on_where_files_lie(
    folder: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"max_prompt_tokens": 3, "too_long": "drop"}
    dataset = make(folder, PromptDataset, [{"prompt": "ab"}], **options)
    shutil.copytree(folder, tmp_path / "elsewhere")
    other = make(tmp_path / "elsewhere", PromptDataset, [{"prompt": "ab"}], **options)
    path = kept_rows._path(*known(dataset))
    assert path == kept_rows._path(*known(other))
    assert path.parent == cache
    assert re.fullmatch(r"[0-9a-f]{32}\.rows", path.name)
    assert path != kept_rows._path(*known(replace(dataset, max_prompt_tokens=4)))
    assert dataset.kept_rows() is not None
    assert path.read_bytes() == bytes(8), "row 0, in eight bytes"
    monkeypatch.setattr(kept_rows, "user_cache_path", lambda name: tmp_path / "new" / name)
    assert kept_rows.kept_on_disk(*known(dataset)) is None
    kept_rows.keep_on_disk(*known(dataset), np.array([3]))
    assert (tmp_path / "new/realhf/data" / path.name).read_bytes() == b"\3" + bytes(7)


def test_processes_find_the_kept_rows_once(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": text} for text in letters(3, 8, 4)]
    dataset = make(folder, PromptDataset, rows, max_prompt_tokens=5, too_long="drop")
    assert dataset.kept_rows().tolist() == [0, 2]
    [file] = cache.iterdir()
    with monkeypatch.context() as patch:
        patch.delattr(text_dataset, "_scan")
        assert dataset.kept_rows().tolist() == [0, 2]
        # Other limits, another file, another tokenizer: another digest.
        others = [{"max_prompt_tokens": 9}, {"max_tokens": 5}]
        for options in others:
            with pytest.raises(NameError):
                make(folder, PromptDataset, rows, **{"max_prompt_tokens": 5, "too_long": "drop"} | options).kept_rows()
        with pytest.raises(NameError):
            make(folder, PromptDataset, rows[1:], max_prompt_tokens=5, too_long="drop").kept_rows()
        make(folder, PromptDataset, rows)
        (folder / "generation_config.json").write_text('{"eos_token_id": 3}')
        with pytest.raises(NameError):
            dataset.kept_rows()
    (folder / "generation_config.json").unlink()
    file.unlink()
    cache.rmdir()
    cache.write_text("a file in the folder's place")
    assert dataset.kept_rows().tolist() == [0, 2], "a cache that cannot be written is no error"
