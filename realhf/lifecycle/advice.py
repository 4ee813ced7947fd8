"""The commands that a run names at its end: to open what it has trained, or to go on with it where it ended early."""

import os
import shlex
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path

from realhf.api.model_source import model_source
from realhf.architecture.hugging_face import write_config
from realhf.architecture.transformers_config import TransformersConfig
from realhf.base.errors import UserError
from realhf.base.options import flags
from realhf.data.inputs import ACCEPT
from realhf.experiments import ready_experiments
from realhf.launch.launcher import Launcher
from realhf.lifecycle.request import RecoveryRequest, ReplanRequest, RunRequest
from realhf.rundir.checkpoints import saved_steps, step_folder
from realhf.rundir.paths import RunDirectory
from realhf.rundir.run import Run


def going_on(run: Run, directory: RunDirectory, request: RunRequest, step: int) -> str:
    """Two lines for a run that ends early after `step` steps: what was saved, and the command that goes on."""
    saved = saved_steps(directory.checkpoints)
    if not saved:
        return f"nothing was saved: {_why_nothing(run, step)}\nstart anew with: {_new_command(request, directory)}"
    last = saved[-1]
    lost = f"; the steps after it, to step {step}, have to be made again" if step > last else ""
    what = f"saved: the checkpoint after step {last}, {short(step_folder(directory.checkpoints, last))}{lost}"
    return f"{what}\ngo on with: {resume_command(request, directory)}"


def export_command(directory: RunDirectory) -> str | None:
    """The command that makes a directory for transformers of what a run has trained; None where it is not clear which
    model that is, or transformers has none like it."""
    try:
        model = model_source(str(directory.path)).architecture
        if not isinstance(model, TransformersConfig):
            write_config(model, "float32")
    except UserError:
        return None
    return shlex.join(["realhf", "convert", short(directory.path), short(directory.path / "exported")])


def resume_command(request: RunRequest, directory: RunDirectory) -> str:
    """The command that goes on with the run in `directory`, with the options of the one that began it."""
    again, _ = split_words(request.words, not_kept(request.launcher))
    where = ("--run-dir", short(directory.path), "--resume")
    ready = (one.name for one in ready_experiments() if one.path == Path(request.experiment))
    return shlex.join(["realhf", "run", next(ready, request.experiment), *where, *again])


def not_kept(launcher: type[Launcher]) -> dict[str, bool]:
    """The options to be given again, as a run's directory does not keep them; with each, whether it takes a value."""
    own = dict.fromkeys(("--launcher", "--network-interface", "--evaluations", "--seconds"), True)
    found = own | flags(RecoveryRequest) | flags(ReplanRequest) | flags(launcher.options_type)
    del found[ACCEPT]  # each change is accepted by itself
    found.pop("--plan-in-job", None)  # it has been planned
    return found


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
    _, others = split_words(words, {"--run-dir": True})
    return shlex.join(["realhf", *others, "--run-dir", short(free)])


def split_words(words: Sequence[str], options: Mapping[str, bool]) -> tuple[list[str], list[str]]:
    """The words of these options with their values, and the other words. `options`: whether each takes a value."""
    chosen: list[str] = []
    others: list[str] = []
    is_value = False
    for word in words:
        name, equals, _ = word.partition("=")
        (chosen if is_value or name in options else others).append(word)
        is_value = not is_value and not equals and options.get(name, False)
    return chosen, others


def short(path: Path) -> str:
    """Relative to the working directory where that is shorter to read."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
