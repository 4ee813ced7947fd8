"""What only SLURM does: placement and GPUs, the job's own end, the queue, the cluster's failures."""

import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from testbed.cluster import Testbed

from realhf.base.errors import RunError, UserError
from realhf.launch.launcher import UNKNOWN_RETURNCODE, Exit
from realhf.launch.process import Job, ProcessSpec
from realhf.launch.slurm.launcher import SlurmLauncher
from realhf.launch.slurm.script import SlurmOptions
from realhf.rundir.paths import RunDirectory, worker_name
from tests.waiting import wait_until

pytestmark = pytest.mark.slurm

NUM_WORKERS = 4
FOR_EVER = "while :; do sleep 0.1; done"
Make = Callable[..., SlurmLauncher]


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run")


@pytest.fixture
def make(slurm_testbed: Testbed, directory: RunDirectory) -> Iterator[Make]:
    """Makes launchers; afterwards stops them and sees that the queue is empty."""
    made: list[SlurmLauncher] = []

    def make(**options: Any) -> SlurmLauncher:
        defaults = {"time_limit": "5", "poll_interval_s": 0.2}
        made.append(SlurmLauncher(SlurmOptions(**(defaults | options))))
        return made[-1]

    yield make
    for launcher in made:
        launcher.stop(grace_s=0)
    assert slurm_testbed.run("squeue", "-h").stdout == ""


def job(directory: RunDirectory, *, master: str | tuple[str, ...], worker: str) -> Job:
    commands = [("master", master), *((worker_name(i), worker) for i in range(NUM_WORKERS))]
    processes = (
        ProcessSpec(
            name=name,
            argv=("bash", "-c", command) if isinstance(command, str) else command,
        )
        for name, command in commands
    )
    return Job(directory=directory, processes=tuple(processes), workers_per_node=2)


def told(launcher: SlurmLauncher, number: int = NUM_WORKERS + 1) -> dict[str, Exit]:
    """The first ends that the launcher tells, in its order."""
    found: dict[str, Exit] = {}

    def are_told() -> bool:
        found.update({end.name: end for end in launcher.poll()})
        return len(found) >= number

    wait_until(are_told, lambda: f"only {sorted(found)} ended; {launcher.status()}")
    return found


def test_ends_of_an_earlier_start_are_not_told(make: Make, directory: RunDirectory) -> None:
    """Its tasks may end after the next start has begun, as where a partition heals."""
    earlier = replace(job(directory, master="exit 0", worker="exit 0"), start_id="aaaa1111")
    present = replace(
        job(directory, master=FOR_EVER, worker=f"touch {directory.path}/up; {FOR_EVER}"), start_id="bbbb2222"
    )
    first = make()
    first.start(earlier)
    told(first)
    second = make()
    second.start(present)
    wait_for_file(directory.path / "up")
    late = f"mkdir -p {earlier.exits}; echo 143 > {earlier.exits}/worker-1"  # more than the script would do
    assert subprocess.run(["bash", "-c", late]).returncode == 0
    assert second.poll() == []


def wait_for_file(path: Path) -> None:
    wait_until(path.exists, f"{path} is written")


def job_id(launcher: SlurmLauncher) -> str:
    """As in "job 17: PENDING"."""
    return launcher.status().removeprefix("job ").partition(":")[0]


def shown_job(cluster: Testbed, launcher: SlurmLauncher) -> str:
    return cluster.run("scontrol", "show", "job", "-o", job_id(launcher)).stdout


def test_every_worker_has_its_gpu_and_the_master_none(
    make: Make, slurm_testbed: Testbed, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "999")  # as if this ran inside another job
    monkeypatch.setenv("SLURM_NTASKS", "1")
    launcher = make()
    # SLURM tells the devices of a task under two names; the batch script leaves the second as it was.
    show = 'echo "$(hostname) ${CUDA_VISIBLE_DEVICES:-none} ${GPU_DEVICE_ORDINAL:-none} ${REALHF_DEVICE-}"'
    # Each side waits for the other: the steps do run side by side.
    launcher.start(
        job(
            directory,
            master=f"{show}; touch {directory.path}/m; until [ -e {directory.path}/w ]; do sleep 0.05; done",
            worker=f"{show}; touch {directory.path}/w; until [ -e {directory.path}/m ]; do sleep 0.05; done",
        )
    )
    assert {end.returncode for end in told(launcher).values()} == {0}
    launcher.stop()
    assert directory.log("master").read_text() == "node1 none none \n"
    placed = [directory.log(worker_name(i)).read_text().split() for i in range(NUM_WORKERS)]
    # Each shows CUDA one GPU, and may reach its neighbour's.
    assert placed == [[node, gpu, "0,1", f"cuda:{gpu}"] for node in ("node1", "node2") for gpu in ("0", "1")]
    assert "JobState=COMPLETED" in shown_job(slurm_testbed, launcher)


def test_the_first_failure_ends_the_job_and_is_its_exit_code(
    make: Make, slurm_testbed: Testbed, directory: RunDirectory
) -> None:
    launcher = make(cpu_only=True)
    launcher.start(
        job(
            directory,
            # It outlives the worker by as much as it needs.
            master=f"until [ -e {directory.exits}/worker-2 ]; do sleep 0.1; done; sleep 0.5; exit 5",
            worker=f"if ((SLURM_PROCID == 2)); then echo bad; exit 3; fi; {FOR_EVER}",
        )
    )
    ends = told(launcher)
    assert next(iter(ends)) == "worker-2"
    assert (ends["worker-2"].returncode, ends["worker-2"].note) == (3, "")
    assert ends["master"].returncode == 5
    for name in ("worker-0", "worker-1", "worker-3"):
        assert ends[name].returncode == UNKNOWN_RETURNCODE
        assert "ended by SLURM after worker-2 had failed" in ends[name].note or "FAILED" in ends[name].note
    launcher.stop()
    assert re.search(r"JobState=FAILED .*ExitCode=3:0", shown_job(slurm_testbed, launcher))


def test_workers_that_do_not_end_after_the_master_are_ended(make: Make, directory: RunDirectory) -> None:
    launcher = make(end_timeout_s=1)
    launcher.start(job(directory, master="exit 0", worker=FOR_EVER))
    ends = told(launcher)
    assert ends["master"].returncode == 0
    assert all(ends[worker_name(i)].returncode != 0 for i in range(NUM_WORKERS))
    assert "the other did not end and is stopped" in (directory.launcher / "slurm.log").read_text()


def test_a_program_that_is_missing_is_the_process_s_end(make: Make, directory: RunDirectory) -> None:
    launcher = make()
    launcher.start(job(directory, master=("/no/such/program",), worker=FOR_EVER))
    first = next(iter(told(launcher, 1).values()))
    assert (first.name, first.returncode) == ("master", 127)
    assert "/no/such/program" in directory.log(first.name).read_text()


@pytest.mark.slow
def test_a_job_that_someone_cancels_is_told(make: Make, slurm_testbed: Testbed, directory: RunDirectory) -> None:
    launcher = make()
    # They ignore SIGTERM, so they are killed.
    stubborn = f'trap "" TERM; touch {directory.path}'
    launcher.start(
        job(directory, master=f"{stubborn}/up-m; {FOR_EVER}", worker=f"{stubborn}/up-$SLURM_PROCID; {FOR_EVER}")
    )
    for name in ("m", *range(NUM_WORKERS)):
        wait_for_file(directory.path / f"up-{name}")
    slurm_testbed.run("scancel", job_id(launcher))
    ends = told(launcher)
    assert {end.returncode for end in ends.values()} == {UNKNOWN_RETURNCODE}
    assert f"job {job_id(launcher)}: CANCELLED" in ends["worker-3"].note


def test_a_job_that_does_not_start_in_time_is_cancelled(
    make: Make, slurm_testbed: Testbed, directory: RunDirectory
) -> None:
    launcher = make(sbatch=("--begin=now+1hour",), queue_timeout_s=0.5)
    launcher.start(job(directory, master=":", worker=":"))
    wait_until(lambda: "Reason=BeginTime" in shown_job(slurm_testbed, launcher), "SLURM says why it does not start")
    with pytest.raises(RunError, match=r"within 0\.5 s and was cancelled; job \d+: PENDING \(BeginTime\)"):
        told(launcher)
    assert slurm_testbed.run("squeue", "-h").stdout == ""


def test_what_slurm_refuses_is_the_users_error(make: Make, slurm_testbed: Testbed, directory: RunDirectory) -> None:
    with pytest.raises(UserError, match=r"SLURM refused the job: .*invalid partition specified: nonesuch"):
        make(partition="nonesuch").start(job(directory, master=":", worker=":"))
    assert slurm_testbed.run("squeue", "-h").stdout == ""


def test_without_slurm_the_way_out_is_named(
    make: Make, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(directory.path))
    with pytest.raises(UserError, match=r"sbatch was not found.*--launcher local"):
        make().start(job(directory, master=":", worker=":"))


def test_a_lost_node_ends_the_run_with_the_jobs_state(
    make: Make, slurm_testbed: Testbed, directory: RunDirectory
) -> None:
    launcher = make()
    launcher.start(job(directory, master=FOR_EVER, worker=f"touch {directory.path}/up-$SLURM_PROCID; {FOR_EVER}"))
    for index in range(NUM_WORKERS):
        wait_for_file(directory.path / f"up-{index}")
    try:
        slurm_testbed.fail("node2")
        # The controller finds out by itself after half a minute; here it is told.
        slurm_testbed.run("scontrol", "update", "nodename=node2", "state=down", "reason=lost")
        ends = told(launcher)
    finally:
        slurm_testbed.heal("node2")
        slurm_testbed.run("scontrol", "update", "nodename=node2", "state=resume")
    for name in ("worker-2", "worker-3"):
        assert ends[name].returncode == UNKNOWN_RETURNCODE
        assert "NODE_FAIL" in ends[name].note
