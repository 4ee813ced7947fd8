"""Several data sets side by side."""

import json
from pathlib import Path

import pytest

from realhf.api import UserError
from realhf.data import sort_task
from realhf.data.datasets import PromptDataset, SFTDataset
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
    extent = merged.check()
    assert (extent.rows, set(extent.keys)) == (5, {"prompt", "tokens"})
    assert list(extent.columns) == ["prompt"], "of the prompts, whose rows rewards are given"
    assert merged.lengths()["tokens"] == (7.0, 7, 49.0)
    assert len(merged.describe().splitlines()) == 2


def test_one_key_of_two(merged: MergedDataset) -> None:
    with pytest.raises(UserError, match="both make 'prompt'"):
        MergedDataset(parts=(merged.parts[0], merged.parts[0]))
