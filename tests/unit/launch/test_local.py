"""Local processes: none outlives the launcher, however it or they end."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from realhf.base.errors import UserError
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
