"""A run directory is new or it is refused."""

import errno
import fcntl
from pathlib import Path

import pytest

from realhf import cli
from realhf.base.errors import UserError
from realhf.rundir.paths import RunDirectory


def test_a_new_one_has_its_folders(tmp_path: Path) -> None:
    made = RunDirectory.create(tmp_path / "runs" / "a")
    assert RunDirectory.open(tmp_path / "runs" / "a") == made
    assert made.keys.stat().st_mode & 0o777 == 0o700
    assert made.rendezvous.stat().st_mode & 0o777 == 0o700
    for path in (made.log("worker-3"), made.activity("worker-3"), made.metrics):
        path.write_text("")  # the folder is there
    assert made.log("worker-3") == tmp_path / "runs/a/logs/worker-3.log"


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    assert RunDirectory.create(tmp_path).logs.is_dir()


def test_a_relative_path_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert RunDirectory(Path("runs/a")).plan == tmp_path / "runs/a/plan.json"


def test_one_that_is_in_use_is_refused(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path / "a")
    with pytest.raises(UserError, match=r"a exists and is not empty; give a new one with --run-dir"):
        RunDirectory.create(tmp_path / "a")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="exists and is not empty"):
        RunDirectory.create(tmp_path / "file")
    with pytest.raises(UserError, match="cannot make the run directory"):
        RunDirectory.create(tmp_path / "file" / "below")


def test_what_is_no_run_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no run directory: it has no logs, checkpoints"):
        RunDirectory.open(tmp_path)


def test_of_two_that_make_it_at_the_same_time_one_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    first = RunDirectory.create(path)
    monkeypatch.setattr(Path, "iterdir", lambda _: iter(()))  # what the other saw a moment before
    with pytest.raises(UserError, match=r"another run has just begun in .*/a; give each a --run-dir of its own"):
        RunDirectory.create(path)
    assert first.logs.is_dir()


def test_without_locks_one_message_says_so_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")  # as Lustre without -o flock answers

    monkeypatch.setattr(fcntl, "flock", flock)
    words = ("experiments/ppo.py", "--plan", "tests/plans/single.json", "--run-dir", str(tmp_path / "run"))
    assert cli.main(["run", *words]) == 2
    said = capsys.readouterr().err
    assert f"error: the file system of {tmp_path}/run has no locks (flock: Function not implemented); give" in said
    assert not (tmp_path / "run").exists()
