"""What is left of an earlier start is told from the present one, by its id and by where its files lie."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from realhf.dataflow.plan import ExecutionPlan
from realhf.launch.process import Job, job_of
from realhf.rundir.paths import RunDirectory
from realhf.rundir.prepare import prepare
from realhf.rundir.run import Run, RunSpec
from realhf.rundir.starts import START_VARIABLE, StaleStartError, check_start, current_start


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run")


def start(directory: RunDirectory) -> str:
    """Prepares a start; its id."""
    spec = RunSpec(
        experiment_file="e.py",
        experiment_class="E",
        values={},
        working_directory=".",
        num_workers=1,
        devices_per_node=1,
    )
    experiment: Any = SimpleNamespace(steps=4, settings=SimpleNamespace(nodelist=None))
    run = Run(spec, experiment, ExecutionPlan(num_devices=1, calls={}))
    prepare(run, directory)
    started = job_of(run, directory, is_remote=True)
    assert {process.env[START_VARIABLE] for process in started.processes} == {started.start_id}
    return started.start_id


def test_every_start_has_an_id_and_those_before_are_stale(directory: RunDirectory) -> None:
    check_start(directory, "")
    first = start(directory)
    check_start(directory, first)
    second = start(directory)
    assert current_start(directory) == second != first
    check_start(directory, second)
    with pytest.raises(StaleStartError, match=f"belongs to start {first} of the run in .* with start {second}"):
        check_start(directory, first)
    check_start(directory, "")  # of a launcher that tells its processes nothing


def test_exits_of_starts_lie_apart(directory: RunDirectory) -> None:
    jobs = [Job(directory=directory, processes=(), workers_per_node=1, start_id=start(directory)) for _ in range(2)]
    assert jobs[0].exits != jobs[1].exits
    assert {job.exits.parent for job in jobs} == {directory.exits}


def test_what_an_earlier_start_goes_on_writing_is_in_its_own_log(directory: RunDirectory) -> None:
    first = start(directory)
    with directory.log("worker-0").open("a") as log:
        log.write("one\n")
        start(directory)
        log.write("two\n")
    assert not directory.log("worker-0").exists()
    assert (directory.logs / first / "worker-0.log").read_text() == "one\ntwo\n"
