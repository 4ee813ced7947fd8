"""The batch script, against a recorded one and against bash's own reading of it."""

import difflib
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from realhf.base.code_files import python_command
from realhf.base.errors import UserError
from realhf.launch.process import Job, ProcessSpec
from realhf.launch.slurm.script import SlurmOptions, sbatch_text
from realhf.rundir.paths import RunDirectory, worker_name

GOLDEN = Path(__file__).parent / "job.sbatch.golden"
RECORD = "REALHF_RECORD_GOLDEN"

OPTIONS = SlurmOptions(
    cpus_per_worker=4,
    partition="main",
    account="lab",
    time_limit="1-00:00:00",
    nodelist="node[01-02]",
    sbatch=("--qos=high",),
)
DIRECTORY = RunDirectory(Path("/shared/runs/100% mine"))


def command(module: str) -> tuple[str, ...]:
    """As the launcher starts a module, with another interpreter."""
    return ("python", *python_command(module, str(DIRECTORY.path))[1:])


def job(num_workers: int = 4) -> Job:
    env = {"OMP_NUM_THREADS": "1", "NOTE": "it's $HOME"}
    master = ProcessSpec(name="master", argv=command("realhf.master"))
    workers = (
        ProcessSpec(name=name, argv=command("realhf.worker"), env=env) for name in map(worker_name, range(num_workers))
    )
    return Job(name="ppo", directory=DIRECTORY, processes=(master, *workers), workers_per_node=2)


def test_the_text_is_as_recorded() -> None:
    text = sbatch_text(OPTIONS, job())
    if os.environ.get(RECORD):
        GOLDEN.write_text(text)
    diff = "".join(difflib.unified_diff(GOLDEN.read_text().splitlines(True), text.splitlines(True), "recorded", "now"))
    assert not diff, (
        f"{diff}\nif this is intended, record it: {RECORD}=1 pytest {Path(__file__).name}; then read the diff"
    )


def test_bash_accepts_it() -> None:
    text = sbatch_text(OPTIONS, job())
    checked = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_machines_without_gpus_are_asked_for_none() -> None:
    text = sbatch_text(replace(OPTIONS, cpu_only=True), job())
    assert "gres" not in text
    assert "gpu" not in text


def test_what_is_not_given_is_left_to_the_cluster() -> None:
    text = sbatch_text(SlurmOptions(), job())
    for option in ("partition", "account", "time", "qos"):
        assert f"--{option}" not in text
    assert "#SBATCH --nodelist" not in text


def test_the_number_of_workers_has_to_fit() -> None:
    with pytest.raises(UserError, match="3 workers are no whole nodes of 2 workers each; change --nodes, "):
        sbatch_text(OPTIONS, job(3))


@pytest.mark.parametrize("wrong", [{"cpus_per_worker": 0}, {"sbatch": ("qos=high",)}])
def test_options_are_checked_when_made(wrong: dict[str, int]) -> None:
    with pytest.raises(UserError):
        replace(OPTIONS, **wrong)  # type: ignore[arg-type]
