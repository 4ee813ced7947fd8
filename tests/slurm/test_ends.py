"""How `realhf run` ends where a job is refused, a task fails, or somebody cancels the job: its exit code, one message,
and what is left."""

import re
import signal
import subprocess
from pathlib import Path

import pytest
from testbed.cluster import Testbed

from tests.e2e.runs import ROOT, command, realhf
from tests.slurm.test_main_job import RAISES, STUMBLES, queue
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.slurm

SLURM = ("--launcher", "slurm", "--nodes", "2", "--gpus-per-node", "1", "--network-interface", "lo", "--cpu-only")


@pytest.fixture
def words(tmp_path: Path) -> tuple[str | Path, ...]:
    """Of an experiment whose first call does what the file `does` says."""
    (tmp_path / "failing.py").write_text(RAISES)
    does = tmp_path / "does"
    code = STUMBLES.replace('raise ArithmeticError("the interface stumbled")', f"exec(open({str(does)!r}).read())")
    (tmp_path / "stumbles.py").write_text(code)
    does.write_text("import time; time.sleep(3600)")
    data = ("--data-dir", tmp_path / "data")
    return ("run", tmp_path / "failing.py", "--run-dir", tmp_path / "run", *data, *SLURM)


@pytest.mark.slow
def test_the_corrected_command_works_at_once_and_ends_with_the_code_of_its_task(
    slurm_testbed: Testbed, words: tuple[str | Path, ...], tmp_path: Path
) -> None:
    refused = realhf(*words, "--partition", "nonesuch")
    assert refused.returncode == 2, refused.stderr
    message = refused.stderr.splitlines()
    assert message == ["error: SLURM has no such job: --partition nonesuch: the cluster has main, urgent"]
    refused = realhf(*words, "--mem", "900G")
    assert refused.returncode == 2, refused.stderr
    message = refused.stderr.splitlines()
    assert message[-2].startswith("error: SLURM refused the job: sbatch: error: Memory specification can not be")
    assert message[-1].startswith("--mem 900G: partition main has 2 nodes with 8 CPUs, 15.6")
    assert not (tmp_path / "run").exists()
    (tmp_path / "does").write_text("import os, sys; print('no licence', flush=True); os._exit(17)")
    done = realhf(*words)
    assert done.returncode == 17, done.stderr
    error = done.stderr[done.stderr.index("error: ") :]
    assert re.match(r"error: worker-[01] ended with exit code 17 on node[12]; last activity: actor_generate", error)
    assert "no licence" in error
    assert len(error.splitlines()) <= 20
    assert queue(slurm_testbed) == ""
    attached = realhf("attach", tmp_path / "run")
    assert attached.returncode == 17
    assert attached.stderr == error


@pytest.mark.slow
def test_an_outside_scancel_is_told_once(slurm_testbed: Testbed, words: tuple[str | Path, ...], tmp_path: Path) -> None:
    output = tmp_path / "output.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(command(*words), cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
    try:
        activity = tmp_path / "run/activity/worker-1"
        wait_until(lambda: activity.exists() and b"actor_generate" in activity.read_bytes(), lambda: output.read_text())
        number = queue(slurm_testbed).split()[-8]
        assert number.isdecimal()
        slurm_testbed.run("scancel", number)
        assert process.wait(timeout=PATIENCE_S) == 1
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=PATIENCE_S)
    text = output.read_text()
    error = text[text.index("error: ") :]
    assert re.match(
        r"error: job \d+: CANCELLED \(exit code \d+:\d+\) on node\[1-2\]: ended master, worker-0, worker-1; ", error
    )
    assert error.count(str(tmp_path / "run/launcher/slurm.log")) == 1
    assert len(error.splitlines()) <= 20
