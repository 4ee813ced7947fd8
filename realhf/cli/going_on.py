"""What a run that ends early leaves behind, and the command that goes on with it."""

import argparse
import os
import shlex
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from realhf.rundir.checkpoints import saved_steps, step_folder
from realhf.rundir.paths import RunDirectory
from realhf.rundir.run import Run

# Options of `realhf run` that a run's directory does not keep, with their defaults: to go on, they are given again.
NOT_KEPT: dict[str, Any] = {
    "launcher": "local",
    "network_interface": None,
    "recover": "never",
    "max_restarts": 3,
    "min_workers": None,
    "fallback_plan": [],
    "replan": "off",
    "switch_cost_s": None,
    "evaluations": None,
    "seconds": None,
    "partition": None,
    "account": None,
    "time_limit": None,
    "nodelist": None,
    "cpu_only": False,
    "sbatch": [],
    "queue_timeout_s": 86_400.0,
}


def going_on(run: Run, directory: RunDirectory, arguments: argparse.Namespace, step: int) -> str:
    """Two lines for a run that ends early after `step` steps: what was saved, and the command that goes on."""
    saved = saved_steps(directory.checkpoints)
    if not saved:
        return f"nothing was saved: {_why_nothing(run, step)}\nstart anew with: {_new_command(arguments, directory)}"
    last = saved[-1]
    lost = f"; the steps after it, to step {step}, have to be made again" if step > last else ""
    what = f"saved: the checkpoint after step {last}, {_short(step_folder(directory.checkpoints, last))}{lost}"
    return f"{what}\ngo on with: {resume_command(arguments, directory)}"


def resume_command(arguments: argparse.Namespace, directory: RunDirectory) -> str:
    """The command that goes on with the run in `directory`, with the options of the one that `arguments` are of."""
    words = ["realhf", "run", str(arguments.experiment), "--run-dir", _short(directory.path), "--resume"]
    for name, default in NOT_KEPT.items():
        value = getattr(arguments, name)
        if value != default:
            words += _option(f"--{name.replace('_', '-')}", value)
    return shlex.join(words)


def _option(option: str, value: Any) -> Iterator[str]:
    for one in value if isinstance(value, list) else [value]:
        if one is True:
            yield option
        elif str(one).startswith("-"):
            yield f"{option}={one}"
        else:
            yield from (option, str(one))


def _why_nothing(run: Run, step: int) -> str:
    every, minutes = run.spec.checkpoint_every_steps, run.spec.checkpoint_every_minutes
    first = min(every or run.experiment.steps, run.experiment.steps)
    if step >= first:
        return "no checkpoint has been written"
    if minutes:
        return f"the first checkpoint was due after {minutes:g} minutes"
    return f"no checkpoint was due before step {first}" + ("" if every else "; --checkpoint-every N saves on the way")


def _new_command(arguments: argparse.Namespace, directory: RunDirectory) -> str:
    """The command as it was given, with another directory where it named one."""
    words: Sequence[str] = arguments.words
    if arguments.run_dir is None:
        return shlex.join(["realhf", *words])
    path = directory.path
    free = next(other for n in count(2) if not (other := path.with_name(f"{path.name}-{n}")).exists())
    return shlex.join(["realhf", *_without(words, "--run-dir"), "--run-dir", _short(free)])


def _without(words: Sequence[str], option: str) -> Iterator[str]:
    is_value = False
    for word in words:
        if not is_value and word != option and not word.startswith(f"{option}="):
            yield word
        is_value = word == option


def _short(path: Path) -> str:
    """Relative to the working directory where that is shorter to read."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
