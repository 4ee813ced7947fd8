"""What a run that ends early has saved, and the command that goes on with it."""

import os
import shlex
from collections import deque
from collections.abc import Collection, Sequence
from itertools import count
from pathlib import Path

from realhf.launch.launcher import option_fields
from realhf.lifecycle.request import RunRequest
from realhf.rundir.checkpoints import saved_steps, step_folder
from realhf.rundir.paths import RunDirectory
from realhf.rundir.run import Run

# Options of `realhf run` that a run's directory does not keep: to go on, they are given again.
NOT_KEPT = (
    "--launcher",
    "--network-interface",
    "--recover",
    "--max-restarts",
    "--min-workers",
    "--fallback-plan",
    "--replan",
    "--switch-cost-s",
    "--evaluations",
    "--seconds",
    "--partition",
    "--account",
    "--time-limit",
    "--nodelist",
    "--cpu-only",
    "--sbatch",
    "--queue-timeout-s",
)
WITHOUT_VALUE = ("--cpu-only",)


def going_on(run: Run, directory: RunDirectory, request: RunRequest, step: int) -> str:
    """Two lines for a run that ends early after `step` steps: what was saved, and the command that goes on."""
    saved = saved_steps(directory.checkpoints)
    if not saved:
        return f"nothing was saved: {_why_nothing(run, step)}\nstart anew with: {_new_command(request, directory)}"
    last = saved[-1]
    lost = f"; the steps after it, to step {step}, have to be made again" if step > last else ""
    what = f"saved: the checkpoint after step {last}, {_short(step_folder(directory.checkpoints, last))}{lost}"
    return f"{what}\ngo on with: {resume_command(request, directory)}"


def resume_command(request: RunRequest, directory: RunDirectory) -> str:
    """The command that goes on with the run in `directory`, with the options of the one that began it."""
    options = [f"--{name.replace('_', '-')}" for name in option_fields(request.launcher)]
    not_kept, _ = _split(request.words, {*NOT_KEPT, *options})
    where = ("--run-dir", _short(directory.path), "--resume")
    return shlex.join(["realhf", "run", request.experiment, *where, *not_kept])


def _why_nothing(run: Run, step: int) -> str:
    every, minutes = run.spec.checkpoint_every_steps, run.spec.checkpoint_every_minutes
    first = min(every or run.experiment.steps, run.experiment.steps)
    if step >= first:
        return "no checkpoint has been written"
    if minutes:
        return f"the first checkpoint was due after {minutes:g} minutes"
    return f"no checkpoint was due before step {first}" + ("" if every else "; --checkpoint-every N saves on the way")


def _new_command(request: RunRequest, directory: RunDirectory) -> str:
    """The command as it was given, with another directory where it named one."""
    words = request.words or ("run", request.experiment, *request.fields)
    if request.run_dir is None:
        return shlex.join(["realhf", *words])
    path = directory.path
    free = next(other for n in count(2) if not (other := path.with_name(f"{path.name}-{n}")).exists())
    _, others = _split(words, ("--run-dir",))
    return shlex.join(["realhf", *others, "--run-dir", _short(free)])


def _split(words: Sequence[str], options: Collection[str]) -> tuple[list[str], list[str]]:
    """The words of these options with their values, and the other words."""
    chosen: list[str] = []
    others: list[str] = []
    left = deque(words)
    while left:
        word = left.popleft()
        name, equals, _ = word.partition("=")
        if name not in options:
            others.append(word)
            continue
        chosen.append(word)
        if not equals and name not in WITHOUT_VALUE and left:
            chosen.append(left.popleft())
    return chosen, others


def _short(path: Path) -> str:
    """Relative to the working directory where that is shorter to read."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
