"""Rows of JSONL, parquet, Arrow and folders of them: any row in any order, and what a broken file says."""

import contextlib
import json
import os
import random
import sys
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from realhf.base.errors import UserError
from realhf.data.files import arrow, jsonl
from realhf.data.files.opening import open_rows
from realhf.data.files.rows import BATCH_ROWS, RowFile

ROWS = [{"prompt": f"p{i}", "level": i, "chat": [{"role": "user", "content": "é" * (i % 3)}]} for i in range(25)]


def in_order(rows: RowFile) -> list[dict[str, object]]:
    """All rows by `batches`, which are those of `row`."""
    found = []
    for first, records in rows.batches():
        assert first == len(found)
        found += records
    assert found == [rows.row(i) for i in range(len(rows))]
    return found


def write_jsonl(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def write_parquet(path: Path, rows: list[dict[str, object]], group: int = 4) -> Path:
    parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=group)
    return path


TEXTS = st.text(st.characters(codec="utf-8"), max_size=12)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.dictionaries(TEXTS, TEXTS | st.integers() | st.none(), max_size=3), min_size=1, max_size=30),
    chunk=st.integers(1, 64),
    ends_with_break=st.booleans(),
    line_break=st.sampled_from(["\n", "\r\n"]),
)
def test_every_row_of_a_jsonl_file_is_found(tmp_path_factory, rows, chunk, ends_with_break, line_break) -> None:
    path = tmp_path_factory.mktemp("rows") / "data.jsonl"
    text = line_break.join(json.dumps(row, ensure_ascii=False) for row in rows) + line_break * ends_with_break
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl, "_CHUNK_BYTES", chunk)
        assert in_order(open_rows(str(path))) == rows


def test_of_a_jsonl_file_only_the_borders_are_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows come from the file when they are asked for, with no more than a chunk in memory."""
    path = write_jsonl(tmp_path / "data.jsonl", [{"text": "x" * 1000, "i": i} for i in range(2000)])
    monkeypatch.setattr(jsonl, "_CHUNK_BYTES", 10_000)
    rows = open_rows(str(path))
    assert isinstance(rows, jsonl.JSONLFile)
    held = [value for value in vars(rows).values() if isinstance(value, np.ndarray | bytes | list)]
    assert sum(sys.getsizeof(value) for value in held) < 2000 * 8 + 1000
    assert max(len(records) for _, records in rows.batches()) < 10
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.truncate()
    assert rows.row(3)["i"] == 3
    with pytest.raises(UserError, match=r"data\.jsonl, line 1800: the file has become shorter"):
        rows.row(1799)


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\n{"a": 2}')
    assert in_order(open_rows(str(tmp_path / "data.jsonl"))) == [{"a": 1}, {"a": 2}]


def test_parquet_and_what_datasets_saves_have_the_same_rows(tmp_path: Path) -> None:
    assert in_order(open_rows(str(write_jsonl(tmp_path / "a.jsonl", ROWS)))) == ROWS
    file = open_rows(str(write_parquet(tmp_path / "a.parquet", ROWS)))
    assert in_order(file) == ROWS
    assert (file.columns(), file.place(3)) == (("prompt", "level", "chat"), f"{tmp_path / 'a.parquet'}, row 4")
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved", num_shards=3)
    assert in_order(open_rows(str(tmp_path / "saved"))) == ROWS
    # A saved selection has its rows in the new order.
    datasets.Dataset.from_list(ROWS).select([7, 3]).save_to_disk(tmp_path / "selected")
    assert in_order(open_rows(str(tmp_path / "selected"))) == [ROWS[7], ROWS[3]]
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, 6)
    assert in_order(open_rows(str(tmp_path / "a.arrow"))) == ROWS


def test_more_rows_than_a_batch(tmp_path: Path) -> None:
    rows = [{"i": i} for i in range(2 * BATCH_ROWS + 3)]
    assert in_order(open_rows(str(write_jsonl(tmp_path / "a.jsonl", rows)))) == rows
    assert in_order(open_rows(str(write_parquet(tmp_path / "a.parquet", rows, len(rows))))) == rows


def test_a_large_parquet_file_becomes_an_arrow_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow, "_IN_MEMORY_BYTES", 0)
    monkeypatch.setattr(arrow, "user_cache_path", lambda name: tmp_path / "cache" / name)
    path = write_parquet(tmp_path / "a.parquet", ROWS)
    file = open_rows(str(path))
    assert in_order(file) == ROWS
    assert file.place(0) == f"{path}, row 1"
    [cached] = (tmp_path / "cache/realhf/data").iterdir()
    with monkeypatch.context() as patch:
        patch.delattr(arrow, "_write_arrow")
        assert in_order(open_rows(str(path))) == ROWS
    write_parquet(path, ROWS[:3])
    assert in_order(open_rows(str(path))) == ROWS[:3], "another content has another digest"
    assert cached.exists()


def test_shards_are_one_file_in_the_order_of_names(tmp_path: Path) -> None:
    for i, (a, b) in enumerate([(0, 10), (10, 11), (11, 25)]):
        write_jsonl(tmp_path / f"part-{i}.jsonl", ROWS[a:b])
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / "README.md").touch()
    rows = open_rows(str(tmp_path))
    assert in_order(rows) == ROWS
    assert [rows.place(i) for i in (9, 10, 11)] == [
        f"{tmp_path}/part-0.jsonl, line 10",
        f"{tmp_path}/part-1.jsonl, line 1",
        f"{tmp_path}/part-2.jsonl, line 1",
    ]
    assert in_order(open_rows(str(tmp_path / "part-[12].jsonl"))) == ROWS[10:]


def test_folders_that_leave_a_question(tmp_path: Path) -> None:
    for name in ("train-0.jsonl", "test-0.jsonl"):
        write_jsonl(tmp_path / name, ROWS)
    with pytest.raises(UserError, match=r"the splits test, train; give a pattern .*/test\*\.jsonl"):
        open_rows(str(tmp_path))
    write_parquet(tmp_path / "more.parquet", ROWS)
    with pytest.raises(UserError, match=r"files of \.jsonl and \.parquet; give a pattern"):
        open_rows(str(tmp_path))
    with pytest.raises(UserError, match=r"no file has such a name; correct the pattern"):
        open_rows(str(tmp_path / "train-*.parquet"))
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "notes.txt").touch()
    with pytest.raises(UserError, match=r"no file of \.jsonl, .* in this folder, which has notes\.txt; give JSONL"):
        open_rows(str(tmp_path / "none"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"this is the directory of a model, not of data; give JSONL"):
        open_rows(str(tmp_path / "model"))
    saved = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS)})
    saved.save_to_disk(tmp_path / "splits")
    with pytest.raises(UserError, match=r"it has the splits train, test; give the folder of one"):
        open_rows(str(tmp_path / "splits"))
    assert in_order(open_rows(str(tmp_path / "splits/test"))) == ROWS


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", b"", r"the file is empty; it needs at least one line"),
        ("a.jsonl.gz", b"\x1f\x8b\x08", r"compressed \(gzip\).*; unpack it"),
        ("a.csv", b"prompt,answer\n1,2\n", r"no known format; give JSONL .*to_json"),
        ("a.json", b'[{"a": 1}]', r"line 1: a list instead of an object"),
        ("a.json", b'[\n{"a": 1}]', r"line 1: the file is one JSON list; every line is a JSON object"),
        ("a.jsonl", b'{"a": ' * 100_000, r"line 1: .*; every line is a JSON object"),
        ("a.parquet", b"PAR1 and no more", r"cannot be read as parquet \(.*\); write it again"),
        ("a.parquet", b"nothing", r"no known format"),
        ("a.arrow", b"ARROW1 and no more", r"not an Arrow file \(.*\); write it again"),
    ],
)
def test_broken_files(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=says) as error:
        open_rows(str(tmp_path / name)).row(0)
    assert "\n" not in str(error.value)
    assert str(tmp_path / name) in str(error.value)


def test_texts_that_are_not_utf_8_in_parquet(tmp_path: Path) -> None:
    broken = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.array([0, 1, 2], pa.int32()).buffers()[1], pa.py_buffer(b"a\xff")]
    )
    parquet.write_table(pa.table({"prompt": broken}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet, row 2: .*(?i:utf-?8).*; write the file again"):
        open_rows(str(tmp_path / "a.parquet")).row(1)


def test_without_pyarrow_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "a.parquet", ROWS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"need pyarrow, which is not installed; .*realhf\[data\]"):
        open_rows(str(path))


def damaged_arrow(path: Path, old: bytes, new: bytes, *, as_stream: bool) -> Path:
    """A file of two batches; of the second one's texts, of 777 and 888 characters, these bytes are others."""
    schema = pa.schema([("prompt", pa.string())])
    writer = pa.ipc.new_stream if as_stream else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as sink, writer(sink, schema) as file:
        for texts in (["a", "b"], ["x" * 777, "y" * 888]):
            file.write_batch(pa.RecordBatch.from_arrays([pa.array(texts)], schema=schema))
    content = path.read_bytes()
    assert content.count(old) == 1
    path.write_bytes(content.replace(old, new))
    return path


def offsets(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


@pytest.mark.parametrize("as_stream", [False, True])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (offsets(0, 777, 1665), offsets(0, 2**30, 2**30)),
        (offsets(0, 777, 1665), offsets(0, 777, 300)),
        (offsets(0, 777, 1665), offsets(-(2**30), 777, 1665)),
        (b"xyy", b"x\xffy"),
    ],
    ids=["beyond the end", "backwards", "before the begin", "not UTF-8"],
)
def test_a_damaged_arrow_file_is_refused_and_ends_no_process(
    old: bytes, new: bytes, as_stream: bool, tmp_path: Path
) -> None:
    rows = open_rows(str(damaged_arrow(tmp_path / "rows.arrow", old, new, as_stream=as_stream)))
    assert rows.row(1) == {"prompt": "b"}
    for _ in range(2):  # it is not taken for good the second time
        with pytest.raises(UserError, match=r"rows\.arrow, row 3: .*write the file again"):
            rows.row(2)
    with pytest.raises(UserError, match="write the file again"):
        list(rows.batches())


@pytest.mark.parametrize("suffix", [".arrow", ".parquet", ".jsonl"])
def test_whatever_bytes_of_a_file_are_others_it_is_read_or_refused(suffix: str, tmp_path: Path) -> None:
    path, rows = tmp_path / f"rows{suffix}", ROWS[:6]
    if suffix == ".jsonl":
        write_jsonl(path, rows)
    elif suffix == ".parquet":
        write_parquet(path, rows)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, pa.Table.from_pylist(rows).schema) as file:
            file.write_table(pa.Table.from_pylist(rows), max_chunksize=4)
    content = path.read_bytes()
    for seed in range(60):
        at_random = random.Random(seed)
        changed = bytearray(content)
        for _ in range(at_random.choice((1, 2, 8))):
            changed[at_random.randrange(8, len(changed))] = at_random.choice((0, 1, 127, 128, 255))
        path.write_bytes(changed[: at_random.choice((len(changed), at_random.randrange(8, len(changed))))])
        with contextlib.suppress(UserError):
            list(open_rows(str(path)).batches())


def test_what_is_no_regular_file_is_no_data_set(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")
    for path in (tmp_path / "rows.jsonl", Path("/dev/zero")):
        with pytest.raises(UserError, match="instead of a regular file"):
            open_rows(str(path))


def test_a_row_has_a_largest_size_and_depth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl"
    deep = '{"prompt": ' + "[" * 500 + "]" * 500 + "}"
    path.write_text(f'{{"prompt": "a"}}\n{deep}\n')
    with pytest.raises(UserError, match="line 2: it is nested too deeply"):
        open_rows(str(path)).row(1)
    monkeypatch.setattr(jsonl, "_MAX_ROW_BYTES", 20)
    path.write_text('{"prompt": "12345"}\n')  # 20 bytes
    assert open_rows(str(path)).row(0) == {"prompt": "12345"}
    path.write_text('{"prompt": "1234"}\n{"prompt": "123456"}\n{}\n')
    with pytest.raises(UserError, match="line 2: it has 21 bytes, and a row at most 20"):
        open_rows(str(path))
