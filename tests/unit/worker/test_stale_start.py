"""A worker or master of an earlier start that comes late leaves the run alone."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from realhf.launch.process import WORKER_INDEX_VARIABLE
from realhf.master import __main__ as master
from realhf.rundir.paths import RunDirectory
from realhf.rundir.starts import START_VARIABLE, StaleStartError, begin_start
from realhf.transport.keys import make_run_keys
from realhf.worker import __main__ as worker


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    made = RunDirectory.create(tmp_path / "run")
    begin_start(made)
    make_run_keys(made.keys, num_workers=1)
    monkeypatch.setenv(START_VARIABLE, "00000000")
    monkeypatch.setenv(WORKER_INDEX_VARIABLE, "0")
    monkeypatch.setattr(sys, "argv", ["worker", str(made.path)])
    return made


def files(directory: RunDirectory) -> set[Path]:
    return set(directory.path.rglob("*"))


def test_a_late_worker_opens_no_file(directory: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(directory)
    assert worker.main() == 1
    assert "belongs to start 00000000 of the run in" in capsys.readouterr().err
    assert files(directory) == before


def test_a_worker_that_has_read_the_keys_of_the_next_start_does_not_use_them(directory: RunDirectory) -> None:
    run: Any = SimpleNamespace()
    activity: Any = SimpleNamespace(text="")
    with pytest.raises(StaleStartError):
        next(worker.carry_out(directory, run, 0, activity, lambda *_: None, 1.0))


def test_a_late_master_publishes_no_address(directory: RunDirectory) -> None:
    run: Any = SimpleNamespace(spec=SimpleNamespace(num_workers=1))
    assert master.carry_out(directory, run, "127.0.0.1", lambda _: None) == 1
    assert not list(directory.rendezvous.iterdir())
