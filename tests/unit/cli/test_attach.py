"""`realhf attach` ends as the process that has carried out the run, whatever is left of that."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from realhf.cli import main
from realhf.lifecycle.controller import LAUNCHER_LOCK
from realhf.lifecycle.new import new_run
from realhf.rundir.paths import RunDirectory
from realhf.rundir.prepare import prepare
from realhf.rundir.status import RunState, Status, write_status
from tests.unit.lifecycle.requests import request_of

# Has the lock of the launching process, and leaves the last word when it is told to.
LAUNCHING = f"""
import sys
from pathlib import Path
from realhf.rundir.events import note
from realhf.rundir.paths import RunDirectory
from realhf.rundir.status import Status, write_status
directory = RunDirectory.open(Path(sys.argv[1]))
with directory.lock({LAUNCHER_LOCK!r}):
    print("locked", flush=True)
    input()
    note(directory.events, "failed", 1, "no licence")
    write_status(directory.status, Status(state="failed", step=1, steps=2, message="no licence", returncode=17))
"""


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    """Of a run that was prepared, and has no `launcher/job.json`."""
    directory = RunDirectory.create(tmp_path / "run")
    prepare(new_run(request_of("experiments/ppo.py", "--plan", "tests/plans/single.json", "--steps", "2")), directory)
    return directory


@pytest.mark.parametrize(("state", "kept", "returncode"), [("failed", 17, 17), ("failed", 1, 1), ("stopped", 1, 130)])
def test_a_run_that_has_ended_keeps_its_exit_code(
    state: RunState, kept: int, returncode: int, directory: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    write_status(directory.status, Status(state=state, step=1, steps=2, message="no licence", returncode=kept))
    assert main(["attach", str(directory.path)]) == returncode
    assert capsys.readouterr().err == ("error: " if state == "failed" else "") + "no licence\n"


def test_a_run_that_was_never_started(directory: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["attach", str(directory.path)]) == 2
    assert f"no process of the run in {directory.path} has been started" in capsys.readouterr().err


def test_it_waits_for_the_last_word(directory: RunDirectory) -> None:
    """The master says first that the run has failed; whoever carries the run out says with what code, or restarts."""
    write_status(directory.status, Status(state="failed", step=1, steps=2, message="worker 0 failed"))
    command = [sys.executable, "-c", LAUNCHING, str(directory.path)]
    codes: list[int] = []
    attached = threading.Thread(target=lambda: codes.append(main(["attach", str(directory.path)])))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"locked\n"
        attached.start()
        other.communicate(b"\n")
    attached.join()
    assert codes == [17]
