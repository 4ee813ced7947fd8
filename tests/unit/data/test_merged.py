"""Several data sets side by side."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from realhf.api import UserError
from realhf.api.experiment import DatasetExtent
from realhf.data import sort_task
from realhf.data.datasets import PreferenceDataset, PromptDataset, SFTDataset
from realhf.data.merged import MergedDataset
from realhf.data.rows import DatasetRows


@pytest.fixture
def merged(tmp_path: Path) -> MergedDataset:
    """Eight prompts a>, b>, ... and five examples, each with its own letter."""
    tokenizer = tmp_path / "tokenizer.json"
    sort_task.make_tokenizer().save(str(tokenizer))
    prompts, examples = tmp_path / "prompts.jsonl", tmp_path / "examples.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{c}>"}) + "\n" for c in "abcdefgh"))
    examples.write_text("".join(json.dumps({"prompt": f"{c}>", "answer": c * 3}) + "\n" for c in "vwxyz"))
    settings = {"tokenizer": str(tokenizer), "end_token": sort_task.EOS}
    return MergedDataset(
        parts=(PromptDataset(path=str(prompts), **settings), SFTDataset(path=str(examples), **settings))
    )


def test_a_sample_has_a_row_of_each_in_its_own_order(merged: MergedDataset) -> None:
    assert merged.keys == ("prompt", "tokens", "prompt_length")
    rows = DatasetRows(merged, 3, batch_size=4, samples_per_prompt=2)
    first = DatasetRows(merged.parts[0], 3, batch_size=4, samples_per_prompt=2)
    second = DatasetRows(merged.parts[1], 4, batch_size=4)
    for step in range(5):
        ids = [3, 0, 1]
        found = rows.tokens(step, ids)
        assert [sample["prompt"] for sample in found] == [sample["prompt"] for sample in first.tokens(step, ids)]
        assert [sample["tokens"] for sample in found] == [sample["tokens"] for sample in second.tokens(step, ids)]
        assert rows.records(step, ids) == first.records(step, ids)
    # Samples 0 and 1 share a prompt, and have examples of their own.
    assert found[1]["prompt"] == found[2]["prompt"]
    assert found[1]["tokens"] != found[2]["tokens"]


def test_the_content_of_both(merged: MergedDataset) -> None:
    extent, (prompts, examples) = merged.check(), (part.check() for part in merged.parts)
    assert extent == DatasetExtent(
        path=f"{prompts.path}, {examples.path}",
        rows=5,
        keys={"prompt": prompts.keys["prompt"], "tokens": examples.keys["tokens"]},
        tokenizer=prompts.tokenizer,
        largest_token=31,
        columns=("prompt",),  # of the prompts, whose rows rewards are given
        nulls=prompts.nulls,
    )
    assert merged.lengths() == {"prompt": (3.0, 3, 9.0), "tokens": (7.0, 7, 49.0), "prompt_length": (1.0, 1, 1.0)}
    assert merged.describe() == f"{merged.parts[0].describe()}\n{merged.parts[1].describe()}"


def test_rows_that_are_cut_and_dropped_are_counted_together(merged: MergedDataset) -> None:
    """Prompts of three tokens and a longer one; examples of seven, of which the response has four."""
    prompts, examples = merged.parts
    with open(prompts.path, "a") as file:
        file.write('{"prompt": "abc>"}\n{"prompt": "abcd>"}\n')
    cut = replace(prompts, max_prompt_tokens=3, too_long="truncate_left")
    assert MergedDataset(parts=(cut, examples)).check().truncated == 2
    both = MergedDataset(parts=(cut, replace(examples, max_tokens=6, too_long="truncate_left"))).check()
    assert (both.rows, both.truncated, both.dropped) == (5, 7, 0)
    drop = replace(prompts, max_prompt_tokens=3, too_long="drop")
    with open(examples.path, "a") as file:
        file.write('{"prompt": "a", "answer": "abcdef"}\n' * 3)
    both = MergedDataset(parts=(drop, replace(examples, max_tokens=7, too_long="drop"))).check()
    assert (both.rows, both.truncated, both.dropped) == (5, 0, 5)


def test_one_key_of_two_and_two_tokenizers(merged: MergedDataset) -> None:
    prompts, examples = merged.parts
    pairs = PreferenceDataset(path="pairs.jsonl", tokenizer=prompts.tokenizer)
    answers = replace(prompts, path="answers.jsonl", with_answer=True)
    for parts, first, second, key in (
        ((prompts, answers), prompts.path, "answers.jsonl", "prompt"),
        ((examples, prompts, pairs), prompts.path, "pairs.jsonl", "prompt"),
        ((examples, replace(examples, path="more.jsonl", loss_on="all")), examples.path, "more.jsonl", "prompt_length"),
    ):
        says = f"the data sets {first} and {second} both make {key!r}; a sample has a row of each, so give data sets of"
        with pytest.raises(UserError, match=f"^{re.escape(says)}"):
            MergedDataset(parts=parts)
    says = f"the data sets {prompts.path} and {examples.path} have the tokenizers {prompts.tokenizer} and other"
    with pytest.raises(UserError, match=f"^{re.escape(says)}"):
        MergedDataset(parts=(prompts, replace(examples, tokenizer="other")))
