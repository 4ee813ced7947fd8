"""Says where a run stands: steps, speed, time left, reward and other statistics from the first steps to
the last, evaluations, what each process is doing, memory, checkpoints and restarts; for a SLURM job also its
state, why it waits, and its nodes. Reads the run directory: works from any machine that sees it, while the run goes on
and after it.

examples:
  realhf status runs/ppo-20260101-120000
  realhf status runs/ppo-20260101-120000 --samples
  watch -n 5 realhf status runs/ppo-20260101-120000
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from realhf.base.durations import duration
from realhf.base.errors import UserError
from realhf.base.files import decode_loose_json
from realhf.cli.output import Output, number_text, table_of, wide_output
from realhf.cli.trends import trends_table
from realhf.launch.slurm.state import job_state
from realhf.report.run_status import ENDED, FINISHED, RunStatus, read_run_status, run_now_s
from realhf.report.sample_texts import heading, shortened, with_ends
from realhf.rundir.paths import RunDirectory, workers_in_words
from realhf.rundir.samples import Sample, read_samples, title_of
from realhf.rundir.starts import is_to_be_planned, read_later, read_launched, start_refusal

MIB = 2**20
# How long SLURM may take to answer.
QUEUE_S = 10.0
SAMPLES, SAMPLE_CHARACTERS = 4, 2000


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the directory of a run, whatever its state")
    command.add_argument(
        "--samples", action="store_true", help="print the newest completions: prompt, response, reward"
    )
    command.add_argument("--json", action="store_true", help="print one JSON object: the fields of RunStatus")


def execute(arguments: argparse.Namespace) -> int:
    directory = RunDirectory(arguments.run_dir)
    status = read_run_status(directory, now_s=run_now_s(directory))
    damaged: list[str] = []
    samples = newest_samples(directory, damaged) if arguments.samples else []
    if arguments.json:
        content = msgspec.to_builtins(status) | ({"samples": samples} if arguments.samples else {})
        content |= {"job": job} if (job := job_line(directory)) else {}
        print(json.dumps(decode_loose_json(msgspec.json.encode(content))))  # ASCII: no character acts on a terminal
        return 0
    job = job_line(directory)
    out = wide_output()
    if arguments.samples:
        print_samples(samples, directory, out)
        out.say(*damaged)
        return 0
    lines = summary(status)
    out.print(lines[0], *([job] if job else []), *lines[1:], sep="\n", highlight=False, soft_wrap=True)
    for table in (trends_table(status.trends), evaluations_table(status), process_table(status)):
        if table.columns:
            out.print(table)
    return 0


def job_line(directory: RunDirectory) -> str:
    """The run's job as its cluster shows it: its state, why it waits, its nodes. "" for a run that is no job."""
    launched = read_launched(directory.launched)
    if launched is None or not launched.job:
        return ""
    if launched.launcher != "slurm":
        return f"job {launched.job} of the launcher {launched.launcher}"
    try:
        state, said = job_state(launched.job, timeout_s=QUEUE_S)
    except UserError:
        return f"job {launched.job} of SLURM, of which this machine has no commands"
    if state is None:
        return f"job {launched.job}: SLURM does not say how it is ({said})"
    nodes = f", on {state.nodes}" if state.nodes else ""
    restarts = f", started {state.restarts + 1} times" if state.restarts else ""
    reason = start_refusal(read_later(directory)) if state.is_over and is_to_be_planned(directory) else None
    return f"job {launched.job}: {state.in_words}{nodes}{restarts}" + (f"; {reason}" if reason else "")


def newest_samples(directory: RunDirectory, damaged: list[str]) -> list[Sample]:
    """The last samples of the run, the oldest first."""
    return [sample for step in read_samples(directory.samples, damaged) for sample in step.samples][-SAMPLES:]


def print_samples(samples: Sequence[Sample], directory: RunDirectory, out: Output) -> None:
    """Prints each with its prompt, response, reward and details, lines broken where the terminal ends."""
    if not samples:
        out.say(f"{directory.samples} has no samples; a run writes those that a call rewards, but for --samples 0")
    for sample in samples:
        out.rule(f"{title_of(sample)}, {heading(sample)}", align="left", style="dim", characters="─")
        for name, text in (("prompt", sample.prompt), ("response", sample.response), *sample.details.columns.items()):
            out.print(Text(f"{name}:", style="bold"))
            body = Text(with_ends(shortened(text, SAMPLE_CHARACTERS)), overflow="fold", no_wrap=False)
            out.print(Padding(body, (0, 0, 0, 2)), highlight=False)


def summary(status: RunStatus) -> list[str]:
    """The lines above the table."""
    workers = workers_in_words(status.num_workers) if status.num_workers else ""
    lines = [f"{status.path}: {', '.join(filter(None, (status.state, status.experiment, workers)))}"]
    progress = [f"step {status.step} of {status.steps}" if status.steps else f"step {status.step}"]
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
    if status.step and status.steps:  # a live program's cannot be executed again
        oldest = status.checkpoints[0] if status.checkpoints else status.step
        later = f", those after step {oldest} from a checkpoint" if oldest < status.step else ""
        lines.append(f"realhf verify: any of steps 1 to {status.step}, from the beginning{later}")
    if status.restarts:
        lines.append(f"restarts: {status.restarts}; last failure: {status.last_failure}")
    if status.uniform_rewards:
        lines.append(status.uniform_rewards)
    if status.message:
        lines.append(status.message.rstrip())
    return [*lines, *(f"damaged: {sentence}" for sentence in status.damaged)]


def evaluations_table(status: RunStatus) -> Table:
    """A row a statistic of the evaluations, a column for the first evaluation and for each of the last ones."""
    if not status.evaluations:
        return Table()
    table = table_of("", "evaluation after step", *(str(line["step"]) for line in status.evaluations))
    for name in dict.fromkeys(name for line in status.evaluations for name in line if name != "step"):
        table.add_row(Text(name), *(number_text(line.get(name)) for line in status.evaluations))
    return table


def process_table(status: RunStatus) -> Table:
    """A row a process: what it is doing (of a run that broke: what it did last), for how long, and its memory."""
    table = table_of("", "process")
    if status.memory_limit_bytes:
        table.caption, table.caption_justify = f" limit {status.memory_limit_bytes / MIB:,.0f} MiB", "left"
    with_activity = status.state != FINISHED  # there is none once all processes have ended well
    if with_activity:
        table.add_column("did last" if status.state in (*ENDED, "lost") else "is doing", overflow="fold")
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
