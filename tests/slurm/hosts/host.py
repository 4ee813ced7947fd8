"""One host: namespaces that begin and end with their first process."""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from testbed.processes import descendants, process_state, read_text, write_text

PATIENCE_S = 300.0  # for what takes seconds where nothing else runs
_PR_SET_PDEATHSIG = 1
_NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid")
_ENTERED = ("-n", "-u", "-i", "-m", "-p")


class HostsError(Exception):
    """The hosts could not be brought into the state asked for; the text says why."""


class Host:
    """A host by its name, running or not; what is known of it lies in `directory`/NAME."""

    def __init__(self, directory: Path, name: str) -> None:
        self.name, self.folder, self._directory = name, directory / name, directory

    @property
    def pid(self) -> int | None:
        """The host's first process, as the machine numbers it; None: the host is down."""
        record = read_text(self.folder / "init").split()
        state = process_state(int(record[0])) if len(record) == 2 else None
        return int(record[0]) if state and state.start_ticks == int(record[1]) else None

    def start(self, *, ends_with_caller: bool) -> None:
        """Boots it: a new boot id, empty /dev/shm and /run, only the loopback interface. Raises HostsError."""
        shutil.rmtree(self.folder / "run", ignore_errors=True)
        (self.folder / "run").mkdir(parents=True)
        (self.folder / "ready").unlink(missing_ok=True)
        (self.folder / "hosts").touch()
        write_text(self.folder / "boot_id", f"{uuid.uuid4()}\n")
        first = [sys.executable, "-I", "-S", str(Path(__file__).with_name("init.py")), str(self._directory), self.name]
        with (self.folder / "output").open("ab") as output:
            outer = subprocess.Popen(
                ["unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc", *first],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=_end_with_parent if ends_with_caller else None,
            )
        wait_for(
            f"start of {self.name}",
            lambda: (self.folder / "ready").exists() or outer.poll() is not None,
            lambda: read_text(self.folder / "output"),
        )
        below = descendants(outer.pid)
        if not below:
            raise HostsError(f"{self.name} does not start: {read_text(self.folder / 'output')[-1500:]}")
        pid = below[0]
        state = process_state(pid)
        assert state is not None
        write_text(self.folder / "init", f"{pid} {state.start_ticks}")
        in_network(pid, "ip", "link", "set", "lo", "up")

    def kill(self) -> None:
        """As a power loss: all its processes are gone when this returns."""
        pid = self.pid
        if pid is None:
            return
        os.kill(pid, signal.SIGKILL)
        wait_for(f"end of {self.name} (process {pid})", lambda: self.pid is None)

    def command(self, *words: str) -> list[str]:
        """A command as the machine starts it, to run on the host."""
        # Not `ip netns exec`, which mounts another /sys: slurmd would not find its cgroups there.
        return ["nsenter", "-t", str(self._running()), *_ENTERED, f"--wd={os.getcwd()}", "--", *words]

    def run(
        self, *words: str, env: Mapping[str, str] | None = None, timeout_s: float = PATIENCE_S
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on the host; standard error is in `stdout` too."""
        return _run(self.command(*words), env=env, timeout=timeout_s)

    def done(self, *words: str, env: Mapping[str, str] | None = None) -> str:
        """What a command on the host printed. Raises HostsError where it fails."""
        return _checked(self.run(*words, env=env))

    def _running(self) -> int:
        if (pid := self.pid) is None:
            raise HostsError(f"{self.name} is down")
        return pid


def wait_for(what: str, is_done: Callable[[], bool], said: Callable[[], str] = lambda: "") -> None:
    """Until `is_done`. Raises HostsError after PATIENCE_S, with the end of what is `said`."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_done():
        if time.monotonic() > deadline:
            raise HostsError(f"{what}: not within {PATIENCE_S:g} s: {said()[-1500:]}")
        time.sleep(0.02)


def in_network(pid: int, *words: str, text: str | None = None) -> str:
    """What a command of the machine printed in the network of a process; `text` is its input."""
    given: dict[str, Any] = {"input": text} if text is not None else {"stdin": subprocess.DEVNULL}
    return _checked(_run(["nsenter", "-t", str(pid), "-n", "--", *words], timeout=PATIENCE_S, **given))


def _run(words: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    options = {"stdin": subprocess.DEVNULL} | options if "input" not in options else options
    return subprocess.run(words, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)


def _checked(ended: subprocess.CompletedProcess[str]) -> str:
    if ended.returncode:
        raise HostsError(f"{' '.join(ended.args)} ended with {ended.returncode}: {ended.stdout[-1500:]}")
    return ended.stdout


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
