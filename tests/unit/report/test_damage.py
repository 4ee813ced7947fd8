"""Whatever happens to a file of a run directory, its readers show the rest, or refuse it in words."""

import contextlib
import io
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from realhf.base import files
from realhf.base.errors import RunError, UserError
from realhf.base.files import delete
from realhf.cli.status import process_table, summary
from realhf.lifecycle.controller import continued, note_start
from realhf.lifecycle.new import new_run
from realhf.lifecycle.resume import resumed_run
from realhf.report import html, page
from realhf.report.run_data import read_run
from realhf.report.run_status import read_run_status
from realhf.rundir.flight_recorder import ActivityWriter
from realhf.rundir.paths import RunDirectory
from realhf.rundir.prepare import prepare
from tests.unit.launch.saved_runs import save
from tests.unit.lifecycle.requests import request_of
from tests.unit.report.run_directories import good_run, metrics_line

CHANGES = 3  # bytes changed, and places where a file is cut off
NESTED = b'{"format":' + b'{"a":' * 500 + b"1" + b"}" * 501 + b"\n"
REPORTED = (
    "samples.jsonl",
    "metrics.jsonl",
    "evaluations.jsonl",
    "events.jsonl",
    "trace.json",
    "plan.json",
    "experiment.json",
    "status.json",
    "activity/worker-0",
    "launcher/launcher.lock",
)
RESUMED = (
    "metrics.jsonl",
    "events.jsonl",
    "plan.json",
    "experiment.json",
    "status.json",
    "launcher/switch",
    "checkpoints/step-4/run.json",
)


def damages(path: Path, number: int) -> Iterator[str]:
    """Damages a file in one way after the other, and says how; it is whole again afterwards."""
    content, at_random = path.read_bytes(), random.Random(path.name)
    places = [at_random.randrange(len(content)) for _ in range(number)] if content else []
    for place in places:
        path.write_bytes(content[:place])
        yield f"cut off at {place}"
        value = at_random.randrange(256)
        path.write_bytes(content[:place] + bytes([value]) + content[place + 1 :])
        yield f"byte {place} is {value}"
    for other in (b"", b"{}\n", b"[]\n", b"null\n", b"[" * 5000, NESTED, b"\xff\xfe\n"):
        path.write_bytes(other)
        yield f"is {other[:5]!r}"
    path.unlink()
    yield "missing"
    path.mkdir()
    yield "a folder"
    path.rmdir()
    os.mkfifo(path)
    yield "a pipe"
    path.rename(pipe := path.with_name("pipe"))
    path.symlink_to(pipe)
    yield "a link to a pipe"
    path.unlink()
    pipe.unlink()
    path.write_bytes(content)


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    directory = RunDirectory(good_run(tmp_path_factory.mktemp("damage") / "run"))
    for folder in ("activity", "launcher"):
        (directory.path / folder).mkdir()
    (directory.launcher / "launcher.lock").write_text("process 1 on host")
    ActivityWriter(directory.activity("worker-0")).set("actor_generate of step 4: compute [/bold]")
    return directory


@pytest.mark.parametrize("file", REPORTED)
def test_report_and_status_show_the_rest(file: str, reported: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html, "get_plotlyjs", lambda: "")  # megabytes
    for number, how in enumerate(damages(reported.path / file, CHANGES)):
        console = Console(file=io.StringIO(), width=200)
        try:
            status = read_run_status(reported, now_s=2e9)
            console.print("\n".join(summary(status)), markup=False)
            console.print(process_table(status))
            run = read_run(reported)
            text = page.page(run, now_s=1e9) if number % 6 == 0 else "reward_mean"  # figures take a while
        except UserError:  # it is another version's, or the directory is none of a run
            assert file in ("experiment.json", "plan.json"), how
            continue
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        assert "worker" in shown or file == "plan.json", how
        assert "reward_mean" in text or file == "metrics.jsonl", how
        assert ("damaged: " in shown) >= bool(status.damaged), how


@pytest.mark.parametrize("file", [file for file in REPORTED if file.endswith(("json", "jsonl"))])
def test_what_is_damaged_is_said(file: str, reported: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    path = reported.path / file
    content = path.read_bytes()
    path.write_bytes(b"\xff\n" + content)
    try:
        (sentence,) = read_run(reported).damaged
    finally:
        path.write_bytes(content)
    assert str(path) in sentence
    assert not read_run(reported).damaged


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run of the experiment with small checkpoints, which are of other models than it trains."""
    directory = RunDirectory.create(tmp_path_factory.mktemp("damage") / "run")
    run = new_run(request_of(*words(directory), "--steps", "6"))
    prepare(run, directory)
    note_start(run, directory, "started")
    good = good_run(directory.path.parent / "good", metrics=[metrics_line(step) for step in (1, 2, 3, 4, 5)])
    for name in ("metrics.jsonl", "evaluations.jsonl", "trace.json"):
        shutil.copy(good / name, directory.path / name)
    for step in (2, 4):
        save(directory.checkpoints, step)
    directory.switch.write_text("plan\n")
    (directory.launcher / "launcher.lock").write_text("")
    return directory


def copy_or_pipe(path: str, target: str) -> None:
    os.mkfifo(target) if Path(path).is_fifo() else shutil.copy2(path, target)


def words(directory: RunDirectory) -> list[str]:
    return ["experiments/ppo.py", "--plan", "tests/plans/single.json", "--run-dir", str(directory.path)]


# Each of them is read a second time in a run that goes on: two by default.
OFTEN = ("metrics.jsonl", "checkpoints/step-4/run.json")


@pytest.mark.parametrize(
    "file", [file if file in OFTEN else pytest.param(file, marks=pytest.mark.slow) for file in RESUMED]
)
def test_a_run_goes_on_or_says_why_not(
    file: str, resumed: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files.os, "fsync", lambda _: None)  # nobody pulls a plug here
    request = request_of(*words(resumed), "--resume")
    run = new_run(request)
    for how in damages(resumed.path / file, 1):
        copy = RunDirectory(tmp_path / "copy")
        delete(copy.path)
        shutil.copytree(resumed.path, copy.path, symlinks=True, copy_function=copy_or_pipe)
        with contextlib.suppress(UserError):
            resumed_run(request, copy)
        with contextlib.suppress(RunError):
            assert continued(run, run, copy, how).spec.resume_step in (2, 4)
