"""Runs whose processes are forked from one that has imported torch: a second instead of ten, for many small runs.

Everything else is as in a run of the command line: master and workers are processes of their own and talk over ZMQ and
gloo, and the run directory is whole.
"""

import contextlib
import ctypes
import importlib
import io
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from realhf import cli
from realhf.launch.devices import DEVICE_VARIABLE
from realhf.launch.launcher import Exit, Launcher
from realhf.launch.process import WORKER_INDEX_VARIABLE, Job, ProcessSpec, module_of, process_environment
from tests.distributed.pool import PRELOADED
from tests.e2e.runs import ROOT, FinishedRun, experiment_file

_PR_SET_PDEATHSIG = 1


class ForkedLauncher(Launcher):
    """Child processes of the fork server; it has torch, the worker and the master imported."""

    def __init__(self, options: Any) -> None:
        self._running: list[tuple[str, Any]] = []

    def start(self, job: Job) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        for spec in job.processes:
            arguments = (module_of(spec), str(job.directory.log(spec.name)), _environment(spec))
            process = context.Process(target=_main, args=arguments, daemon=True)
            with _environ(process_environment()):  # that of the fork server, if this starts it
                process.start()
            self._running.append((spec.name, process))

    def poll(self) -> list[Exit]:
        ended = [pair for pair in self._running if pair[1].exitcode is not None]
        self._running = [pair for pair in self._running if pair not in ended]
        return [Exit(name=name, returncode=process.exitcode) for name, process in ended]

    def stop(self, *, grace_s: float = 5.0) -> None:
        for _, process in self._running:
            process.terminate()
        for _, process in self._running:
            process.join(grace_s)
            process.kill()
            process.join()
        self._running = []


def quickly_finished(run_dir: Path, experiment: str | Path, *words: str | Path) -> FinishedRun:
    """As `tests.e2e.runs.finished`, with forked processes; the command itself runs in this process."""
    code = _run(run_dir, experiment, words)
    assert code == 0, "\n".join(path.read_text()[-2000:] for path in (run_dir / "logs").glob("*.log"))
    return FinishedRun(run_dir)


def quickly_failed(run_dir: Path, experiment: str | Path, *words: str | Path) -> str:
    """The error of a run that begins and does not end well."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        assert _run(run_dir, experiment, words) == 1
    return said.getvalue()


def _run(run_dir: Path, experiment: str | Path, words: Iterable[str | Path]) -> int:
    launcher = ("--launcher", "tests.e2e.forked:ForkedLauncher")
    return cli.main(["run", str(experiment_file(experiment)), "--run-dir", str(run_dir), *map(str, words), *launcher])


def _environment(spec: ProcessSpec) -> dict[str, str]:
    own = {} if spec.index is None else {WORKER_INDEX_VARIABLE: str(spec.index), DEVICE_VARIABLE: f"cpu:{spec.index}"}
    return {**os.environ, **spec.env, **own, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@contextlib.contextmanager
def _environ(added: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(added)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _main(words: tuple[str, ...], log: str, environment: dict[str, str]) -> None:
    """In the child: becomes the process that the words name, as far as that goes without a new program."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = list(words)
    code = 1
    try:
        code = importlib.import_module(f"{words[0]}.__main__").main()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
