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
        self.num_polls = self.num_stopped = 0

    def start(self, job: Job) -> None:
        self.started = [process.name for process in job.processes]

    def poll(self) -> list[Exit]:
        self.num_polls += 1
        assert self.num_polls < 4000, "nobody gives the job up"
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


def test_all_end_well(watch: Watch, clock: Clock) -> None:
    watch([], [("worker-1", 0)], [], [("master", 0), ("worker-0", 0)])
    assert clock.now_s < 0.5, "it returns when the last one has ended"


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
    failed = Status(state="failed", step=1, steps=2, message="worker 1 failed in its call", blamed=(1,))
    write_status(directory.status, failed)
    with pytest.raises(RunError, match=r"^worker 1 failed in its call$") as error:
        watch([("worker-1", TOLD_RETURNCODE)], [("worker-0", TOLD_RETURNCODE)], [("master", 1)])
    assert error.value.workers == {1}


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
        watch([("worker-1", 0)], [("worker-0", TOLD_RETURNCODE)], note="node failure")
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


@pytest.fixture
def eighths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Polls come every eighth of a second, whose sums are exact."""
    monkeypatch.setattr(supervisor, "POLL_S", 0.125)


@pytest.mark.usefixtures("eighths")
def test_a_time_is_over_when_more_than_all_of_it_has_passed(watch: Watch, clock: Clock) -> None:
    for ends, patience_s in (([("master", 0)], 120), ([("worker-0", TOLD_RETURNCODE)], 30), ([("worker-0", 7)], 1)):
        began_s = clock.now_s
        with pytest.raises(RunError):
            watch(ends)
        assert clock.now_s - began_s == patience_s + 0.125


def test_a_caller_may_start_the_job_in_its_own_way_and_is_called_at_each_poll(
    directory: RunDirectory, clock: Clock
) -> None:
    called: list[float] = []
    launcher = ScriptedLauncher([[], [], [Exit(name=MASTER, returncode=0)]])
    supervise(
        launcher,
        job(directory, ProcessSpec(name=MASTER, argv=("true",))),
        lambda: called.append(clock.now_s),
        lambda: launcher.started.append("by its own way"),
    )
    assert launcher.started == ["by its own way"]
    assert called == pytest.approx([0, 0.1, 0.2, 0.3]), "ten times a second, and once after all"


def test_of_those_that_ended_at_once_the_killed_ones_are_the_cause(watch: Watch, clock: Clock) -> None:
    with pytest.raises(RunError, match=r"^worker-1 was killed by signal 11 \(SIGSEGV\)") as error:
        watch([("worker-0", 7), ("worker-1", -signal.SIGSEGV)])
    assert (error.value.workers, error.value.returncode) == ({1}, 1)
    assert clock.now_s == 0, "the cause is known"


def test_a_failure_of_the_master_is_known_at_once(watch: Watch, clock: Clock) -> None:
    with pytest.raises(RunError, match=r"^master ended with exit code 1; log: ") as error:
        watch([("master", 1)])
    assert (error.value.workers, clock.now_s) == (set(), 0)


def test_ends_with_and_without_a_word_of_the_cluster_are_told_apart(directory: RunDirectory) -> None:
    directory.job_log.write_text("of the job\n")
    ends = [
        Exit(name="worker-0", returncode=TOLD_RETURNCODE),
        Exit(name="worker-1", returncode=UNKNOWN_RETURNCODE, note="job 7: TIMEOUT"),
        Exit(name="worker-2", returncode=UNKNOWN_RETURNCODE),
        Exit(name="worker-3", returncode=UNKNOWN_RETURNCODE, note="job 7: TIMEOUT"),
    ]
    specs = [ProcessSpec(name=end.name, argv=("true",)) for end in ends]
    with pytest.raises(RunError) as error:
        supervise(ScriptedLauncher([ends]), job(directory, *specs), lambda: None)
    assert str(error.value).splitlines() == [
        f"worker-0 ended with exit code 86; log: {directory.log('worker-0')}",
        f"worker-2 ended with exit code 255; log: {directory.log('worker-2')}",
        "job 7: TIMEOUT: ended worker-1, worker-3",
    ]


@pytest.mark.parametrize(("is_remote", "hosts"), [(True, [" on node0", " on node1"]), (False, ["", ""])])
def test_a_process_on_another_machine_is_named_with_its_host(
    directory: RunDirectory, is_remote: bool, hosts: list[str]
) -> None:
    """The master is on the first one."""

    class Placed(ScriptedLauncher):
        def place(self, worker: int) -> str | None:
            return f"node{worker}"

    launcher = Placed([[Exit(name=name, returncode=-9) for name in (MASTER, "worker-1")]])
    launcher.is_remote = is_remote  # type: ignore[misc]
    specs = [ProcessSpec(name=name, argv=("true",)) for name in (MASTER, "worker-0", "worker-1")]
    with pytest.raises(RunError) as error:
        supervise(launcher, job(directory, *specs), lambda: None)
    assert [line.partition(";")[0] for line in str(error.value).splitlines()] == [
        f"{name} was killed by signal 9 (SIGKILL){host}" for name, host in zip((MASTER, "worker-1"), hosts, strict=True)
    ]


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
        if number in (50, 1800, 1900):  # the first while the job waits: of an earlier start
            written_s.append(clock.now_s)
            write_status(directory.status, Status(state="running", step=len(written_s), steps=9))

    spec = ProcessSpec(name=MASTER, argv=("true",))
    with pytest.raises(RunError, match=f"the master has been silent for {silence_s} s: it hangs, or its node does"):
        supervise(Waiting(100, at, is_remote), job(directory, spec), lambda: None)
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


@pytest.mark.usefixtures("eighths")
@pytest.mark.parametrize(("stall_s", "counts"), [(5.0, True), (5.125, False)])
def test_a_silence_counts_unless_the_observer_stood_still(
    directory: RunDirectory, clock: Clock, stall_s: float, counts: bool
) -> None:
    """From a look to the next: up to five seconds are of a busy machine."""

    def at(number: int) -> None:
        if number == 8:
            write_status(directory.status, Status(state="running", step=1, steps=9))
        if number == 16:
            clock.sleep(stall_s - 0.125)

    with pytest.raises(RunError, match="the master has been silent for 60 s"):
        supervise(Waiting(0, at), job(directory, ProcessSpec(name=MASTER, argv=("true",))), lambda: None)
    seen_s = 7 * 0.125 if counts else 14 * 0.125 + stall_s
    assert clock.now_s == seen_s + 60.125


def test_a_master_that_has_ended_is_not_waited_for_to_write(directory: RunDirectory, clock: Clock) -> None:
    class Ended(ScriptedLauncher):
        def poll(self) -> list[Exit]:
            write_status(directory.status, Status(state="running", step=1, steps=1)) if clock.now_s < 1 else None
            return super().poll()

    launcher = Ended([[]] * 20 + [[Exit(name=MASTER, returncode=0)]])
    specs = [ProcessSpec(name=name, argv=("true",)) for name in (MASTER, "worker-0")]
    with pytest.raises(RunError, match="the master ended but worker-0 did not within 120 s"):
        supervise(launcher, job(directory, *specs), lambda: None)


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
    assert launcher.graces_s == (3.0, 0)


def test_a_job_s_own_end_is_told_once(watch: Watch, directory: RunDirectory) -> None:
    directory.job_log.write_text("".join(f"line {i}\n" for i in range(30)))
    with pytest.raises(RunError) as error:
        watch([("master", 255), ("worker-0", 255), ("worker-1", 255)], note="job 7: CANCELLED on node[1-2]")
    first, *rest = str(error.value).splitlines()
    assert first == f"job 7: CANCELLED on node[1-2]: ended master, worker-0, worker-1; log: {directory.job_log}"
    assert rest == [f"  | line {i}" for i in range(22, 30)]
    assert error.value.returncode == 1
