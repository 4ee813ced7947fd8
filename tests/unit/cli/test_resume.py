"""What cannot go on is refused before a process starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from realhf.cli import main
from realhf.lifecycle import resume
from realhf.lifecycle.controller import LAUNCHER_LOCK
from realhf.lifecycle.new import new_run, schedule_lines
from realhf.rundir.checkpoints import Choice, RunState
from realhf.rundir.paths import RunDirectory
from realhf.rundir.prepare import prepare
from realhf.rundir.run import load_run
from tests.unit.lifecycle.requests import request_of


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    """A run that was prepared and never made a checkpoint."""
    request = request_of("experiments/ppo.py", "--plan", "tests/plans/single.json", "--steps", "3")
    directory = RunDirectory.create(tmp_path / "run")
    prepare(new_run(request), directory)
    return directory


def refusal(directory: RunDirectory, capsys: pytest.CaptureFixture[str], experiment: str = "ppo") -> str:
    assert main(["run", f"experiments/{experiment}.py", "--run-dir", str(directory.path), "--resume"]) == 2
    return capsys.readouterr().err


def test_a_run_without_a_checkpoint(directory: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert "has no checkpoint to go on from; start a new run with another --run-dir" in refusal(directory, capsys)


def test_the_directory_of_another_experiment(directory: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal(directory, capsys, "sft")
    assert "experiments/sft.py has the experiment " in message
    assert "experiments/ppo.py; give that file" in message


@pytest.fixture
def began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run whose processes have made one step, and a checkpoint that is good; no process is started."""
    monkeypatch.setattr("realhf.lifecycle.controller.Controller.carry_out", lambda _: None)
    state = RunState(step=1, seed=0, samples=128, num_workers=1, plan_sha256="", optimizer_steps={}, models={"sft": ""})
    monkeypatch.setattr(resume, "newest_good", lambda _: Choice(state=state, damaged={}))
    monkeypatch.setattr(resume, "read_index", lambda _: None)
    monkeypatch.setattr(resume, "check_architecture", lambda *_: None)
    words = ("--steps", "3", "--rule", "colocate", "--num-workers", "1", "--data-dir", str(tmp_path / "data"))
    assert main(["run", "experiments/sft.py", "--run-dir", str(tmp_path / "run"), *words]) == 0
    return RunDirectory.open(tmp_path / "run")


def test_other_data_is_refused_unless_it_is_accepted(
    began: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = ["run", "experiments/sft.py", "--run-dir", str(began.path), "--resume"]
    assert main(again) == 0, "nothing has changed"
    rows = tmp_path / "data/sft.jsonl"
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:-10]))
    message = refusal(began, capsys, "sft")
    assert "the data set of the run in " in message
    assert f"has changed since the run began: {rows} has other content (" in message
    assert "--resume --accept-changed-inputs resumes with the present files" in message
    assert main([*again, "--accept-changed-inputs"]) == 0
    assert main(again) == 0, "they are the run's from now on"


def test_more_steps_stretch_the_schedule(began: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    """Said once: the run has the new number from then on."""
    again = ["run", "experiments/sft.py", "--run-dir", str(began.path), "--resume", "--steps", "6"]
    assert main(again) == 0
    told = "warning: --steps 6 in place of 3 moves the end of the learning-rate schedule of sft: the rates from here"
    assert f"{told} on are above those" in " ".join(capsys.readouterr().err.split())
    assert main(again) == 0
    assert "schedule" not in capsys.readouterr().err
    assert main([*again[:-1], "4"]) == 0
    assert "--steps 4 in place of 6 " in " ".join(capsys.readouterr().err.split())


def test_a_warm_up_that_is_longer_than_the_run(directory: RunDirectory) -> None:
    """A step has an optimizer step of each model for both mini-batches: 3 steps have 6, and 2 have 4."""
    assert schedule_lines(load_run(directory)) == []
    long = new_run(request_of("experiments/ppo.py", "--plan", "tests/plans/single.json", "--steps", "2"))
    assert schedule_lines(long) == [
        f"warning: --warmup-steps 5 is more than the 4 optimizer steps of {name}, so its learning rate ends at 80% of "
        f"lr={long.experiment.setups[name].optimizer.lr:g}; give fewer, or more --steps"
        for name in ("actor", "critic")
    ]


def test_a_new_run_has_nothing_that_could_have_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "experiments/sft.py", "--run-dir", str(tmp_path / "run"), "--accept-changed-inputs"]) == 2
    assert "--accept-changed-inputs is for a run that goes on; give --resume too" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("holder", [LAUNCHER_LOCK, "master"])
def test_a_run_that_another_process_has(
    holder: str, directory: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    program = (
        "import sys; from pathlib import Path; from realhf.rundir.paths import RunDirectory\n"
        f"with RunDirectory.open(Path(sys.argv[1])).lock({holder!r}): print('locked', flush=True); input()"
    )
    command = [sys.executable, "-c", program, str(directory.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"locked\n"
        message = refusal(directory, capsys)
        other.communicate(b"\n")
    assert f"still goes on: its {holder} is process {other.pid} on " in message
