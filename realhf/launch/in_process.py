"""A run with one worker in the launching process itself, so that a debugger can stop in an interface's code."""

import bdb
import contextlib
import contextvars
import importlib
import logging
import os
import sys
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from realhf.base.errors import UserError
from realhf.launch.devices import devices_of, gpus_for
from realhf.launch.launcher import Exit, Launcher
from realhf.launch.process import WORKER_INDEX_VARIABLE, Job, ProcessSpec, module_of

# How long a poll executes requests before it returns; other work of the launching process waits for it.
_POLL_S = 0.5


@dataclass
class _Part:
    """A process of the job: a generator that returns the exit code, in a context of its own."""

    spec: ProcessSpec
    steps: Generator[None, None, int]
    context: contextvars.Context = field(default_factory=contextvars.copy_context)

    def step(self) -> Exit | None:
        try:
            self.context.run(next, self.steps)
        except StopIteration as end:
            return Exit(name=self.spec.name, returncode=end.value)
        except bdb.BdbQuit:  # `quit` in pdb
            raise KeyboardInterrupt from None
        return None


class InProcessLauncher(Launcher):
    """Runs `in_process` of each process's module here, a generator that returns an exit code.

    `poll` advances the generators on the calling thread: `breakpoint()` in an interface opens pdb, and `poll` raises
    the exceptions of interfaces. The master's has a thread of its own. The modules set the deadlines to a week.
    """

    uses_terminal = True

    def __init__(self, options: Any) -> None:
        self._parts: list[_Part] = []
        self._held = contextlib.ExitStack()

    def preview(self, job: Job) -> str:
        if len(job.workers) != 1:
            raise UserError(
                f"--launcher in-process runs one worker, and the run has {len(job.workers)}; give --num-workers 1, or "
                "--launcher local"
            )
        return "".join(
            f"{process.name}: {' '.join(module_of(process))}, in this process\n" for process in job.processes
        )

    def start(self, job: Job) -> None:
        self.preview(job)
        device = next(devices_of(gpus_for(1, job.avoided), job.avoided))
        self._is_watched = False
        self._held.callback(setattr, sys, "excepthook", sys.excepthook)  # torch.distributed puts ranks before lines
        self._held.callback(logging.getLogger().setLevel, logging.getLogger().level)
        logging.getLogger().setLevel(logging.INFO)
        self._held.callback(_restore, dict(os.environ))
        for process in job.processes:
            os.environ.update(process.env)
            module, *words = module_of(process)
            steps = importlib.import_module(f"{module}.__main__").in_process
            self._parts.append(_Part(process, steps(*words)))
        os.environ.update(device.environment | {WORKER_INDEX_VARIABLE: "0"})

    def poll(self) -> list[Exit]:
        if not self._parts:
            return []
        # Until the caller has been back once it does not look for Ctrl-C.
        until_s = time.monotonic() + (_POLL_S if self._is_watched else 0.0)
        self._is_watched = True
        exits: list[Exit] = []
        while self._parts and time.monotonic() < until_s:
            for part in list(self._parts):
                if (end := part.step()) is not None:
                    self._parts.remove(part)
                    exits.append(end)
        return exits

    def stop(self, *, grace_s: float = 5.0) -> None:
        """Ends the generators, the worker's first. `grace_s` is not used: a thread cannot be killed."""
        while self._parts:
            part = self._parts.pop()
            part.context.run(part.steps.close)
        self._held.close()


def _restore(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
