"""How data files are found, and how each kind gives its rows, by hand."""

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from realhf.base import digest
from realhf.base.digest import known_digest
from realhf.base.errors import UserError
from realhf.data.files import arrow, jsonl, opening
from realhf.data.files.arrow import ArrowFile
from realhf.data.files.jsonl import JSONLFile, line_borders
from realhf.data.files.opening import data_files, open_rows
from realhf.data.files.rows import Record, Shards


def refusal(path: Path | str) -> str:
    with pytest.raises(UserError) as error:
        open_rows(str(path))
    return str(error.value)


# --- Which files.


@pytest.fixture
def backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that lists files from the last name to the first."""
    glob, iterdir = opening.glob.glob, Path.iterdir
    monkeypatch.setattr(opening.glob, "glob", lambda path, **options: sorted(glob(path, **options), reverse=True))
    monkeypatch.setattr(Path, "iterdir", lambda self: iter(sorted(iterdir(self), reverse=True)))


@pytest.mark.usefixtures("backwards")
def test_a_pattern_names_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "deep/er/c.jsonl", "d[1].jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}\n")
    (tmp_path / "folder.jsonl").mkdir()

    def found(pattern: str) -> list[str]:
        return [str(path.relative_to(tmp_path)) for path in data_files(str(tmp_path / pattern))]

    assert found("*.jsonl") == ["a.jsonl", "b.jsonl", "d[1].jsonl"]
    assert found("**/*.jsonl") == ["a.jsonl", "b.jsonl", "d[1].jsonl", "deep/er/c.jsonl"]
    assert found("d[1].jsonl") == ["d[1].jsonl"], "a file of just this name"
    assert found("d[[]1].jsonl") == ["d[1].jsonl"]
    assert found("a.jsonl") == ["a.jsonl"]
    with pytest.raises(FileNotFoundError):
        found("x.jsonl")
    with pytest.raises(
        UserError, match=f"^{re.escape(f'data set {tmp_path}/x*: no file has such a name; correct the')}"
    ):
        found("x*")


def test_what_datasets_saved_is_read_as_its_files_say(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    state.write_text(json.dumps({"_data_files": [{"filename": "b.arrow"}, {"filename": "a.arrow"}]}))
    assert data_files(str(tmp_path)) == [tmp_path / "b.arrow", tmp_path / "a.arrow"]
    for content, why in (
        ("{}", "KeyError: '_data_files'"),
        ('{"_data_files": [{}]}', "KeyError: 'filename'"),
        ("[", ""),
    ):
        state.write_text(content)
        assert re.match(
            rf"{re.escape(str(state))}: no file of `datasets` \(.*{why}.*\); save it again$", refusal(tmp_path)
        )
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    says = f"data set {tmp_path}: it has the splits train, test; give the folder of one, {tmp_path}/SPLIT"
    assert refusal(tmp_path) == says


@pytest.mark.usefixtures("backwards")
def test_a_folder_of_one_kind_of_files(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", ".hidden.jsonl", "_made.jsonl", "notes.txt", "train-0.txt"):
        (tmp_path / name).write_text("{}\n")
    (tmp_path / "c.jsonl").mkdir()
    assert data_files(str(tmp_path)) == [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for suffix in (".parquet", ".ndjson", ".json", ".arrow"):
        (tmp_path / f"a{suffix}").touch()
    kinds = ".arrow and .json and .jsonl and .ndjson and .parquet"
    says = f"data set {tmp_path}: it has files of {kinds}; give a pattern, {tmp_path}/*.arrow"
    assert refusal(tmp_path) == says


@pytest.mark.usefixtures("backwards")
def test_a_folder_of_splits(tmp_path: Path) -> None:
    for name in ("validation-0.jsonl", "train-0.jsonl", "train-1.jsonl", "training.jsonl"):
        (tmp_path / name).write_text("{}\n")
    assert refusal(tmp_path) == (
        f"data set {tmp_path}: it has files of the splits train, training, validation; give a pattern that takes one, "
        f"{tmp_path}/train*.jsonl"
    )
    for name in ("training.jsonl", "validation-0.jsonl"):
        (tmp_path / name).unlink()
    (tmp_path / "evaluated.jsonl").write_text("{}\n")  # no split's name
    assert [path.name for path in data_files(str(tmp_path))] == ["evaluated.jsonl", "train-0.jsonl", "train-1.jsonl"]


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_the_directory_of_a_model(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("{}")
    assert refusal(tmp_path) == (
        f"data set {tmp_path}: this is the directory of a model, not of data; give JSONL (one object a line), parquet, "
        "or a folder that `datasets` saved (save_to_disk)"
    )


@pytest.mark.parametrize(
    ("count", "inside"), [(0, "nothing"), (8, "0, 1, 2, 3, 4, 5, 6, 7"), (9, "0, 1, 2, 3, 4, 5, 6, 7")]
)
def test_a_folder_without_data_says_what_it_has(count: int, inside: str, tmp_path: Path) -> None:
    for number in range(count):
        (tmp_path / str(number)).touch()
    says = f"no file of .jsonl, .ndjson, .json, .parquet, .arrow in this folder, which has {inside}; give JSONL"
    assert says in refusal(tmp_path)


def test_paths_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remedy = "correct the path"
    assert refusal(tmp_path / "x") == f"data set {tmp_path}/x: no such file or directory; {remedy}"

    def fail(path: str) -> list[Path]:
        raise OSError("Without A Number")

    monkeypatch.setattr(opening, "data_files", fail)
    assert refusal("x") == f"data set x: without a number; {remedy}"


def test_files_without_a_row(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    (tmp_path / "b.csv").touch()
    for name in ("a.jsonl", "b.csv"):
        says = f"data set {tmp_path}/{name}: the file is empty; it needs at least one line"
        assert refusal(tmp_path / name) == says
    assert refusal(tmp_path) == f"data set {tmp_path}: its files are empty; it needs at least one line"
    (tmp_path / "c.jsonl").write_text("{}\n")
    assert len(open_rows(str(tmp_path))) == 1


@pytest.mark.parametrize(
    ("content", "kind"),
    [(b"\x1f\x8b..", "gzip"), (b"PK\3\4..", "zip"), (b"\x28\xb5\x2f\xfd..", "zstandard"), (b"BZh..", "bzip2")],
)
def test_compressed_files(content: bytes, kind: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    says = f"data set {tmp_path}/a.jsonl: it is compressed ({kind}), and rows are read in any order; unpack it"
    assert refusal(tmp_path / "a.jsonl") == says


@pytest.mark.parametrize("suffix", ["csv", "tsv", "xlsx", "parquet", "arrow", "safetensors", "bin"])
def test_files_of_other_kinds(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows.{suffix}"
    path.write_text('{"a": 1}\n')
    hint = ""
    if suffix == "csv":
        hint = " (`datasets.load_dataset('csv', data_files='rows.csv')['train'].to_json('rows.jsonl')` converts it)"
    assert refusal(path) == f"data set {path}: no known format; give {opening.FORMATS}{hint}"
    for name in ("rows.txt", "rows"):
        path.rename(tmp_path / name)
        path = tmp_path / name
        assert open_rows(str(path)).row(0) == {"a": 1}


# --- Rows of JSONL.


def test_the_borders_of_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for content, borders in (
        (b"", [0]),
        (b"\n", [0, 1]),
        (b"a", [0, 1]),
        (b"a\nbcd\n", [0, 2, 6]),
        (b"a\nbcd", [0, 2, 5]),
        (b"a\n\n\nb", [0, 2, 3, 4, 5]),
    ):
        (tmp_path / "x").write_bytes(content)
        for chunk in (1, 2, 3, 2**24):
            monkeypatch.setattr(jsonl, "_CHUNK_BYTES", chunk)
            with (tmp_path / "x").open("rb") as file:
                found = line_borders(file.fileno())
            assert (found.tolist(), found.dtype) == (borders, np.int64)


@pytest.mark.parametrize(
    ("chunk", "batches"),
    [
        (1, [(0, 1), (1, 1), (2, 1), (3, 1), (4, 1)]),
        (19, [(0, 1), (1, 1), (2, 1), (3, 1), (4, 1)]),
        (20, [(0, 2), (2, 1), (3, 2)]),
        (29, [(0, 2), (2, 1), (3, 2)]),
        (39, [(0, 2), (2, 1), (3, 2)]),
        (40, [(0, 2), (2, 2), (4, 1)]),
        (50, [(0, 3), (3, 2)]),
        (10**6, [(0, 5)]),
    ],
)
def test_as_many_lines_as_fit_a_chunk(
    chunk: int, batches: list[tuple[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines of 10, 10, 30, 10 and 10 bytes; a longer one comes alone."""
    lines = [json.dumps({"a": "x" * n}) + "\n" for n in (1, 1, 21, 1, 1)]
    assert [len(line) for line in lines] == [11, 11, 31, 11, 11]
    (tmp_path / "a.jsonl").write_text("".join(line.replace(" ", "") for line in lines))
    monkeypatch.setattr(jsonl, "_CHUNK_BYTES", chunk)
    found = list(JSONLFile(tmp_path / "a.jsonl").batches())
    assert [(first, len(records)) for first, records in found] == batches
    assert [len(record["a"]) for _, records in found for record in records] == [1, 1, 21, 1, 1]


def test_a_batch_has_at_most_1024_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n" * 2050)
    file = JSONLFile(tmp_path / "a.jsonl")
    sizes = [(0, 1024), (1024, 1024), (2048, 2)]
    assert [(first, len(records)) for first, records in file.batches()] == sizes
    rows = ArrowFile(tmp_path, [pa.RecordBatch.from_pydict({"i": list(range(2050))})], ["i"])
    assert [(first, len(records)) for first, records in rows.batches()] == sizes
    assert len(file) == 2050


def test_a_system_that_reads_little_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": "bcd"}\n{"a": "efg"}\n')
    file, pread = JSONLFile(path), os.pread
    monkeypatch.setattr(jsonl.os, "pread", lambda handle, count, place: pread(handle, min(count, 5), place))
    assert [file.row(i) for i in (1, 0)] == [{"a": "efg"}, {"a": "bcd"}]
    assert list(file.batches()) == [(0, [{"a": "bcd"}, {"a": "efg"}])]
    assert (file.columns(), file.place(1), file.paths) == (("a",), f"{path}, line 2", (path,))


FORM = "every line is a JSON object with the row's columns"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"a": }', f"broken JSON (Expecting value at column 7); {FORM}; correct the line or delete it"),
        (b" \t", f"the line is empty; {FORM}; correct the line or delete it"),
        (b" [", "{}; " + f"{FORM}; correct the line or delete it"),
        (b"7", f"a int instead of an object; {FORM}; correct the line"),
        (b'{"a": "\xff"}', "it is not UTF-8; save the file as UTF-8"),
        (b'\xef\xbb\xbf{"a": 1}', "{}"),
        (b"[" * 500 + b"]" * 500, f"it is nested too deeply; {FORM}; correct the line or delete it"),
    ],
)
@pytest.mark.parametrize("place", [0, 1])
def test_a_broken_line(place: int, line: bytes, says: str, tmp_path: Path) -> None:
    """A list in the first line is that of the whole file; a byte order mark is part of any other line."""
    path = tmp_path / "a.jsonl"
    path.write_bytes((b"{}\n" if place else b"") + line + b"\n{}\n")
    if line.startswith(b"\xef") and place == 0:
        assert open_rows(str(path)).row(0) == {"a": 1}
        return
    if line == b" [":
        says = says.format("broken JSON (Expecting value at column 1)" if place else "the file is one JSON list")
    with pytest.raises(UserError) as error:
        open_rows(str(path)).row(place)
    message = str(error.value)
    assert message.startswith(f"{path}, line {place + 1}: ")
    if line.startswith(b"\xef"):
        assert "broken JSON (Unexpected UTF-8 BOM" in message
    elif line == b" [" and place:
        assert "broken JSON" in message
    else:
        assert message == f"{path}, line {place + 1}: {says}"


def test_a_number_of_too_many_digits(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": ' + "1" * 5000 + "}\n")
    with pytest.raises(UserError, match=rf"line 1: .*4300 digits.*; {FORM}; correct the line or delete it"):
        open_rows(str(tmp_path / "a.jsonl")).row(0)


# --- Rows of Arrow.


class Batch:
    """A record batch that counts how often it is looked at as a whole."""

    def __init__(self, *rows: int) -> None:
        self.rows, self.looks = [{"i": row} for row in rows], 0

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    def validate(self, *, full: bool) -> None:
        assert full
        self.looks += 1

    def slice(self, first: int, count: int) -> Any:
        part = Batch()
        part.rows = self.rows[first : first + count]
        return part

    def to_pylist(self) -> list[Record]:
        return self.rows


def test_rows_of_batches_which_are_looked_at_once(tmp_path: Path) -> None:
    batches = [Batch(), Batch(0, 1, 2), Batch(), Batch(3), Batch(4, 5)]
    file = ArrowFile(tmp_path / "a.arrow", batches, ["i", "j"])
    assert (len(file), file.columns(), file.place(3)) == (6, ("i", "j"), f"{tmp_path}/a.arrow, row 4")
    for _ in range(2):
        assert [file.row(i) for i in range(6)] == [{"i": i} for i in range(6)]
        assert list(file.batches()) == [
            (0, [{"i": 0}, {"i": 1}, {"i": 2}]),
            (3, [{"i": 3}]),
            (4, [{"i": 4}, {"i": 5}]),
        ]
    assert [batch.looks for batch in batches] == [0, 1, 0, 1, 1]


@pytest.mark.parametrize("beyond", [0, 1])
def test_the_size_up_to_which_parquet_is_held(beyond: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"i": list(range(10))}), path, row_group_size=4)
    about = parquet.read_metadata(path)
    size_bytes = sum(about.row_group(group).total_byte_size for group in range(3))
    monkeypatch.setattr(arrow, "_IN_MEMORY_BYTES", size_bytes + beyond)
    monkeypatch.setattr(arrow, "user_cache_path", lambda name: tmp_path / "cache")
    assert [row["i"] for _, rows in open_rows(str(path)).batches() for row in rows] == list(range(10))
    assert (tmp_path / "cache").exists() is not bool(beyond)


def test_an_arrow_form_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, target = tmp_path / "a.parquet", tmp_path / "cache" / "a.arrow"
    parquet.write_table(pa.table({"i": list(range(10))}), path)
    handles = len(os.listdir("/proc/self/fd"))
    seen: list[Path] = []

    def fail(part: str, target: Path) -> None:
        seen.append(Path(part))
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(arrow.os, "replace", fail)
        with pytest.raises(OSError, match="disk full"):
            arrow._write_arrow(pa, parquet.ParquetFile(path), target)
    assert (seen[0].parent, seen[0].name[:9]) == (target.parent, ".a.arrow-")
    assert list(target.parent.iterdir()) == []
    arrow._write_arrow(pa, parquet.ParquetFile(path), target)
    assert [row["i"] for _, rows in arrow.open_arrow(target).batches() for row in rows] == list(range(10))
    assert len(os.listdir("/proc/self/fd")) == handles
    assert stat.S_IMODE(target.stat().st_mode) == 0o600, "a copy of data that others may not read"


def test_an_arrow_form_that_others_write_too_appears_complete(tmp_path: Path) -> None:
    """Processes of two hosts that share the folder may have one process number."""
    path, target = tmp_path / "a.parquet", tmp_path / "cache" / "a.arrow"
    parquet.write_table(pa.table({"i": list(range(10))}), path)
    file = parquet.ParquetFile(path)

    def batches(rows: int) -> Iterator[Any]:
        arrow._write_arrow(pa, file, target)  # the other writes all of it while this one begins
        assert [row["i"] for _, found in arrow.open_arrow(target).batches() for row in found] == list(range(10))
        yield from file.iter_batches(rows)

    arrow._write_arrow(pa, SimpleNamespace(schema_arrow=file.schema_arrow, iter_batches=batches), target)
    assert [row["i"] for _, found in arrow.open_arrow(target).batches() for row in found] == list(range(10))


def test_a_damaged_large_parquet_file_names_the_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"i": list(range(999))}), path, use_dictionary=False)
    content = bytearray(path.read_bytes())
    content[4:24] = b"\xff" * 20
    path.write_bytes(content)
    monkeypatch.setattr(arrow, "_IN_MEMORY_BYTES", 0)
    monkeypatch.setattr(arrow, "user_cache_path", lambda name: tmp_path / "cache")
    with pytest.raises(UserError, match=r"a\.parquet: cannot be read as parquet \(Couldn't deserialize thrift"):
        open_rows(str(path))


# --- Several files as one.


def test_rows_of_several_files(tmp_path: Path) -> None:
    files = [
        ArrowFile(tmp_path / f"{n}.arrow", [Batch(*rows)], [f"c{n}"])
        for n, rows in enumerate([(0, 1), (2,), (), (3, 4)])
    ]
    rows = Shards(files)
    assert (len(rows), rows.columns()) == (5, ("c0",))
    assert rows.paths == tuple(tmp_path / f"{n}.arrow" for n in range(4))
    assert [rows.row(i)["i"] for i in range(5)] == list(range(5))
    places = [rows.place(i).removeprefix(f"{tmp_path}/") for i in range(5)]
    assert places == ["0.arrow, row 1", "0.arrow, row 2", "1.arrow, row 1", "3.arrow, row 1", "3.arrow, row 2"]
    assert [(first, [row["i"] for row in records]) for first, records in rows.batches()] == [
        (0, [0, 1]),
        (2, [2]),
        (3, [3, 4]),
    ]


# --- Digests.


def sha256(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()


def test_the_digest_of_large_weights_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run notes it when it begins, and compares it with a later version of the program: the size in 8 bytes, and 64
    parts, evenly spread, which together have as many bytes as a file that is read whole."""
    monkeypatch.setattr(digest, "_SAMPLED_BYTES", 128)
    content = bytes(range(256))[:190]
    (tmp_path / "a").write_bytes(content)
    starts = [188 * part // 63 for part in range(64)]
    assert (starts[:4], starts[-1]) == ([0, 2, 5, 8], 188)
    parts = [content[start : start + 2] for start in starts]
    assert known_digest(tmp_path / "a", sampled=True) == sha256((190).to_bytes(8, "little"), *parts)
    assert known_digest(tmp_path / "a") == sha256(content)
    assert digest.content_digest([tmp_path / "a"] * 2) == sha256(sha256(content).encode() * 2)


def test_weights_of_16_mib_are_read_whole(tmp_path: Path) -> None:
    for size, is_whole in ((2**24, True), (2**24 + 1, False)):
        with (tmp_path / "a").open("wb") as file:
            file.truncate(size)
        assert (known_digest(tmp_path / "a", sampled=True) == known_digest(tmp_path / "a")) is is_whole


@pytest.mark.parametrize(
    ("modified_s", "changed_s", "reads"),
    [(1.0, 1.0, 2), (2.0, 2.0, 2), (2.5, 2.5, 1), (9.0, 1.0, 2), (1.0, 9.0, 2), (9.0, 9.0, 1)],
)
def test_a_file_that_was_just_written_is_read_again(
    modified_s: float, changed_s: float, reads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ages of its content and of its entry; it may be written once more at the same time."""

    class Seen:
        st_mtime, st_ctime = 100.0 - modified_s, 100.0 - changed_s
        st_mtime_ns, st_ctime_ns, st_dev, st_ino, st_size = 1, 2, 3, 4, 5

    found: list[Path] = []
    monkeypatch.setattr(digest.time, "time", lambda: 100.0)
    monkeypatch.setattr(digest, "file_digest", lambda path: found.append(path) or "digest")
    path = tmp_path / "a"
    monkeypatch.setattr(Path, "stat", stat_of(path, Seen))
    assert [known_digest(path), known_digest(path)] == ["digest", "digest"]
    assert found == [path] * reads


def stat_of(path: Path, seen: type) -> Callable[..., Any]:
    stat = Path.stat
    return lambda self, **options: seen if self == path else stat(self, **options)
