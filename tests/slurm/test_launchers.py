"""What every launcher promises, tried on each of them with small shell commands as processes."""

import contextlib
import os
import signal
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from testbed.cluster import Testbed

from realhf.launch.launcher import Exit, Launcher, NoOptions
from realhf.launch.local import LocalLauncher
from realhf.launch.process import Job, ProcessSpec
from realhf.launch.slurm.launcher import SlurmLauncher
from realhf.launch.slurm.script import SlurmOptions
from realhf.rundir.paths import RunDirectory, worker_name
from tests.waiting import PATIENCE_S, wait_until

NUM_WORKERS = 4
TOKEN = "REALHF_TEST_TOKEN"
FOR_EVER = "while :; do sleep 0.1; done"


@dataclass
class Bench:
    """A launcher with a run directory, and a mark by which whatever it starts can be found."""

    launcher: Launcher
    directory: RunDirectory
    count_queued: Callable[[], int]
    token: str = field(default_factory=lambda: uuid.uuid4().hex)

    def start(self, *, master: str, worker: str) -> None:
        """Starts shell commands in the places of the master and of each worker."""
        workers = (self.spec(worker_name(i), worker) for i in range(NUM_WORKERS))
        processes = (self.spec("master", master), *workers)
        self.launcher.start(Job(directory=self.directory, processes=processes, workers_per_node=2))

    def spec(self, name: str, command: str) -> ProcessSpec:
        env = {TOKEN: self.token, "PLACE": str(self.directory.path)}
        return ProcessSpec(name=name, argv=("bash", "-c", command), env=env, log_path=self.directory.log(name))

    def exits(self, number: int = NUM_WORKERS + 1) -> dict[str, Exit]:
        """Polls until so many have been reported, in that order."""
        found: dict[str, Exit] = {}

        def are_told() -> bool:
            new = {exit_.name: exit_ for exit_ in self.launcher.poll()}
            assert not new.keys() & found.keys(), "reported twice"
            found.update(new)
            return len(found) >= number

        wait_until(are_told, lambda: f"only {sorted(found)} ended")
        return found

    def file(self, name: str) -> str:
        """What a process wrote to "$PLACE/name", as soon as it is there."""
        path = self.directory.path / name
        wait_until(lambda: path.exists() and path.read_text().endswith("\n"), f"{path} is written")
        return path.read_text().strip()

    def log(self, name: str) -> str:
        return self.directory.log(name).read_text()

    def is_clean(self) -> bool:
        return not processes_with(self.token) and not self.count_queued()


def processes_with(token: str) -> list[int]:
    """Living processes (no zombies) with the token in their environment."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if f"{TOKEN}={token}".encode() in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                found.append(int(name))
    return found


@pytest.fixture(params=["local", pytest.param("slurm", marks=pytest.mark.slurm)])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    # A name that shells and SLURM's file name patterns would mistake if it were not quoted.
    directory = RunDirectory.create(tmp_path / "a run, 100%t $HOME's")
    if request.param == "local":
        made = Bench(LocalLauncher(NoOptions()), directory, lambda: 0)
    else:
        cluster: Testbed = request.getfixturevalue("slurm_testbed")
        options = SlurmOptions(time_limit="5", poll_interval_s=0.2)
        made = Bench(SlurmLauncher(options), directory, lambda: len(queued(cluster)))
    yield made
    made.launcher.stop(grace_s=0)
    wait_until(made.is_clean, "all processes and jobs are gone")


def queued(cluster: Testbed) -> list[str]:
    return cluster.run("squeue", "-h", "-o", "%i").stdout.split()


def test_a_normal_end(bench: Bench) -> None:
    bench.start(
        master="echo the master says 'hello'; echo and this >&2",
        worker='echo "worker $REALHF_WORKER_INDEX of $PLACE"',
    )
    exits = bench.exits()
    assert {name: found.returncode for name, found in exits.items()} == dict.fromkeys(
        ["master", *map(worker_name, range(NUM_WORKERS))], 0
    )
    assert bench.launcher.poll() == []
    bench.launcher.stop()
    assert bench.is_clean()
    assert "the master says hello" in bench.log("master")
    assert "and this" in bench.log("master")
    for i in range(NUM_WORKERS):
        assert exits[worker_name(i)].log_path == bench.directory.log(worker_name(i))
        assert bench.log(worker_name(i)) == f"worker {i} of {bench.directory.path}\n"


def test_a_failing_worker_is_reported_first_with_its_message(bench: Bench) -> None:
    bench.start(
        master=FOR_EVER,
        worker=f"if ((REALHF_WORKER_INDEX == 2)); then echo no such file: prompts.jsonl; exit 3; fi; {FOR_EVER}",
    )
    first = next(iter(bench.exits(1).values()))
    assert (first.name, first.returncode) == ("worker-2", 3)
    assert first.log_path.read_text() == "no such file: prompts.jsonl\n"
    bench.launcher.stop(grace_s=1)
    assert bench.is_clean()
    assert bench.launcher.poll() == []


def test_a_failing_master_is_reported(bench: Bench) -> None:
    bench.start(master="echo the plan is for 8 devices; exit 1", worker=FOR_EVER)
    first = next(iter(bench.exits(1).values()))
    assert (first.name, first.returncode) == ("master", 1)
    assert bench.log("master") == "the plan is for 8 devices\n"


def test_kill_9_of_a_worker_is_told_from_an_exit(bench: Bench) -> None:
    bench.start(master=FOR_EVER, worker=f'echo $$ > "$PLACE/pid-$REALHF_WORKER_INDEX"; {FOR_EVER}')
    pids = [int(bench.file(f"pid-{i}")) for i in range(NUM_WORKERS)]
    os.kill(pids[1], signal.SIGKILL)
    first = next(iter(bench.exits(1).values()))
    assert (first.name, first.returncode) == ("worker-1", -signal.SIGKILL)


def test_stop_asks_first(bench: Bench) -> None:
    """And waits no longer than it takes."""
    asked = """trap 'echo asked > "$PLACE/asked-$REALHF_WORKER_INDEX"; exit 0' TERM"""
    up = 'echo up > "$PLACE/up-$REALHF_WORKER_INDEX"'
    bench.start(master=f"{asked}; {up}; {FOR_EVER}", worker=f"{asked}; {up}; {FOR_EVER}")
    indices = ("", *range(NUM_WORKERS))
    for index in indices:
        bench.file(f"up-{index}")
    bench.launcher.stop(grace_s=PATIENCE_S)
    assert bench.is_clean()
    for index in indices:
        assert bench.file(f"asked-{index}") == "asked"


def test_stop_kills_who_does_not_end(bench: Bench) -> None:
    stubborn = f'trap "" TERM; echo up > "$PLACE/up-$REALHF_WORKER_INDEX"; {FOR_EVER}'
    bench.start(master=FOR_EVER, worker=stubborn)
    for index in range(NUM_WORKERS):
        bench.file(f"up-{index}")
    assert len(processes_with(bench.token)) >= 1 + NUM_WORKERS
    bench.launcher.stop(grace_s=0.5)
    assert bench.is_clean()
    assert bench.launcher.poll() == []
    bench.launcher.stop()
