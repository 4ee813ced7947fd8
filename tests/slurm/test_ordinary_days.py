"""What clusters do on ordinary days: greetings, environments that are not passed on, settings they do not have,
file systems that not all nodes see."""

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from testbed.cluster import Testbed

from realhf.base.errors import UserError
from realhf.launch.process import Job, ProcessSpec
from realhf.launch.slurm.launcher import SlurmLauncher
from realhf.launch.slurm.script import SlurmOptions
from realhf.rundir.paths import RunDirectory, worker_name
from tests.waiting import wait_until

pytestmark = pytest.mark.slurm

FOR_EVER = "while :; do sleep 0.1; done"


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "shared/run")


@pytest.fixture
def launchers(slurm_testbed: Testbed) -> Iterator[list[SlurmLauncher]]:
    """To be filled: they are stopped at the end, when the queue has to be empty."""
    made: list[SlurmLauncher] = []
    yield made
    for launcher in made:
        launcher.stop(grace_s=0)
    assert slurm_testbed.run("squeue", "-h").stdout == ""


def launcher_with(launchers: list[SlurmLauncher], **options: object) -> SlurmLauncher:
    launchers.append(SlurmLauncher(SlurmOptions(**({"time_limit": "5", "poll_interval_s": 0.2} | options))))  # type: ignore[arg-type]
    return launchers[-1]


def job(directory: RunDirectory, command: str = "exit 0") -> Job:
    """A master and four workers of the same command."""
    names = ("master", *map(worker_name, range(4)))
    processes = tuple(ProcessSpec(name=name, argv=("/bin/bash", "-c", command)) for name in names)
    return Job(directory=directory, processes=processes, workers_per_node=2)


def ends_well(launcher: SlurmLauncher) -> None:
    ended: dict[str, int] = {}

    def is_over() -> bool:
        ended.update({end.name: end.returncode for end in launcher.poll()})
        return len(ended) == 5

    wait_until(is_over, lambda: f"{ended} of {launcher.status()}")
    assert set(ended.values()) == {0}
    launcher.stop()


def refusal(launcher: SlurmLauncher, started: Job) -> str:
    """What is said of a job that cannot run, by `start` or by the first polls."""
    with pytest.raises(UserError) as raised:  # noqa: PT012
        launcher.start(started)
        wait_until(lambda: bool(launcher.poll()), launcher.status)
    return "\n".join([str(raised.value), *getattr(raised.value, "__notes__", ())])


def wrap_sbatch(folder: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str) -> None:
    """Puts a wrapper of sbatch into the PATH."""
    folder.mkdir()
    real = shutil.which("sbatch")
    (folder / "sbatch").write_text(f'#!/bin/bash\n{before}\n{real} "$@"\ncode=$?\n{after}\n')
    (folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_a_wrapper_of_sbatch_that_prints_is_read(
    launchers: list[SlurmLauncher], directory: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrap_sbatch(
        tmp_path / "bin", monkeypatch, "echo Welcome to Alpha; echo; echo 2026", "echo budget: 12 h; exit $code"
    )
    launcher = launcher_with(launchers, cpu_only=True)
    launcher.start(job(directory))
    ends_well(launcher)


@pytest.mark.parametrize(
    ("before", "after"), [("", "echo no budget >&2; exit 1"), ("exec 3>&1 >/dev/null", "exec >&3; echo thanks; exit 0")]
)
def test_a_job_that_was_submitted_after_all_is_watched_or_cancelled(
    before: str,
    after: str,
    launchers: list[SlurmLauncher],
    directory: RunDirectory,
    tmp_path: Path,
    slurm_testbed: Testbed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrap_sbatch(tmp_path / "bin", monkeypatch, before, after)
    launcher = launcher_with(launchers, cpu_only=True)
    if "exit 0" in after:  # its number is printed nowhere, but it is the only one with this script
        launcher.start(job(directory))
        ends_well(launcher)
    else:
        said = refusal(launcher, job(directory, FOR_EVER))
        assert "no budget" in said
        assert re.search(r"job \d+, submitted nevertheless, was cancelled", said)
        wait_until(lambda: not slurm_testbed.run("squeue", "-h").stdout, "the job is gone")


def test_no_environment_is_passed_on(
    launchers: list[SlurmLauncher], directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "it's on")
    monkeypatch.setenv("EDITOR", "of the login node")
    monkeypatch.setenv("SBATCH_ARRAY_INX", "0-1")  # would make two of it
    launcher = launcher_with(launchers, sbatch=("--export=NONE",))
    launcher.start(job(directory, 'echo "$NCCL_DEBUG, ${EDITOR-}" && printenv PATH && sleep 0'))
    ends_well(launcher)
    assert directory.log("worker-3").read_text().splitlines()[0] == "it's on, "


def test_options_reach_the_steps(
    launchers: list[SlurmLauncher], directory: RunDirectory, slurm_testbed: Testbed
) -> None:
    launcher = launcher_with(
        launchers,
        cpus_per_worker=3,
        mem="2G",
        gpu_type="toy",
        setup_lines=("export FROM_SETUP='a b'", "true && SECOND=1; export SECOND"),
        srun=("--comment='of srun'", "--job-name=named", "nice -n 3"),
    )
    launcher.start(
        job(directory, f'echo "$FROM_SETUP $SECOND $(nice)"; touch {directory.path}/up-$SLURM_PROCID; {FOR_EVER}')
    )
    for index in range(4):
        wait_until((directory.path / f"up-{index}").exists, "the workers run")
    number = launcher.status().split()[1].rstrip(":")
    shown = slurm_testbed.run("scontrol", "show", "step", number).stdout
    workers = next(part for part in shown.split("\n\n") if "Tasks=4" in part)
    assert "Name=named" in workers
    assert "CPUs=12" in workers
    assert "TresPerNode=gres:gpu:toy:2" in workers
    assert "MinMemoryNode=2G" in slurm_testbed.run("scontrol", "show", "job", number).stdout
    assert directory.log("worker-0").read_text() == f"a b 1 {os.nice(0) + 3}\n"


def test_a_setup_line_that_fails_is_named(launchers: list[SlurmLauncher], directory: RunDirectory) -> None:
    launcher = launcher_with(launchers, setup_lines=("true", "module load 'nonesuch/1'"))
    assert "--setup-line \"module load 'nonesuch/1'\" failed" in refusal(launcher, job(directory))
    assert "module: command not found" in directory.job_log.read_text()


@pytest.mark.parametrize(
    "hosts",
    [
        ("node2",),
        pytest.param(("node1",), marks=pytest.mark.slow),
        pytest.param(("node1", "node2"), marks=pytest.mark.slow),
    ],
)
def test_a_run_directory_that_a_node_does_not_see(
    hosts: tuple[str, ...], launchers: list[SlurmLauncher], directory: RunDirectory, slurm_testbed: Testbed
) -> None:
    launcher, folder = launcher_with(launchers), directory.path.parent
    for host in hosts:
        slurm_testbed.hide(host, folder)
    try:
        said = refusal(launcher, job(directory, FOR_EVER))
    finally:
        for host in hosts:
            slurm_testbed.show(host, folder)
    named = "node[1-2]" if len(hosts) == 2 else hosts[0]
    assert re.fullmatch(
        rf"job \d+ has ended: the run directory {directory.path} is not there on {re.escape(named)}; all nodes .*", said
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"partition": "nonesuch"}, "--partition nonesuch: the cluster has main, urgent"),
        ({"gpu_type": "h100"}, "--gpu-type h100: partition main has 2 nodes .*; its types are toy"),
        ({"sbatch": ("--constraint=fast",)}, "--sbatch=--constraint=fast: partition main has no features"),
        ({"mem": "900G"}, "--mem 900G: partition main has 2 nodes with 8 CPUs, 15.6"),
        ({"cpus_per_worker": 4}, r"--cpus-per-worker 4: .* need 9 CPUs of a node; .*; give --cpus-per-worker 3"),
        (
            {"nodelist": "node[8-9]"},
            r"Invalid node name specified; .* 2 nodes with 7 CPUs, 2 GPUs.*\n  main \(default\): ",
        ),
        ({"sbatch": ("--reservation=mine",)}, "Requested reservation is invalid"),
    ],
)
def test_what_the_cluster_does_not_have_is_named_with_what_it_has(
    options: dict[str, object], says: str, launchers: list[SlurmLauncher], directory: RunDirectory
) -> None:
    said = refusal(launcher_with(launchers, **options), job(directory, FOR_EVER))
    assert said.startswith("SLURM refused the job: ")
    assert re.search(says, said, re.DOTALL), said
    assert len(said.splitlines()) < 5


def test_a_job_that_would_wait_for_ever_is_cancelled(launchers: list[SlurmLauncher], directory: RunDirectory) -> None:
    large = job(directory, FOR_EVER)
    names = tuple(map(worker_name, range(6)))
    large = replace(large, processes=(large.processes[0], *(replace(large.processes[1], name=name) for name in names)))
    said = refusal(launcher_with(launchers), large)
    assert re.search(r"job \d+: PENDING \(Partition\w+\), cancelled\n--nodes 3: partition main has 2 nodes", said)
