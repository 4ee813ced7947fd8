"""Following a file that is being written; lines for people where there is no terminal."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from realhf.cli.progress import Progress, Tail
from realhf.scheduler.run_directory import RunDirectory


def test_a_tail_reads_each_line_once_as_soon_as_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    assert list(tail.read()) == []
    path.write_text('{"step":1}\n{"st')
    assert list(tail.read()) == [{"step": 1}]
    assert list(tail.read()) == []
    with path.open("a") as file:
        file.write('ep":2}\n{"step":3}\n')
    assert list(tail.read()) == [{"step": 2}, {"step": 3}]
    assert list(tail.read()) == []


def test_a_tail_that_was_not_read_to_the_end_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":1}\n{"step":2}\n')
    tail = Tail(path)
    assert next(tail.read()) == {"step": 1}
    assert list(tail.read()) == [{"step": 2}]


def line(step: int, end_s: float, **stats: float) -> dict[str, Any]:
    calls = {"a": {"start": end_s - 1, "end": end_s, "seconds": 1.0, "predicted_s": 0.5}}
    return {"step": step, "time_s": 1.0, "tokens": 10, "tokens_per_s": 10.0, "calls": calls, **stats}


def test_a_line_now_and_then_and_one_at_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = RunDirectory.create(tmp_path / "run")
    with Progress(directory, steps=4) as progress:
        progress.update()
        assert progress.step == 0
        lines = [line(1, 100.0, loss=0.5), line(2, 101.0), line(3, 102.5), line(4, 103.0, grad_norm=1.0)]
        directory.metrics.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in lines))
        directory.evaluations.write_text('{"step":0,"accuracy":0.25}\n')
        progress.update()
        assert progress.step == 4
    assert capsys.readouterr().err.splitlines() == [
        "evaluation after step 0: accuracy 0.25",
        "step 1/4 1.00 s  loss 0.5  tokens_per_s 10",
        "step 3/4 1.00 s  tokens_per_s 10",
        "step 4/4 1.00 s  tokens_per_s 10",
    ]
