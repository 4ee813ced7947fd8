"""The files that docs/data.md and docs/plans.md speak of: a tokenizer, questions, chats, pairs and lengths."""

import json
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

from tests.unit.data.tokenizers_of_families import write_qwen


def write_data_files(folder: Path) -> None:
    write_qwen(folder / "my-model")
    (folder / "lengths.txt").write_text("120\n800\n310\n4000\n")
    questions = [{"question": f"What is {i} + {i}?", "solution": str(2 * i)} for i in range(5)]
    _lines(folder / "questions.jsonl", questions)
    roles = ["user", "assistant"] * 2
    chats = [
        {"messages": [{"role": role, "content": f"{role} {i}"} for role in roles], "source": "made up"}
        for i in range(5)
    ]
    parquet.write_table(pa.Table.from_pylist(chats), folder / "chats.parquet")
    (folder / "pairs").mkdir()
    for shard in range(2):
        pairs = [
            {"prompt": f"Count to {i}.", "chosen": " ".join(map(str, range(i))), "rejected": "no " * 99 * shard + "no"}
            for i in range(1, 4)
        ]
        _lines(folder / "pairs" / f"part-{shard}.jsonl", pairs)


def _lines(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
