"""Makes a run directory ready for a start of its processes: the first one, or one that goes on from a checkpoint."""

import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from realhf.base.files import delete, replacing, write_atomically, writing_a_run
from realhf.base.shown import visible
from realhf.dataflow.plan import digest_in, plan_digest, save_plan
from realhf.rundir import checkpoints
from realhf.rundir.calls_file import round_line
from realhf.rundir.events import note
from realhf.rundir.lines import evaluation_line, read_lines, step_line
from realhf.rundir.outputs import outputs_line
from realhf.rundir.paths import RunDirectory
from realhf.rundir.run import Run
from realhf.rundir.samples import sample_line
from realhf.rundir.starts import begin_start, current_start
from realhf.rundir.status import Status, write_status
from realhf.transport.keys import make_run_keys


@writing_a_run()
def prepare(run: Run, directory: RunDirectory) -> None:
    """Leaves the directory as the run had it after `run.spec.resume_step` steps, with a new start id and new keys.

    Metrics, evaluations, samples, outputs, rollouts and a program's records of later steps go. Earlier traces stay as
    trace-1.json, trace-2.json, earlier plans as plan-1.json and so on, the logs of earlier starts in folders of their
    ids. The caller holds the directory's lock. Raises RunError if a file cannot be written.
    """
    step = run.spec.resume_step
    checkpoints.remove_unfinished(directory.checkpoints)  # on a full disk this makes room
    _put_logs_aside(directory)
    begin_start(directory)  # before there are new keys: who finds his start unchanged after reading keys has his own
    checkpoints.tidy(directory.checkpoints, step)
    for path, step_of in (
        (directory.metrics, lambda line: step_line(line)["step"]),
        (directory.evaluations, lambda line: evaluation_line(line)["step"]),
        (directory.samples, lambda line: sample_line(line).step),
        (directory.outputs, lambda line: outputs_line(line).step),
        (directory.rounds, lambda line: round_line(line).round + 1),
    ):
        for damaged in _keep_lines_up_to(path, step_of, step):
            note(directory.events, "damaged", step, damaged)
            print(visible(damaged), file=sys.stderr)
    for folder in (directory.rollouts, directory.values):
        for later in (found for found in checkpoints.saved_steps(folder) if found > step):
            delete(checkpoints.step_folder(folder, later))
    if directory.trace.exists():
        directory.trace.rename(_next_name(directory.trace))
    for folder in (directory.keys, directory.rendezvous, directory.activity("master").parent):
        for path in folder.iterdir():
            delete(path)
    for path in (
        directory.stop,
        directory.switch,
        *directory.path.glob(".*.part"),
    ):  # and what a crash left half-written
        delete(path)
    write_atomically(directory.experiment, msgspec.json.format(msgspec.json.encode(run.spec), indent=2) + b"\n")
    if directory.plan.exists() and digest_in(directory.plan) != plan_digest(run.plan):
        directory.plan.rename(_next_name(directory.plan))
    write_status(directory.status, Status(state="starting", step=step, steps=run.planned_steps))
    save_plan(run.plan, directory.plan)
    make_run_keys(directory.keys, num_workers=run.spec.num_workers)


def _put_logs_aside(directory: RunDirectory) -> None:
    """Moves the logs of the start before, so that its leftover processes do not write into those of the next."""
    logs = [path for path in directory.logs.iterdir() if path.is_file()]
    folder = directory.logs / (current_start(directory) or "earlier")
    if logs:
        folder.mkdir(exist_ok=True)
    for path in logs:
        path.replace(folder / path.name)


def _next_name(path: Path) -> Path:
    """trace.json -> trace-3.json, if there are two already."""
    return path.with_stem(f"{path.stem}-{1 + len(list(path.parent.glob(f'{path.stem}-*{path.suffix}')))}")


def _keep_lines_up_to(path: Path, step_of: Callable[[bytes], int], step: int) -> tuple[str, ...]:
    """Drops the lines of later steps from a JSON lines file, and damaged ones; says which these are."""
    if not path.exists():
        return ()
    with replacing(path) as file:  # line by line: the file of a long run is large

        def keep(line: bytes) -> None:
            if step_of(line) <= step:
                file.write(line + b"\n")

        return read_lines(path, keep).damaged
