"""Child processes on this machine."""

import contextlib
import ctypes
import os
import shlex
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from realhf.base.errors import RunError, UserError
from realhf.base.files import open_regular
from realhf.launch.devices import Device, devices_of, gpus_for
from realhf.launch.launcher import Exit, Launcher, NoOptions
from realhf.launch.process import WORKER_INDEX_VARIABLE, Job, ProcessSpec
from realhf.machine.gpus import Gpu

_PR_SET_PDEATHSIG = 1
_LOOK_S = 0.02
# Marks all descendants of one launcher, also those that left its process group or lost their parent.
_LAUNCH_VARIABLE = "REALHF_LAUNCH_ID"


class LocalLauncher(Launcher):
    """Runs each process in a session of its own, so that Ctrl-C reaches the launcher alone. A place is a device.

    The system kills the children when the thread that called `start` ends: it has to live as long as the run.
    """

    def __init__(self, options: NoOptions) -> None:
        self._gpus: tuple[Gpu, ...] | None = None  # that runs may use, as they were seen first
        self._job: Job | None = None
        self._launch_id = uuid.uuid4().hex
        self._children: list[_Child] = []

    def preview(self, job: Job) -> str:
        return "".join(f"{process.name}: {shlex.join(process.argv)}\n" for process in self.placed(job))

    def placed(self, job: Job) -> list[ProcessSpec]:
        """The job's processes, each worker with its device in its environment. UserError: there are too few devices."""
        devices = self._devices(job)
        own = [{} if process.index is None else devices[process.index].environment for process in job.processes]
        return [replace(one, env={**one.env, **env}) for one, env in zip(job.processes, own, strict=True)]

    def start(self, job: Job) -> None:
        assert not self._children, "the last job was not stopped"
        self._job = job
        try:
            for process in self.placed(job):
                self._children.append(self._start(process, job.directory.log(process.name)))
        except BaseException:
            self.stop(grace_s=0)
            raise

    def _start(self, spec: ProcessSpec, log_path: Path) -> "_Child":
        env = {**os.environ, **spec.env, _LAUNCH_VARIABLE: self._launch_id}
        env.pop(WORKER_INDEX_VARIABLE, None)
        if spec.index is not None:
            env[WORKER_INDEX_VARIABLE] = str(spec.index)
        try:
            return _Child(spec.name, start_child(spec.argv, log_path, env))
        except OSError as error:
            raise UserError(f"cannot start {spec.name} ({spec.argv[0]}): {error}") from error

    def poll(self) -> list[Exit]:
        exits = []
        for child in self._children:
            if not child.is_reported and (status := child.process.poll()) is not None:
                child.is_reported = True
                exits.append(Exit(name=child.name, returncode=status))
        # One that failed is the likelier cause of the others' ends if all were found at once.
        return sorted(exits, key=lambda found: found.returncode == 0)

    def stop(self, *, grace_s: float = 5.0) -> None:
        _signal_groups(self._children, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while any(child.process.poll() is None for child in self._children) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        _signal_groups(self._children, signal.SIGKILL)
        for child in self._children:
            child.process.wait()
        self._children = []
        self._kill_descendants()

    def place(self, worker: int) -> str | None:
        assert self._job is not None
        return self._devices(self._job)[worker].place

    def room(self, avoided: frozenset[str]) -> int:
        assert self._job is not None
        if self._gpus:
            return min(len(list(devices_of(self._gpus, avoided))), len(self._job.workers))
        return len(self._job.workers) - len(avoided - self._job.avoided)

    def _devices(self, job: Job) -> list[Device]:
        """The device of each worker."""
        if self._gpus is None:
            self._gpus = gpus_for(len(job.workers), job.avoided)
        return list(islice(devices_of(self._gpus, job.avoided), len(job.workers)))

    def _kill_descendants(self, *, timeout_s: float = 120.0) -> None:
        deadline = time.monotonic() + timeout_s
        while left := _processes_with(f"{_LAUNCH_VARIABLE}={self._launch_id}"):
            if time.monotonic() > deadline:
                raise RunError(f"processes {left} of this run cannot be killed; end them by hand")
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_LOOK_S)


@dataclass
class _Child:
    name: str
    process: subprocess.Popen[bytes]
    is_reported: bool = False


def _signal_groups(children: Sequence[_Child], number: signal.Signals) -> None:
    for child in children:
        # Only while its leader is not reaped is a group's number certain to be ours.
        if child.process.poll() is None:
            os.killpg(child.process.pid, number)


def start_child(
    argv: Sequence[str], log_path: Path, env: Mapping[str, str] | None = None, *, is_idle: bool = False
) -> subprocess.Popen[bytes]:
    """Starts a process in a session of its own, which the system kills when the present thread ends. Its output is
    appended to its log. `is_idle`: it computes only where nothing else does. Raises OSError."""
    parent = os.getpid()
    prctl = ctypes.CDLL(None).prctl  # looked up here: after the fork as little as possible should happen

    def prepare() -> None:
        if is_idle:
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the request was made
            os.kill(os.getpid(), signal.SIGKILL)

    with open_regular(log_path, "ab") as log:
        return subprocess.Popen(
            argv,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=prepare,
        )


def _processes_with(entry: str) -> list[int]:
    """Living processes of this user that have `entry` ("NAME=value") in the environment they were started with."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
            if entry.encode() in file.read().split(b"\0"):
                found.append(int(name))
    return found
