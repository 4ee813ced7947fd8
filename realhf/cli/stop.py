"""Asks a run to end: the steps that have begun are ended, a checkpoint is written, and all processes end.
Works from any machine that sees the run directory, for local runs and for SLURM jobs. `realhf run ... --resume` goes on
from there.

examples:
  realhf stop runs/ppo-20260101-120000
  realhf stop runs/ppo-20260101-120000 --wait-s 0
"""

import argparse
import time
from pathlib import Path

from realhf.base.durations import YEAR_S, duration
from realhf.base.errors import RunError, UserError
from realhf.base.files import writing_a_run
from realhf.base.numbers import check_range
from realhf.cli.output import wide_output
from realhf.launch.slurm.commands import slurm_command
from realhf.launch.slurm.state import job_state
from realhf.lifecycle.controller import LAUNCHER_LOCK, note_end
from realhf.report.run_status import ENDED, RunStatus, read_run_status
from realhf.rundir.paths import MASTER, RunDirectory
from realhf.rundir.starts import is_to_be_planned, read_launched
from realhf.rundir.status import EndRequest, request_end

POLL_S = 0.2


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the directory of a run that goes on")
    command.add_argument(
        "--wait-s",
        type=float,
        default=600.0,
        metavar="S",
        help="how long to wait for the end (default 600; 0: only ask)",
    )


def execute(arguments: argparse.Namespace) -> int:
    check_range("--wait-s", arguments.wait_s, 0, YEAR_S, "seconds")
    directory, out = RunDirectory.open(arguments.run_dir), wide_output()
    status = _status(directory)
    if status.state in (*ENDED, "not started"):
        raise UserError(f"the run in {directory.path} does not go on: it is {status.state}; there is nothing to stop")
    if status.state == "lost":
        raise UserError(f"the processes of the run in {directory.path} are gone or hang; `realhf status` says more")
    with writing_a_run():
        request_end(directory.stop, EndRequest(reason="asked"))
    _end_waiting_job(directory, status.steps)
    if not arguments.wait_s:
        out.say(f"asked the run in {directory.path} to end after the steps that have begun")
        return 0
    deadline = time.monotonic() + arguments.wait_s
    while (status := _status(directory)).state not in ENDED:
        if status.state == "lost" or time.monotonic() > deadline:
            raise RunError(
                f"the run in {directory.path} did not end within {duration(arguments.wait_s)}: it is {status.state}, "
                f"at step {status.step}. It ends when the steps that have begun have ended; Ctrl-C in its terminal or "
                "scancel end it at once"
            )
        time.sleep(POLL_S)
    for holder in (LAUNCHER_LOCK, MASTER):  # so that the run can be resumed at once
        with directory.lock(holder, wait_s=max(0.0, deadline - time.monotonic())):
            pass
    saved = (
        f"the last checkpoint is that after step {status.checkpoints[-1]}" if status.checkpoints else "nothing saved"
    )
    out.say(f"{status.state} after step {status.step} of {status.steps}; {saved}")
    return 0


def _end_waiting_job(directory: RunDirectory, steps: int) -> None:
    """Takes the run's job out of SLURM's queue if it waits there; a launching process that lives does so itself."""
    launched = read_launched(directory.launched)
    if launched is None or launched.launcher != "slurm" or directory.is_locked(LAUNCHER_LOCK):
        return
    state, _ = job_state(launched.job)
    was_waiting = state is not None and state.is_waiting
    if was_waiting:
        # With --state SLURM 22.05 would cancel all waiting tasks of an array.
        only_waiting = () if "_" in launched.job else ("--state=PENDING",)
        slurm_command("scancel", *only_waiting, launched.job)
        state, _ = job_state(launched.job)
    # It has not begun in this moment; or it never will, since the job that it waits for has failed.
    if state is not None and state.is_over and (was_waiting or is_to_be_planned(directory)):
        note_end(directory, steps)


def _status(directory: RunDirectory) -> RunStatus:
    return read_run_status(directory, now_s=time.time())
