"""`realhf status`: how far a run is, how fast, and what each of its processes is doing."""

import argparse
import time
from pathlib import Path

import msgspec
from rich.table import Table
from rich.text import Text

from realhf.cli.output import duration, wide_output
from realhf.report.run_status import ENDED, FINISHED, RunStatus, read_run_status
from realhf.rundir.paths import RunDirectory, workers_in_words

DESCRIPTION = """Says where a run stands: steps, speed, time left, what each process is doing, memory, checkpoints and
restarts. Reads the run directory alone: works from any machine that sees it, while the run goes on and after it."""

EXAMPLE = """examples:
  realhf status runs/ppo-20260101-120000
  watch -n 5 realhf status runs/ppo-20260101-120000"""

MIB = 2**20


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the directory of a run, whatever its state")
    command.add_argument("--json", action="store_true", help="print one JSON object: the fields of RunStatus")


def execute(arguments: argparse.Namespace) -> int:
    status = read_run_status(RunDirectory(arguments.run_dir), now_s=time.time())
    if arguments.json:
        print(msgspec.json.encode(status).decode())
        return 0
    out = wide_output()
    out.print(*summary(status), sep="\n", highlight=False, markup=False, soft_wrap=True)
    out.print(process_table(status))
    return 0


def summary(status: RunStatus) -> list[str]:
    """What stands above the table."""
    workers = workers_in_words(status.num_workers) if status.num_workers else ""
    lines = [f"{status.path}: {', '.join(filter(None, (status.state, status.experiment, workers)))}"]
    progress = [f"step {status.step} of {status.steps}"]
    if status.speed:
        progress.append(f"{status.speed.step_s:.3g} s a step, {status.speed.tokens_per_s:,.0f} tokens/s")
    if status.remaining_s is not None:
        progress.append(f"about {duration(status.remaining_s)} left")
    lines.append("; ".join(progress))
    if status.silent_s is not None:
        lines.append(f"last sign of life {duration(status.silent_s)} ago")
    if status.state == "lost":
        go_on = "there is no checkpoint, start anew"
        if status.checkpoints:
            go_on = f"go on from the checkpoint after step {status.checkpoints[-1]} with --resume"
        lines.append(f"its processes are gone or hang: {go_on}")
    if status.checkpoints:
        age = f", {duration(status.checkpoint_age_s)} ago" if status.checkpoint_age_s is not None else ""
        lines.append(f"checkpoints: {len(status.checkpoints)}, the newest after step {status.checkpoints[-1]}{age}")
    if status.restarts:
        lines.append(f"restarts: {status.restarts}; last failure: {status.last_failure}")
    if status.message:
        lines.append(status.message.rstrip())
    return [*lines, *(f"damaged: {sentence}" for sentence in status.damaged)]


def process_table(status: RunStatus) -> Table:
    """A row a process: what it is doing (of a run that broke: what it did last), for how long, and its memory."""
    limit = f"limit {status.memory_limit_bytes / MIB:,.0f} MiB" if status.memory_limit_bytes else None
    table = Table(caption=limit, caption_justify="left")
    table.add_column("process")
    with_activity = status.state != FINISHED  # of processes that have ended well it tells nothing
    if with_activity:
        table.add_column("did last" if status.state in (*ENDED, "lost") else "is doing")
        table.add_column("since", justify="right")
    for column in ("memory in the last step", "predicted"):
        table.add_column(column, justify="right")
    for process in status.processes:
        since = "-" if process.since_s is None else duration(process.since_s)
        activity = (process.activity or "-", since) if with_activity else ()
        cells = (process.name, *activity, _mib(process.peak_bytes), _mib(process.predicted_bytes))
        table.add_row(*map(Text, cells))  # brackets in them are no markup
    return table


def _mib(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else f"{size_bytes / MIB:,.0f} MiB"
