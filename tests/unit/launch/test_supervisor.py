"""What is said of a run that ended badly, with a launcher whose processes end as a test wants it."""

import os
import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from realhf.base.errors import RunError
from realhf.launch import supervisor
from realhf.launch.launcher import Exit, Launcher
from realhf.launch.process import TOLD_RETURNCODE, Job, ProcessSpec
from realhf.launch.supervisor import supervise
from realhf.rundir.flight_recorder import ActivityWriter
from realhf.rundir.paths import MASTER, RunDirectory, worker_name
from realhf.rundir.status import Status, write_status


class ScriptedLauncher(Launcher):
    """Its n-th poll tells the n-th list of ends; nothing more after the last."""

    def __init__(self, polls: Sequence[Sequence[Exit]]):
        self.polls = [list(ends) for ends in polls]
        self.started: list[str] = []
        self.num_stopped = 0

    def start(self, job: Job) -> None:
        self.started = [process.name for process in job.processes]

    def poll(self) -> list[Exit]:
        return self.polls.pop(0) if self.polls else []

    def stop(self, *, grace_s: float = 5.0) -> None:
        self.num_stopped += 1


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run")


def job(directory: RunDirectory, *processes: ProcessSpec) -> Job:
    return Job(directory=directory, processes=processes, workers_per_node=2)


class Clock:
    """Stands still but for those who sleep by it."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(supervisor, "time", clock)
    return clock


Watch = Callable[..., None]


@pytest.fixture
def watch(directory: RunDirectory) -> Watch:
    """Supervises a master and two workers that end as given: (name, exit code) by poll."""

    def watch(*polls: Sequence[tuple[str, int]], note: str = "") -> None:
        ends = [[Exit(name=name, returncode=code, note=note) for name, code in poll] for poll in polls]
        launcher = ScriptedLauncher(ends)
        names = [MASTER, worker_name(0), worker_name(1)]
        specs = [ProcessSpec(name=name, argv=("true",)) for name in names]
        try:
            supervise(launcher, job(directory, *specs), lambda: None)
        finally:
            assert launcher.started == names
            assert launcher.num_stopped == 1, "nothing is left, however it ends"

    return watch


def test_all_end_well(watch: Watch) -> None:
    watch([], [("worker-1", 0)], [], [("master", 0), ("worker-0", 0)])


def test_a_killed_worker_is_named_with_what_it_did_and_the_end_of_its_log(
    watch: Watch, directory: RunDirectory
) -> None:
    activity = ActivityWriter(directory.activity("worker-1"))
    activity.set("actor_generate of step 4: compute")
    directory.log("worker-1").write_text("".join(f"line {i}\n" for i in range(20)))
    with pytest.raises(RunError) as error:
        watch([], [("worker-1", -signal.SIGKILL)])
    first, *rest = str(error.value).splitlines()
    assert first == (
        "worker-1 was killed by signal 9 (SIGKILL); last activity: actor_generate of step 4: compute; "
        f"log: {directory.log('worker-1')}"
    )
    assert rest == [f"  | line {i}" for i in range(12, 20)]


def test_who_was_killed_comes_before_who_failed_because_of_it(watch: Watch, directory: RunDirectory) -> None:
    write_status(directory.status, Status(state="failed", step=1, steps=2, message="worker 0 failed: peer is gone"))
    with pytest.raises(RunError, match=r"^worker-1 was killed by signal 11 \(SIGSEGV\); log: [^\n]*$"):
        watch([("worker-0", TOLD_RETURNCODE)], [("master", 1), ("worker-1", -signal.SIGSEGV)])


def test_what_the_master_has_heard_comes_before_exit_codes(watch: Watch, directory: RunDirectory) -> None:
    write_status(directory.status, Status(state="failed", step=1, steps=2, message="worker 1 failed in its call"))
    with pytest.raises(RunError, match=r"^worker 1 failed in its call$"):
        watch([("worker-1", TOLD_RETURNCODE)], [("worker-0", TOLD_RETURNCODE)], [("master", 1)])


def test_a_master_that_ends_for_no_known_reason(watch: Watch, directory: RunDirectory) -> None:
    write_status(directory.status, Status(state="running", step=1, steps=2))
    directory.log(MASTER).write_text("OSError: the disk is full\n")
    with pytest.raises(RunError) as error:
        watch([("master", 1)])
    assert str(error.value) == (
        f"master ended with exit code 1; log: {directory.log(MASTER)}\n  | OSError: the disk is full"
    )


def test_a_worker_that_fails_before_the_master_hears_of_it(watch: Watch, clock: Clock) -> None:
    with pytest.raises(RunError, match=rf"^worker-0 ended with exit code {TOLD_RETURNCODE} \(node failure\); log: "):
        watch([("worker-0", TOLD_RETURNCODE)], note="node failure")
    assert 30 < clock.now_s < 31, "the master was given time to say why"


def test_a_worker_that_ends_without_a_word_is_seen_at_once_and_named_alone(
    watch: Watch, directory: RunDirectory, clock: Clock
) -> None:
    ActivityWriter(directory.activity("worker-1")).set("reward_inference of step 4: compute")
    write_status(directory.status, Status(state="failed", step=1, steps=2, message="worker 0 failed: peer is gone"))
    with pytest.raises(RunError) as error:
        # The other one lost its peer, and says so; it, or what it computed with, may even end violently.
        watch([("worker-1", 7)], [("worker-0", -signal.SIGABRT)])
    assert str(error.value) == (
        "worker-1 ended with exit code 7; last activity: reward_inference of step 4: compute; "
        f"log: {directory.log('worker-1')}"
    )
    assert error.value.workers == {1}
    assert error.value.returncode == 7
    with pytest.raises(RunError, match=r"^worker-1 ended with exit code 7; last activity: reward_"):
        watch([("worker-1", 7)], [("worker-0", TOLD_RETURNCODE)])
    assert clock.now_s < 2


def test_workers_that_end_without_a_word_of_the_same_cause_are_all_named(watch: Watch) -> None:
    with pytest.raises(RunError) as error:
        watch([("worker-0", 1)], [], [], [("worker-1", 1)])
    assert error.value.workers == {0, 1}, "the fault of none of them"


def test_a_signal_without_a_name(watch: Watch) -> None:
    with pytest.raises(RunError, match=re.escape("worker-0 was killed by signal 40; log: ")):
        watch([("worker-0", -40)])


def test_workers_that_outlive_the_master(watch: Watch, directory: RunDirectory, clock: Clock) -> None:
    message = f"the master ended but worker-1 did not within 120 s; logs in {directory.logs}"
    with pytest.raises(RunError, match=re.escape(message)):
        watch([("master", 0)], [("worker-0", 0)])
    assert 120 < clock.now_s < 121


def test_an_interruption_stops_all_and_is_passed_on(directory: RunDirectory) -> None:
    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    launcher = ScriptedLauncher([])
    spec = ProcessSpec(name=MASTER, argv=("true",))
    with pytest.raises(KeyboardInterrupt):
        supervise(launcher, job(directory, spec), interrupt)
    assert launcher.num_stopped == 1


def test_a_second_interruption_shortens_the_grace(directory: RunDirectory) -> None:
    class Impatient(ScriptedLauncher):
        graces_s: tuple[float, ...] = ()

        def stop(self, *, grace_s: float = 5.0) -> None:
            self.graces_s += (grace_s,)
            if grace_s > 0:
                raise KeyboardInterrupt

    launcher = Impatient([[Exit(name=MASTER, returncode=1)]])
    spec = ProcessSpec(name=MASTER, argv=("true",))
    with pytest.raises(KeyboardInterrupt):
        supervise(launcher, job(directory, spec), lambda: None)
    assert launcher.graces_s == (supervisor.STOP_GRACE_S, 0)


def test_a_job_s_own_end_is_told_once(watch: Watch, directory: RunDirectory) -> None:
    directory.job_log.write_text("".join(f"line {i}\n" for i in range(30)))
    with pytest.raises(RunError) as error:
        watch([("master", 255), ("worker-0", 255), ("worker-1", 255)], note="job 7: CANCELLED on node[1-2]")
    first, *rest = str(error.value).splitlines()
    assert first == f"job 7: CANCELLED on node[1-2]: ended master, worker-0, worker-1; log: {directory.job_log}"
    assert rest == [f"  | line {i}" for i in range(22, 30)]
    assert error.value.returncode == 1
