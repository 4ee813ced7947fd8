"""JSON lines that are whole, cut off, and damaged."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import pytest

from realhf.base.files import BadContentError, decode_json, lines_within
from realhf.rundir import lines
from realhf.rundir.lines import Lines, Tail, append_line, evaluation_line, read_lines, step_line


class Row(msgspec.Struct):
    step: int


def row(line: bytes) -> int:
    return decode_json(line, Row).step


STEP: dict[str, Any] = {
    "step": 1,
    "time_s": 2.0,
    "tokens": 7,
    "tokens_per_s": 3.5,
    "loss": None,
    "calls": {"a": {"start": 1e9, "end": 1e9, "seconds": 0.0, "predicted_s": None}},
}


def test_what_a_crash_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_lines(path, row) == Lines([])
    path.write_text("")
    assert read_lines(path, row) == Lines([])
    path.write_text('{"step":1}\n{"step":2}\n{"step":')
    assert read_lines(path, row) == Lines([1, 2])
    path.write_text('{"step":1}\n{"step":2}')  # nothing but the line break is missing
    assert read_lines(path, row) == Lines([1, 2])


@pytest.mark.parametrize("line", [b"{oops}", b"[1]", b"7", b"", b"\xff", b'{"step":"1"}', b"[" * 10_000])
def test_a_damaged_line_costs_no_other(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1}\n' + line + b'\n{"step":3}\n')
    lines = read_lines(path, row)
    assert lines.values == [1, 3]
    (sentence,) = lines.damaged
    assert sentence.startswith(f"{path} has lines that cannot be read and are left out: line 2: ")


def test_of_many_damaged_lines_one_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("a\n" * 3 + '{"step":4}\n')
    lines = read_lines(path, row)
    assert lines.values == [4]
    assert lines.damaged[0].endswith("line 1: JSON is malformed: invalid character (byte 0); 2 more")


def test_of_a_long_file_the_end_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step":{step}}}\n' for step in range(100)) + 'bad\n{"step":100}\n')
    lines = read_lines(path, row, tail_bytes=60)
    assert lines.values == [97, 98, 99, 100]
    assert "left out: line 2 from the end: " in lines.damaged[0]


def test_what_is_no_file_is_said(tmp_path: Path) -> None:
    assert read_lines(tmp_path, row) == Lines([], (f"{tmp_path} cannot be read (Is a directory)",))


def test_lines_are_there_as_soon_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_line(path, {"step": 1, "loss": 0.5})
    assert path.read_text() == '{"step":1,"loss":0.5}\n'
    append_line(path, {"step": 2})
    assert path.read_text() == '{"step":1,"loss":0.5}\n{"step":2}\n'


def test_a_line_behind_one_that_was_cut_off_is_a_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"step":1}\n{"st')
    append_line(path, {"step": 2})
    lines = read_lines(path, row)
    assert lines.values == [1, 2]
    assert "line 2" in lines.damaged[0]


def test_a_line_that_cannot_be_written_names_its_file(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError) as caught:
        append_line(tmp_path, {})
    assert caught.value.filename == str(tmp_path)


def test_a_tail_reads_each_line_once_as_soon_as_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    said: list[str] = []
    path.write_text('{"step":0}\n')
    tail = Tail(path, row, said.append)
    assert list(tail.read()) == []
    with path.open("a") as file:
        file.write('{"step":1}\n{"st')
    assert list(tail.read()) == [1]
    assert list(tail.read()) == []
    with path.open("a") as file:
        file.write('ep":2}\n{"step":\n{"step":3}\n')
    assert list(tail.read()) == [2, 3]
    assert said == [f"{path} has gained a line that cannot be read and is left out: Input data was truncated"]
    assert list(tail.read()) == []


def test_a_tail_that_was_not_read_to_the_end_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path, row, lambda _: None)
    path.write_text('{"step":1}\n{"step":2}\n')
    assert next(tail.read()) == 1
    assert list(tail.read()) == [2]


def test_a_line_has_what_its_readers_need() -> None:
    assert step_line(msgspec.json.encode(STEP)) == STEP
    assert evaluation_line(b'{"step":0,"accuracy":null}') == {"step": 0, "accuracy": None}
    call = STEP["calls"]["a"]
    wrong = [
        {"step": -1},
        {"step": 2**60},
        {"time_s": 1e300},
        {"time_s": None},
        {"calls": []},
        {"calls": {"a": {}}},
        {"calls": {"a": call | {"end": 1e30}}},
        {"peak_bytes": [-1]},
    ]
    for change in wrong:
        with pytest.raises(BadContentError):
            step_line(msgspec.json.encode(STEP | change))
    with pytest.raises(BadContentError):
        evaluation_line(b'{"accuracy":0.5}')


def test_a_line_without_end_is_left_out_and_never_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def within(file: BinaryIO) -> Iterator[bytes | None]:
        for line in lines_within(file, 100):
            read.append(len(line or b""))
            yield line

    monkeypatch.setattr(lines, "lines_within", within)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + b"x" * 5000 + b'\n{"step": 2}\n')
    found = read_lines(path, lambda line: decode_json(line, dict[str, int]))
    assert found.values == [{"step": 1}, {"step": 2}]
    assert "line 2: it has more than" in found.damaged[0]
    assert max(read) <= 100
    said: list[str] = []
    tail = Tail(path, lambda line: decode_json(line, dict[str, int]), said.append)
    with path.open("ab") as file:
        file.write(b"y" * 5000 + b'\n{"step": 3}\n')
    assert list(tail.read()) == [{"step": 3}]
    assert len(said) == 1
