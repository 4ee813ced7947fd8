"""What is said of a run that ended badly, with a launcher whose processes end as a test wants it."""

import os
import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from realhf.base.errors import RunError
from realhf.launch import supervisor
from realhf.launch.launcher import UNKNOWN_RETURNCODE, Exit, Launcher
from realhf.launch.process import MASTERLESS_RETURNCODE, TOLD_RETURNCODE, Job, ProcessSpec
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


class Waiting(ScriptedLauncher):
    """Its job waits in a queue for the first polls; `at` is called with the number of each."""

    def __init__(self, waits: int, at: Callable[[int], None], is_remote: bool = False) -> None:
        super().__init__([])
        self.number, self._waits, self._at, self.is_remote = 0, waits, at, is_remote

    def poll(self) -> list[Exit]:
        self.number += 1
        assert self.number < 4000, "nobody gives the master up"
        self._at(self.number)
        return []

    def is_waiting(self) -> bool:
        return self.number <= self._waits

    def place(self, worker: int) -> str | None:
        return None


@pytest.mark.parametrize(("is_remote", "silence_s"), [(False, 60), (True, 150)])
def test_a_master_that_writes_no_status_any_more_is_given_up(
    directory: RunDirectory, clock: Clock, is_remote: bool, silence_s: int
) -> None:
    """From its last sign of life on: none counts while the job waits, however long, and none before the first."""
    written_s: list[float] = []

    def at(number: int) -> None:
        if number in (50, 900, 1000):  # the first while the job waits: of an earlier start
            written_s.append(clock.now_s)
            write_status(directory.status, Status(state="running", step=len(written_s), steps=9))

    spec = ProcessSpec(name=MASTER, argv=("true",))
    with pytest.raises(RunError, match=f"the master has been silent for {silence_s} s: it hangs, or its node does"):
        supervise(Waiting(800, at, is_remote), job(directory, spec), lambda: None)
    assert clock.now_s - written_s[-1] == pytest.approx(silence_s, abs=0.5)


def test_an_observer_that_stood_still_gives_nobody_up(directory: RunDirectory, clock: Clock) -> None:
    """As a laptop that sleeps: the master may have been silent for no longer than the observer."""

    def at(number: int) -> None:
        if number == 10:
            write_status(directory.status, Status(state="running", step=1, steps=9))
        if number == 100:
            clock.sleep(1000.0)

    spec = ProcessSpec(name=MASTER, argv=("true",))
    with pytest.raises(RunError, match="the master has been silent for 60 s"):
        supervise(Waiting(0, at), job(directory, spec), lambda: None)
    assert clock.now_s == pytest.approx(1000 + 10 + 60, abs=1.0)


@pytest.mark.parametrize(
    ("code", "passed_on"),
    [(17, 17), (1, 1), (2, 1), (130, 1), (TOLD_RETURNCODE, 1), (MASTERLESS_RETURNCODE, 1), (UNKNOWN_RETURNCODE, 1)],
)
def test_a_process_s_own_exit_code_is_passed_on(watch: Watch, code: int, passed_on: int) -> None:
    """Those that mean something of their own to the command line are not."""
    with pytest.raises(RunError) as error:
        watch([("master", 0), ("worker-0", code), ("worker-1", 0)])
    assert error.value.returncode == passed_on


def test_two_of_many_ends_are_described_and_the_others_named(watch: Watch) -> None:
    with pytest.raises(RunError) as error:
        watch([("master", -9), ("worker-0", -9), ("worker-1", -9)])
    lines = str(error.value).splitlines()
    assert [line.partition(" was killed")[0] for line in lines[:2]] == ["master", "worker-0"]
    assert lines[2:] == ["ended badly too: worker-1"]


def test_many_that_ended_with_the_job_are_named_up_to_eight(directory: RunDirectory) -> None:
    names = [worker_name(index) for index in range(9)]
    for count, end in ((8, "worker-7; log: "), (9, "worker-7, ...; log: ")):
        ends = [Exit(name=name, returncode=UNKNOWN_RETURNCODE, note="job 7: TIMEOUT") for name in names[:count]]
        specs = [ProcessSpec(name=name, argv=("true",)) for name in names[:count]]
        with pytest.raises(RunError, match=re.escape(end)):
            supervise(ScriptedLauncher([ends]), job(directory, *specs), lambda: None)


def test_an_interruption_may_leave_the_job(directory: RunDirectory) -> None:
    class Left(ScriptedLauncher):
        is_left = False

        def leave(self) -> None:
            assert self.num_stopped == 0
            self.is_left = True

    def interrupt() -> None:
        raise KeyboardInterrupt

    for leaves in (True, False):
        launcher = Left([])
        with pytest.raises(KeyboardInterrupt):
            supervise(launcher, job(directory, ProcessSpec(name=MASTER, argv=("true",))), interrupt, leaves=leaves)
        assert launcher.is_left is leaves


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
