"""What cannot go on is refused before a process starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from realhf.cli import main
from realhf.lifecycle.controller import LAUNCHER_LOCK
from realhf.lifecycle.new import new_run
from realhf.rundir.paths import RunDirectory
from realhf.rundir.prepare import prepare
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
