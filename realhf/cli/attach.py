"""Shows a run that was started with --detach, or whose terminal is gone, as `realhf run` does, and ends
with the exit code that it would have. Ctrl-C ends the watching, not the run. If the launching process of a
SLURM job is gone, this takes its place: it cleans up after a failure, restarts with --recover auto, and writes the
report.

example:
  realhf attach runs/ppo-20260101-120000
"""

import argparse
import contextlib
import dataclasses
import os
import sys
import time
from pathlib import Path

from realhf.base.errors import RunError, UserError
from realhf.cli.progress import Progress, print_summary
from realhf.cli.request import request_of_words
from realhf.lifecycle.controller import LAUNCHER_LOCK
from realhf.lifecycle.interruption import Detached, Stopped
from realhf.lifecycle.queued import QueuedRun
from realhf.report.run_status import ENDED, FINISHED, RunStatus, read_run_status
from realhf.rundir.events import read_events
from realhf.rundir.paths import MASTER, RunDirectory
from realhf.rundir.run import load_run
from realhf.rundir.starts import is_to_be_planned, read_later, read_launched

POLL_S = 0.2


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the directory of a run")


def execute(arguments: argparse.Namespace) -> int:
    directory = RunDirectory.open(arguments.run_dir)
    began = time.monotonic()
    with Progress() as progress:
        try:
            _follow(directory, progress)
        except (Detached, KeyboardInterrupt):
            print("no longer attached; the run goes on", file=sys.stderr)
            return 130
    print_summary(directory, time.monotonic() - began)
    return 0


def _follow(directory: RunDirectory, progress: Progress) -> None:
    """Returns when the run has ended well. Raises Stopped or RunError where it has not."""
    is_shown = False
    while True:
        is_carried_out = directory.is_locked(LAUNCHER_LOCK)  # read first: the holder of the lock writes the last status
        status = read_run_status(directory, now_s=time.time())
        if not is_carried_out:
            if _adopts(directory, progress):
                return
            if status.state in (*ENDED, "lost"):
                progress.watched("")
                _tell_end(status)
                return
            is_new = status.state in ("not started", "starting") and not directory.launched.exists()
            if is_new and not directory.is_locked(MASTER):
                raise UserError(
                    f"no process of the run in {directory.path} has been started, and nobody is about to start one; "
                    "begin a new run with another --run-dir"
                )
        if not is_shown and status.state != "not started" and not is_to_be_planned(directory):
            progress.starting(load_run(directory), directory, None)
            is_shown = True
        progress.watched("")
        time.sleep(POLL_S)


def _adopts(directory: RunDirectory, progress: Progress) -> bool:
    """Carries out a job whose launching process is gone, to its end; False where there is none."""
    launched = read_launched(directory.launched)
    if launched is None or not launched.job or _is_ended(directory):
        return False
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(directory.lock(LAUNCHER_LOCK))
        except UserError:  # another process has just done so
            return False
        _enter_working_directory(directory)
        request = dataclasses.replace(request_of_words(launched.words), run_dir=directory.path, detached=False)
        QueuedRun(request, directory, launched.job).carry_out(progress, leaves=True)
    return True


def _enter_working_directory(directory: RunDirectory) -> None:
    """The command line of the run was given there."""
    if is_to_be_planned(directory):
        os.chdir(read_later(directory).working_directory)
    else:
        load_run(directory)


def _tell_end(status: RunStatus) -> None:
    if status.state in ("interrupted", "stopped"):
        raise Stopped(status.message or status.state)
    if status.state != FINISHED:
        text = status.message or f"the run is {status.state}; see `realhf status {status.path}`"
        raise RunError(text, returncode=status.returncode)


def _is_ended(directory: RunDirectory) -> bool:
    """Whether the process that carried the run out has noted its end."""
    events = [event.event for event in read_events(directory.events)]
    return bool(events) and events[-1] in ("ended", "failed", "interrupted", "stopped")
