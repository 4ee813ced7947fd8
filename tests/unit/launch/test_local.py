"""Local processes: none outlives the launcher, however it or they end."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from realhf.base.errors import RunError, UserError
from realhf.launch import local
from realhf.launch.launcher import Exit, NoOptions
from realhf.launch.local import LocalLauncher, start_child
from realhf.launch.process import Job, ProcessSpec, worker_index
from realhf.rundir.paths import RunDirectory
from tests.waiting import wait_until

FOR_EVER = "while :; do sleep 0.1; done"


def spec(name: str, tmp_path: Path, command: str) -> ProcessSpec:
    return ProcessSpec(name=name, argv=("bash", "-c", command), env={"PLACE": str(tmp_path)})


def job(tmp_path: Path, *processes: ProcessSpec) -> Job:
    (tmp_path / "logs").mkdir(exist_ok=True)
    return Job(directory=RunDirectory(tmp_path), processes=processes, workers_per_node=1)


def pid_in(path: Path) -> int:
    wait_until(lambda: path.exists() and path.read_text().endswith("\n"), f"{path} is written")
    return int(path.read_text())


def lives(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def polled(launcher: LocalLauncher, number: int = 1) -> list[Exit]:
    """The first ends that the launcher tells, of so many processes."""
    found: list[Exit] = []

    def are_told() -> bool:
        found.extend(launcher.poll())
        return len(found) >= number

    wait_until(are_told, "processes end")
    return found


@pytest.fixture
def launcher() -> Iterator[LocalLauncher]:
    launcher = LocalLauncher(NoOptions())
    yield launcher
    launcher.stop(grace_s=0)


def test_sigkill_of_the_launcher_leaves_no_child(tmp_path: Path) -> None:
    program = f"""
import sys, time
from pathlib import Path
from realhf.launch.launcher import NoOptions
from realhf.launch.local import LocalLauncher, start_child
from realhf.launch.process import Job, ProcessSpec
from realhf.rundir.paths import RunDirectory
place = Path(sys.argv[1])
launcher = LocalLauncher(NoOptions())
launcher.start(Job(directory=RunDirectory(place), workers_per_node=1, processes=tuple(
    ProcessSpec(name=name, argv=("bash", "-c", f"echo $$ > {{place}}/{{name}}; {FOR_EVER}"))
    for name in ("master", "worker-0")
)))
time.sleep(3600)
"""
    (tmp_path / "logs").mkdir()
    parent = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)])
    try:
        pids = [pid_in(tmp_path / name) for name in ("master", "worker-0")]
        assert all(map(lives, pids))
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: not any(map(lives, pids)), f"{pids} end")


@pytest.mark.parametrize("parent_ends", [False, True])
def test_descendants_are_ended_wherever_they_went(launcher: LocalLauncher, tmp_path: Path, parent_ends: bool) -> None:
    """In another session, with the parent that started them dead or alive."""
    leave = f'setsid bash -c \'trap "" TERM; echo $$ > "$PLACE/pid"; {FOR_EVER}\' > /dev/null 2>&1 &'
    launcher.start(job(tmp_path, spec("master", tmp_path, leave + ("" if parent_ends else FOR_EVER))))
    pid = pid_in(tmp_path / "pid")
    if parent_ends:
        polled(launcher)
    assert lives(pid)
    launcher.stop(grace_s=0.1)
    assert not lives(pid)


def _is_of_the_job(child: psutil.Process) -> bool:
    try:
        return "PLACE" in child.environ()
    except psutil.NoSuchProcess:  # has ended, perhaps as another test's
        return False


def test_a_failed_start_leaves_nothing(launcher: LocalLauncher, tmp_path: Path) -> None:
    worker = spec("worker-0", tmp_path, f'echo $$ > "$PLACE/pid"; {FOR_EVER}')
    missing = ProcessSpec(name="master", argv=("/no/such/program",))
    with pytest.raises(UserError, match="cannot start master \\(/no/such/program\\)"):
        launcher.start(job(tmp_path, worker, missing))
    assert not [child for child in psutil.Process().children(recursive=True) if _is_of_the_job(child)]


def test_the_signal_that_killed_is_the_returncode(launcher: LocalLauncher, tmp_path: Path) -> None:
    launcher.start(job(tmp_path, spec("worker-0", tmp_path, "kill -SEGV $$")))
    assert [(found.name, found.returncode) for found in polled(launcher)] == [("worker-0", -signal.SIGSEGV)]


def test_of_several_ends_the_bad_ones_come_first(launcher: LocalLauncher, tmp_path: Path) -> None:
    note = 'echo $$ > "$PLACE/pid"'
    launcher.start(
        job(tmp_path, spec("master", tmp_path, f"{note}.0; exit 0"), spec("worker-0", tmp_path, f"{note}.4; exit 4"))
    )
    pids = [pid_in(tmp_path / f"pid.{code}") for code in (0, 4)]
    wait_until(lambda: not any(map(lives, pids)), "both end")
    assert [(found.name, found.returncode) for found in launcher.poll()] == [("worker-0", 4), ("master", 0)]


def test_ctrl_c_reaches_the_launcher_alone(launcher: LocalLauncher, tmp_path: Path) -> None:
    launcher.start(job(tmp_path, spec("master", tmp_path, f'echo $$ > "$PLACE/pid"; {FOR_EVER}')))
    pid = pid_in(tmp_path / "pid")
    assert os.getsid(pid) == os.getpgid(pid) == pid
    assert os.getsid(pid) != os.getsid(0)


def test_logs_are_appended_to(tmp_path: Path) -> None:
    launcher, of_master = LocalLauncher(NoOptions()), job(tmp_path, spec("master", tmp_path, "echo after"))
    (tmp_path / "logs/master.log").write_text("before\n")
    launcher.start(of_master)
    polled(launcher)
    launcher.stop()
    assert (tmp_path / "logs/master.log").read_text() == "before\nafter\n"


def test_an_idle_child_computes_where_nothing_else_does(tmp_path: Path) -> None:
    script = "import os; print(os.sched_getscheduler(0), flush=True)"
    for is_idle, policy in ((True, os.SCHED_IDLE), (False, os.SCHED_OTHER)):
        child = start_child([sys.executable, "-c", script], tmp_path / str(is_idle), is_idle=is_idle)
        assert child.wait(60) == 0
        assert (tmp_path / str(is_idle)).read_text() == f"{policy}\n"


def test_the_index_is_the_workers_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("REALHF_WORKER_INDEX", "7")  # of a run that this one was started from
    launcher = LocalLauncher(NoOptions())
    print_it = 'echo "$REALHF_WORKER_INDEX"'
    launcher.start(job(tmp_path, spec("master", tmp_path, print_it), spec("worker-0", tmp_path, print_it)))
    polled(launcher, number=2)
    launcher.stop()
    assert (tmp_path / "logs/master.log").read_text() == "\n"
    assert (tmp_path / "logs/worker-0.log").read_text() == "0\n"
    assert worker_index() == 7


class Machine:
    """Stands in for processes, signals and time: process N ends a while after a signal, or by itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.sent, self.started = 100.0, [], []  # type: ignore[var-annotated]
        self.ends_s: dict[int, float] = {}
        self.waited_for: list[int] = []
        self.takes_s: dict[int, float] = {}  # to end after SIGTERM
        self.descendants: list[list[int]] = []
        monkeypatch.setattr(local, "time", self)
        monkeypatch.setattr(local, "start_child", self.start_child)
        monkeypatch.setattr(local, "_processes_with", self.processes_with)
        monkeypatch.setattr(os, "killpg", self.send)
        monkeypatch.setattr(os, "kill", self.send)

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += 0.25

    def start_child(self, argv: tuple[str, ...], log: Path, env: dict[str, str]) -> "Process":
        if argv == ("missing",):
            raise FileNotFoundError("no such file")
        self.started.append((argv, log, env))
        return Process(self, len(self.started))

    def send(self, pid: int, number: int) -> None:
        self.sent.append((self.now_s - 100.0, pid, number))
        if pid == 99:
            raise ProcessLookupError
        takes_s = 0.0 if number == signal.SIGKILL else self.takes_s.get(pid, 1e9)
        self.ends_s[pid] = min(self.ends_s.get(pid, 1e9), self.now_s + takes_s)

    def processes_with(self, entry: str) -> list[int]:
        self.entry = entry
        return self.descendants.pop(0) if self.descendants else []


class Process:
    def __init__(self, machine: Machine, pid: int) -> None:
        self.machine, self.pid = machine, pid

    def poll(self) -> int | None:
        return self.pid if self.machine.ends_s.get(self.pid, 1e9) <= self.machine.now_s else None

    def wait(self) -> None:
        assert self.poll() is not None, "it would wait for ever"
        self.machine.waited_for.append(self.pid)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def started_on(machine: Machine, tmp_path: Path, *names: str) -> LocalLauncher:
    launcher = LocalLauncher(NoOptions())
    launcher.start(job(tmp_path, *(ProcessSpec(name=name, argv=(f"run {name}",), env={"OF": name}) for name in names)))
    return launcher


@pytest.mark.parametrize(("takes_s", "killed"), [(0.0, []), (1.0, []), (2.0, []), (2.25, [2])])
def test_stopping_asks_all_and_kills_those_that_take_too_long(
    machine: Machine, tmp_path: Path, takes_s: float, killed: list[int]
) -> None:
    machine.takes_s = {1: 0.5, 2: takes_s}
    launcher = started_on(machine, tmp_path, "master", "worker-0", "worker-1")
    machine.ends_s[3] = 100.0  # by itself: its number may be another's by now
    launcher.stop(grace_s=2.0)
    assert machine.sent[:2] == [(0.0, 1, signal.SIGTERM), (0.0, 2, signal.SIGTERM)]
    assert machine.sent[2:] == [(2.0, pid, signal.SIGKILL) for pid in killed]
    assert machine.now_s - 100.0 == max(0.5, min(2.0, takes_s)), "no longer than it takes"
    assert machine.waited_for == [1, 2, 3]
    assert launcher.poll() == []
    launcher.start(job(tmp_path))


def test_what_a_failed_start_has_begun_is_ended_at_once(machine: Machine, tmp_path: Path) -> None:
    specs = [ProcessSpec(name="master", argv=("run",)), ProcessSpec(name="worker-0", argv=("missing",))]
    with pytest.raises(UserError, match=r"^cannot start worker-0 \(missing\): no such file$"):
        LocalLauncher(NoOptions()).start(job(tmp_path, *specs))
    assert machine.sent == [(0.0, 1, signal.SIGTERM), (0.0, 1, signal.SIGKILL)]


def test_the_grace_is_five_seconds_unless_another_is_given(machine: Machine, tmp_path: Path) -> None:
    started_on(machine, tmp_path, "master").stop()
    assert machine.sent == [(0.0, 1, signal.SIGTERM), (5.0, 1, signal.SIGKILL)]


def test_descendants_are_killed_until_none_is_left(machine: Machine, tmp_path: Path) -> None:
    machine.descendants = [[7, 99], [7]]  # 99 ends before it is killed
    launcher = started_on(machine, tmp_path, "master")
    machine.ends_s[1] = 100.0
    launcher.stop()
    kill = signal.SIGKILL
    assert machine.sent == [(0.0, 7, kill), (0.0, 99, kill), (0.25, 7, kill)]
    [(argv, log, env)] = machine.started
    assert (argv, log, env["OF"]) == (("run master",), tmp_path / "logs/master.log", "master")
    assert machine.entry == f"REALHF_LAUNCH_ID={env['REALHF_LAUNCH_ID']}"


def test_descendants_that_cannot_be_killed_are_told(machine: Machine, tmp_path: Path) -> None:
    machine.descendants = [[7]] * 1000
    with pytest.raises(RunError, match=r"^processes \[7\] of this run cannot be killed; end them by hand$"):
        LocalLauncher(NoOptions()).stop()
    assert machine.now_s == 100.0 + 120.25
    assert machine.sent[-1] == (120.0, 7, signal.SIGKILL)


def test_each_end_is_told_once(machine: Machine, tmp_path: Path) -> None:
    launcher = started_on(machine, tmp_path, "master", "worker-0")
    assert launcher.poll() == []
    machine.ends_s[2] = 100.0
    assert launcher.poll() == [Exit(name="worker-0", returncode=2)]
    assert launcher.poll() == []
    with pytest.raises(AssertionError, match="the last job was not stopped"):
        launcher.start(job(tmp_path))


def test_the_commands_of_a_job_are_shown_as_a_shell_would_take_them(tmp_path: Path) -> None:
    specs = [ProcessSpec(name=name, argv=("run", "it's")) for name in ("master", "worker-0")]
    shown = LocalLauncher(NoOptions()).preview(job(tmp_path, *specs))
    assert shown == """master: run 'it'"'"'s'\nworker-0: run 'it'"'"'s'\n"""


def test_a_child_reads_nothing_and_its_errors_are_in_its_log(tmp_path: Path) -> None:
    child = start_child(
        ["bash", "-c", "cat; echo printed; echo wrong >&2"], tmp_path / "log", {"PATH": os.environ["PATH"]}
    )
    assert child.wait(60) == 0
    assert (tmp_path / "log").read_text() == "printed\nwrong\n"


def test_a_child_does_not_share_the_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(subprocess, "Popen", lambda argv, **more: given.update(more, argv=argv))
    start_child(["run"], tmp_path / "log", {"A": "1"})
    assert (given["argv"], given["env"], given["start_new_session"]) == (["run"], {"A": "1"}, True)
    assert (given["stdin"], given["stderr"]) == (subprocess.DEVNULL, subprocess.STDOUT)
    assert given["stdout"].name == str(tmp_path / "log")


def test_a_child_whose_parent_has_just_ended_ends_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Before it could ask the system to be killed then."""
    own = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda getpid=os.getpid: -1 if getpid() == own else getpid())
    assert start_child(["sleep", "60"], tmp_path / "log").wait(60) == -signal.SIGKILL
