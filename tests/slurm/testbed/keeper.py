"""The parent of one daemon: all that the daemon and its jobs fork stays below it, whatever they do.

    python -m testbed.keeper DIRECTORY NAME {node|service} COMMAND...

It detaches itself and then obeys signals. TERM: ends the daemon and everything below, then itself.
USR1: kills everything below, as a failing machine would. HUP: starts the daemon again if it is dead.
"""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

from testbed.processes import descendants, process_state, read_text, write_text

PROGRAM_PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
DAEMON_END_S = 60.0

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
CLONE_NEWNS = 0x20000
CLONE_NEWUTS = 0x4000000
CLONE_NEWUSER = 0x10000000
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000

SIGNALS = {signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGCHLD}


def keeper_file(directory: Path, name: str) -> Path:
    """Holds the keeper's pid and start time while it lives."""
    return directory / "run" / f"{name}.pid"


def daemon_file(directory: Path, name: str) -> Path:
    """Holds the pid of the daemon that the keeper started last."""
    return directory / "run" / f"{name}.main"


def output_file(directory: Path, name: str) -> Path:
    return directory / "log" / f"{name}.out"


def live_keepers(directory: Path) -> dict[str, int | None]:
    """Name to pid of every keeper that was started; None where that very process is gone."""
    keepers: dict[str, int | None] = {}
    for path in sorted((directory / "run").glob("*.pid")):
        record = read_text(path).split()
        state = process_state(int(record[0])) if len(record) == 2 else None
        keepers[path.stem] = int(record[0]) if state and state.start_ticks == int(record[1]) else None
    return keepers


def live_daemon(directory: Path, name: str, keeper: int | None) -> int | None:
    """The daemon that runs under `keeper`, if both live."""
    pid = read_text(daemon_file(directory, name))
    if not keeper or not pid:
        return None
    state = process_state(int(pid))
    return int(pid) if state and state.parent == keeper else None


def slurm_environment(directory: Path) -> dict[str, str]:
    """This environment without what an outer SLURM job put into it, pointed at the testbed."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH", "SRUN"))}
    return env | {"PATH": PROGRAM_PATH, "SLURM_CONF": str(directory / "etc/slurm.conf")}


class Keeper:
    """Starts the daemon and serves signals for ever; the signals are blocked and waited for."""

    def __init__(self, directory: Path, name: str, command: list[str]) -> None:
        self._directory = directory
        self._name = name
        self._command = command
        self._libc = ctypes.CDLL(None, use_errno=True)

    def run(self, *, with_hostname: bool) -> NoReturn:
        signal.signal(signal.SIGCHLD, lambda *_: None)  # ignored by default, then not waited for either
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        self._libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        state = process_state(os.getpid())
        assert state is not None
        write_text(keeper_file(self._directory, self._name), f"{os.getpid()} {state.start_ticks}")
        if with_hostname and not self._take_hostname():
            print(f"no private hostname: {os.strerror(ctypes.get_errno())}", file=sys.stderr, flush=True)
        self._start()
        while True:
            self._serve(signal.sigwait(SIGNALS))

    def _take_hostname(self) -> bool:
        """Gives this process and its descendants the node's hostname and /etc/hosts, if it may."""
        uid, gid = os.geteuid(), os.getegid()
        if self._libc.unshare(CLONE_NEWNS | CLONE_NEWUTS | (CLONE_NEWUSER if uid else 0)):
            return False
        if uid:
            write_text(Path("/proc/self/setgroups"), "deny")
            write_text(Path("/proc/self/uid_map"), f"{uid} {uid} 1")
            write_text(Path("/proc/self/gid_map"), f"{gid} {gid} 1")
        socket.sethostname(self._name)
        hosts = str(self._directory / "etc/hosts").encode()
        return not (
            self._libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
            or self._libc.mount(hosts, b"/etc/hosts", None, MS_BIND, None)
        )

    def _start(self) -> None:
        def prepare() -> None:
            self._libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)  # should the keeper be killed
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

        env = slurm_environment(self._directory)
        daemon = subprocess.Popen(self._command, env=env, cwd="/", preexec_fn=prepare)
        write_text(daemon_file(self._directory, self._name), str(daemon.pid))

    def _serve(self, number: int) -> None:
        self._reap()
        daemon = live_daemon(self._directory, self._name, os.getpid())
        if number == signal.SIGHUP and not daemon:
            self._start()
        if number == signal.SIGTERM and daemon:
            self._end(daemon)
        if number in (signal.SIGTERM, signal.SIGUSR1):
            self._kill_all()
        if number == signal.SIGTERM:
            keeper_file(self._directory, self._name).unlink()
            os._exit(0)

    def _end(self, daemon: int) -> None:
        os.kill(daemon, signal.SIGTERM)
        deadline = time.monotonic() + DAEMON_END_S
        while process_state(daemon) and time.monotonic() < deadline:
            time.sleep(0.05)
            self._reap()

    def _kill_all(self) -> None:
        while alive := descendants(os.getpid()):
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
            self._reap()

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def main() -> None:
    directory, name, kind, *command = sys.argv[1:]
    if os.fork():
        os._exit(0)  # the keeper proper is nobody's child
    with contextlib.suppress(BrokenPipeError):
        Keeper(Path(directory), name, command).run(with_hostname=kind == "node")


if __name__ == "__main__":
    main()
