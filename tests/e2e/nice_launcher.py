"""A launcher from outside the package: child processes of low priority. It is the example of docs/contributing.md."""

import contextlib
import os
import signal
import subprocess
from dataclasses import dataclass
from typing import Annotated

from realhf.base.options import Option
from realhf.launch.devices import DEVICE_VARIABLE
from realhf.launch.launcher import Exit, Launcher
from realhf.launch.process import WORKER_INDEX_VARIABLE, Job, ProcessSpec


@dataclass(frozen=True, kw_only=True)
class NiceOptions:
    nice: Annotated[int, Option("how much lower the priority of the processes is")] = 5


class NiceLauncher(Launcher):
    options_type = NiceOptions

    def __init__(self, options: NiceOptions) -> None:
        self._options = options
        self._running: list[tuple[ProcessSpec, subprocess.Popen[bytes]]] = []

    def start(self, job: Job) -> None:
        for process in job.processes:
            env = {**os.environ, **process.env}
            if process.index is not None:
                env |= {WORKER_INDEX_VARIABLE: str(process.index), DEVICE_VARIABLE: f"cpu:{process.index}"}
            command = ["nice", "-n", str(self._options.nice), *process.argv]
            with job.directory.log(process.name).open("ab") as log:
                child = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
            self._running.append((process, child))

    def poll(self) -> list[Exit]:
        ended = [(process, child) for process, child in self._running if child.poll() is not None]
        self._running = [pair for pair in self._running if pair not in ended]
        return [Exit(name=one.name, returncode=child.returncode) for one, child in ended]

    def stop(self, *, grace_s: float = 5.0) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for _, child in self._running:
                if child.poll() is None:
                    os.killpg(child.pid, number)
            for _, child in self._running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(grace_s if number is signal.SIGTERM else None)
        self._running = []
