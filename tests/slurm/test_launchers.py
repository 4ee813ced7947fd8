"""What every launcher promises, tried on each of them: on those of the package, and on one from elsewhere.

In the places of master and workers are small shell commands; for the in-process launcher `stand_in`, which does the
same.
"""

import contextlib
import logging
import os
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from testbed.cluster import Testbed

from realhf.base.code_files import python_command
from realhf.base.errors import UserError
from realhf.launch.launcher import Exit, Launcher, find_launcher
from realhf.launch.process import Job, ProcessSpec
from realhf.launch.slurm.script import SlurmOptions
from realhf.rundir.paths import MASTER, RunDirectory, worker_name, worker_of
from tests.waiting import PATIENCE_S, wait_until

OUTSIDE = f"{Path(__file__).parents[1]}/e2e/nice_launcher.py:NiceLauncher"
TOKEN = "REALHF_TEST_TOKEN"
FOR_EVER = "while :; do sleep 0.1; done"
NAME = "name=${REALHF_WORKER_INDEX+worker-$REALHF_WORKER_INDEX}; name=${name:-master}"
# What processes do, as `stand_in` calls it.
SHELL = {
    "ends": 'echo "$name of $PLACE"',
    "fails": "echo no such file: prompts.jsonl; exit 3",
    "goes on": f"""
        trap 'echo asked > "$PLACE/asked-$name"; exit 0' TERM
        echo up > "$PLACE/up-$name"
        {FOR_EVER}""",
}


@dataclass
class Bench:
    """A launcher with a run directory, and a mark by which whatever it starts can be found."""

    launcher: Launcher
    directory: RunDirectory
    num_workers: int
    count_left: Callable[[], int]
    has_processes: bool = True
    token: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def names(self) -> list[str]:
        return [MASTER, *map(worker_name, range(self.num_workers))]

    def start(self, *, master: str, worker: str) -> None:
        """Starts what has a name in SHELL, or other shell commands, in the places of the master and of each worker."""
        self.launcher.start(self.job(master=master, worker=worker))

    def job(self, *, master: str, worker: str) -> Job:
        processes = tuple(self.spec(name, master if name == MASTER else worker) for name in self.names)
        return Job(directory=self.directory, processes=processes, workers_per_node=(self.num_workers + 1) // 2)

    def spec(self, name: str, command: str) -> ProcessSpec:
        env = {TOKEN: self.token, "PLACE": str(self.directory.path)}
        argv: tuple[str, ...] = ("bash", "-c", f"{NAME}; {SHELL.get(command, command)}")
        if not self.has_processes:
            argv = python_command("tests.slurm.stand_in", str(self.directory.path), name, command)
        return ProcessSpec(name=name, argv=argv, env=env)

    def exits(self, number: int) -> dict[str, Exit]:
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

        def is_written() -> bool:
            assert not self.launcher.poll()
            return path.exists() and path.read_text().endswith("\n")

        wait_until(is_written, f"{path} is written")
        return path.read_text().strip()

    def log(self, name: str) -> str:
        return self.directory.log(name).read_text()

    def check_clean(self) -> None:
        """Nothing is left when `stop` returns; of the smallest example, children of children may just be ending."""
        if not type(self.launcher).__module__.startswith("realhf."):
            wait_until(self.is_clean, "children of children end")
        assert self.is_clean()

    def is_clean(self) -> bool:
        return not processes_with(self.token) and not self.count_left()


def processes_with(token: str) -> list[int]:
    """Living processes (no zombies) with the token in their environment."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if f"{TOKEN}={token}".encode() in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                found.append(int(name))
    return found


WITH_PROCESSES = ("local", pytest.param("slurm", marks=pytest.mark.slurm), OUTSIDE)


@pytest.fixture(params=[*WITH_PROCESSES, "in-process"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    launcher = find_launcher(request.param)
    options, num_workers, count_left = launcher.options_type(), 4, lambda: 0
    if request.param == "slurm":
        cluster: Testbed = request.getfixturevalue("slurm_testbed")
        options = SlurmOptions(time_limit="5", poll_interval_s=0.2)
        count_left = lambda: len(queued(cluster))  # noqa: E731
    elif request.param == "in-process":
        before = state_of_this_process()
        count_left = lambda: state_of_this_process() != before  # noqa: E731
        num_workers = 1
    # A name that shells and SLURM's file name patterns would mistake if it were not quoted.
    directory = RunDirectory.create(tmp_path / "a run, 100%t $HOME's")
    made = Bench(launcher(options), directory, num_workers, count_left, has_processes=request.param != "in-process")
    yield made
    made.launcher.stop(grace_s=0)
    wait_until(made.is_clean, "all processes and jobs are gone")


def state_of_this_process() -> tuple[object, ...]:
    """What a run in it must leave as it was."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    return environment, threading.active_count(), list(logging.getLogger().handlers), sys.excepthook


def queued(cluster: Testbed) -> list[str]:
    return cluster.run("squeue", "-h", "-o", "%i").stdout.split()


def test_before_a_start_there_is_nothing(bench: Bench) -> None:
    """And a look at what would be started starts nothing."""
    bench.launcher.check()
    shown = bench.launcher.preview(bench.job(master="ends", worker="ends"))
    assert "master" in shown
    assert "worker" in shown
    assert bench.launcher.poll() == []
    assert bench.launcher.status() == ""
    bench.launcher.stop()
    bench.launcher.stop(grace_s=0)
    assert not any(bench.directory.logs.iterdir())
    bench.check_clean()


def test_a_normal_end(bench: Bench) -> None:
    bench.start(master="ends", worker="ends")
    exits = bench.exits(1 + bench.num_workers)
    assert {name: found.returncode for name, found in exits.items()} == dict.fromkeys(bench.names, 0)
    assert bench.launcher.poll() == []
    bench.launcher.stop()
    bench.check_clean()
    for name in bench.names:
        assert bench.log(name).endswith(f"{name} of {bench.directory.path}\n")


def test_a_failing_worker_is_reported_first_with_its_message(bench: Bench) -> None:
    index = bench.num_workers - 1
    of_one = f"if ((REALHF_WORKER_INDEX == {index})); then {SHELL['fails']}; fi; {FOR_EVER}"
    bench.start(master="goes on", worker=of_one if bench.has_processes else "fails")
    first = next(iter(bench.exits(1).values()))
    assert (first.name, first.returncode) == (worker_name(index), 3)
    assert bench.log(first.name).endswith("no such file: prompts.jsonl\n")
    bench.launcher.stop(grace_s=1)
    bench.check_clean()
    assert bench.launcher.poll() == []


def test_a_failing_master_is_reported(bench: Bench) -> None:
    bench.start(master="fails", worker="goes on")
    first = next(iter(bench.exits(1).values()))
    assert (first.name, first.returncode) == ("master", 3)
    assert bench.log("master").endswith("no such file: prompts.jsonl\n")


def test_stop_asks_first(bench: Bench) -> None:
    """And waits no longer than it takes."""
    bench.start(master="goes on", worker="goes on")
    for name in bench.names:
        bench.file(f"up-{name}")
    bench.launcher.stop(grace_s=PATIENCE_S)
    bench.check_clean()
    for name in bench.names:
        assert bench.file(f"asked-{name}") == "asked"


def test_after_stop_it_starts_the_next_job(bench: Bench) -> None:
    bench.start(master="goes on", worker="goes on")
    bench.file("up-master")
    bench.launcher.stop(grace_s=PATIENCE_S)
    bench.start(master="ends", worker="ends")
    assert {found.returncode for found in bench.exits(1 + bench.num_workers).values()} == {0}


def test_logs_of_earlier_starts_stay(bench: Bench) -> None:
    for _ in range(2):
        bench.start(master="ends", worker="ends")
        bench.exits(1 + bench.num_workers)
        assert "\n" not in bench.launcher.status()
        bench.launcher.stop()
    for name in bench.names:
        assert bench.log(name).count(f"{name} of {bench.directory.path}\n") == 2


def test_places(bench: Bench) -> None:
    bench.start(master="goes on", worker="goes on")
    for name in bench.names:
        bench.file(f"up-{name}")
    assert bench.launcher.room(frozenset()) >= bench.num_workers
    assert bench.launcher.lost() == frozenset()
    place = bench.launcher.place(0)
    assert place is None or bench.launcher.room(frozenset({place})) < bench.num_workers


@pytest.mark.parametrize("bench", WITH_PROCESSES, indirect=True)
def test_kill_9_of_a_worker_is_told_from_an_exit(bench: Bench) -> None:
    bench.start(master=FOR_EVER, worker=f'echo $$ > "$PLACE/pid-$REALHF_WORKER_INDEX"; {FOR_EVER}')
    pids = [int(bench.file(f"pid-{i}")) for i in range(bench.num_workers)]
    os.kill(pids[1], signal.SIGKILL)
    first = next(iter(bench.exits(1).values()))
    assert (first.name, first.returncode) == ("worker-1", -signal.SIGKILL)


@pytest.mark.parametrize("bench", WITH_PROCESSES, indirect=True)
def test_a_process_has_its_own_environment_and_exit_code(bench: Bench) -> None:
    show = 'echo "${REALHF_WORKER_INDEX-none} $REALHF_TEST_TOKEN"'
    bench.start(master=f"{show}; exit 17", worker=f"{show}; exit 0")
    exits = bench.exits(1 + bench.num_workers)
    assert {name: end.returncode for name, end in exits.items()} == {
        name: 17 if name == MASTER else 0 for name in bench.names
    }
    for index, name in enumerate(bench.names, start=-1):
        assert bench.log(name) == f"{index if index >= 0 else 'none'} {bench.token}\n"


@pytest.mark.parametrize("bench", WITH_PROCESSES, indirect=True)
def test_a_program_that_is_missing_is_an_error_and_nothing_is_left(bench: Bench) -> None:
    """Of the launcher, or the end of the process; the next job starts."""
    job = bench.job(master=FOR_EVER, worker="ends")
    missing = [replace(spec, argv=("/no/such/program",)) if spec.index is not None else spec for spec in job.processes]
    said = ""
    try:
        bench.launcher.start(replace(job, processes=tuple(missing)))
        first = next(iter(bench.exits(1).values()))
        assert (worker_of(first.name) is not None, first.returncode) == (True, 127)
        said = bench.log(first.name)
    except UserError as error:
        said = str(error)
    assert "/no/such/program" in said
    bench.launcher.stop(grace_s=1)
    bench.check_clean()
    bench.start(master="ends", worker="ends")
    assert {found.returncode for found in bench.exits(1 + bench.num_workers).values()} == {0}


@pytest.mark.parametrize("bench", WITH_PROCESSES, indirect=True)
def test_stop_kills_who_does_not_end(bench: Bench) -> None:
    stubborn = f'trap "" TERM; echo up > "$PLACE/up-$REALHF_WORKER_INDEX"; {FOR_EVER}'
    bench.start(master=FOR_EVER, worker=stubborn)
    for index in range(bench.num_workers):
        bench.file(f"up-{index}")
    assert len(processes_with(bench.token)) >= 1 + bench.num_workers
    bench.launcher.stop(grace_s=0.5)
    bench.check_clean()
    assert bench.launcher.poll() == []
    bench.launcher.stop()
