"""A launcher is one file: runs by launchers that are not the local one give its numbers."""

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from realhf.rundir.status import read_status
from tests.e2e.runs import ROOT, SMALL, FinishedRun, command, finished, realhf
from tests.waiting import PATIENCE_S, wait_until

ONE = ("--num-workers", "1", "--plan", ROOT / "tests/plans/single.json", "--steps", "3", "--no-evaluate", *SMALL)
BREAKS = """
from dataclasses import dataclass
from typing import ClassVar

from realhf.api import Update, auto
from realhf.rundir.run import load_experiment_class

@dataclass(frozen=True, kw_only=True)
class Broken(Update):
    implementation: ClassVar[str] = "broken_interface:BrokenInterface"

@auto(batch_size=4)
@dataclass(frozen=True, kw_only=True)
class Mine(load_experiment_class({experiment!r})):
    @property
    def rpcs(self):
        from dataclasses import replace
        return [replace(call, interface_impl=Broken(**vars(call.interface_impl))) for call in super().rpcs]
"""
INTERFACE = """
from realhf.algorithms.script.update import UpdateInterface

class BrokenInterface(UpdateInterface):
    def train_step(self, model, mini_batches, context):
        found = 6 * 7
        {statement}
        return super().train_step(model, mini_batches, context)
"""


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    return finished(tmp_path_factory.mktemp("local") / "run", "ppo", *ONE)


def statistics(run: FinishedRun) -> list[dict[str, float]]:
    """What does not depend on time, of each step."""
    return [
        {name: value for name, value in line.items() if isinstance(value, float) and not name.endswith("_s")}
        for line in run.metrics
    ]


@pytest.mark.distributed
def test_a_launcher_in_a_file_beside_the_experiment(local: FinishedRun, tmp_path: Path) -> None:
    """As docs/contributing.md says: a file, named on the command line."""
    shutil.copy(ROOT / "tests/e2e/nice_launcher.py", tmp_path)
    shutil.copy(ROOT / "experiments/ppo.py", tmp_path)
    words = ("--launcher", "nice_launcher:NiceLauncher", "--nice", "3")
    done = finished(tmp_path / "run", tmp_path / "ppo.py", *words, *ONE)
    assert len(done.metrics) == 3
    assert statistics(done) == statistics(local)


@pytest.mark.distributed
def test_a_run_in_the_launching_process(local: FinishedRun, tmp_path: Path) -> None:
    done = finished(tmp_path / "run", "ppo", "--launcher", "in-process", *ONE)
    assert len(done.metrics) == 3
    assert statistics(done) == statistics(local)
    assert "step=3 call=actor_train_step" in (done.path / "logs/worker-0.log").read_text()
    assert re.search(r"INFO master .*step=3 ended", (done.path / "logs/master.log").read_text())
    assert {path.name for path in done.path.iterdir()} == {path.name for path in local.path.iterdir()}


def job(folder: Path, statement: str) -> list[str | Path]:
    """The words of a run in this process whose training step executes a statement first."""
    (folder / "mine.py").write_text(BREAKS.format(experiment=str(ROOT / "experiments/sft.py")))
    (folder / "broken_interface.py").write_text(INTERFACE.format(statement=statement))
    words = ["run", folder / "mine.py", "--launcher", "in-process", "--num-workers", "1", "--evaluations", "20"]
    return [*words, "--steps", "1", "--run-dir", folder / "run", "--data-dir", folder / "data"]


@pytest.mark.distributed
@pytest.mark.slow
def test_an_error_of_an_interface_is_raised_where_it_is(tmp_path: Path) -> None:
    done = realhf(*job(tmp_path, "raise KeyError(found)"))
    assert done.returncode == 1
    assert re.search(r'broken_interface.py", line \d+, in train_step\n +raise KeyError\(found\)', done.stderr)
    assert "start anew with: realhf run" in done.stderr
    status = read_status(tmp_path / "run/status.json")
    assert status is not None
    assert (status.state, status.message.splitlines()[0]) == ("failed", "KeyError: 42")


@pytest.mark.slow
@pytest.mark.distributed
def test_a_breakpoint_in_an_interface_opens_pdb(tmp_path: Path) -> None:
    words = command(*job(tmp_path, "breakpoint()"))
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        words, cwd=ROOT, env=env, input="p found * 10\ncontinue\n", capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "(Pdb) 420\n" in done.stdout


@pytest.mark.slow
@pytest.mark.distributed
def test_ctrl_c_ends_it(tmp_path: Path) -> None:
    place = tmp_path / "reached"
    words = command(*job(tmp_path, f"open({str(place)!r}, 'w'); import time; time.sleep(3600)"))
    run = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    wait_until(place.exists, "the training step is there")
    run.send_signal(signal.SIGINT)
    _, said = run.communicate(timeout=PATIENCE_S)
    assert (run.returncode, "interrupted" in said) == (130, True), said[-4000:]
    status = read_status(tmp_path / "run/status.json")
    assert status is not None
    assert status.state == "interrupted"


def test_more_than_one_worker_is_refused(tmp_path: Path) -> None:
    words = ["run", "experiments/ppo.py", "--launcher", "in-process", "--plan", "tests/plans/tp4.json"]
    done = realhf(*words, "--run-dir", tmp_path / "run")
    assert done.returncode == 2
    assert "in-process runs one worker, and the run has 4; give --num-workers 1, or --launcher local" in done.stderr
    assert not (tmp_path / "run").exists()
