"""The checkpoints of a run: the state of the run that each has beside its models, and the newest good one.

`checkpoints/step-N/` holds `run.json` and a directory for every model that changes. It gets its name when all of it is
on the disk.
"""

import contextlib
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from realhf.base.errors import UserError
from realhf.base.files import (
    BadContentError,
    decode_versioned,
    delete,
    file_digest,
    read_bytes,
    sync_directory,
    write_atomically,
)
from realhf.models.checkpoint_index import INDEX_FILE, check_content, read_index
from realhf.rundir.weights import SavedWeights

FORMAT = "run-checkpoint/2"
STATE_FILE = "run.json"
LATEST = "latest"
DAMAGED = "damaged-"


class RunState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run after `step` steps, beside its models. No step is in flight then.

    `samples` of the data set have been read: the order of rows follows from it and the seed, as the random numbers of
    sampling follow from step and seed. `models` has the SHA-256 of every model's index, which has those of its files.
    `statistics` are the means of the last step and of the evaluation after it. `calls` has the numbers that calls keep
    from step to step, of those that keep any. `weights` has the newest known version of every model, frozen ones too,
    and `states` the optimizer states of those that are trained.
    `sha256` is of all other fields.
    """

    step: int
    seed: int
    samples: int
    num_workers: int
    plan_sha256: str
    optimizer_steps: dict[str, int]
    models: dict[str, str]
    statistics: dict[str, float] = {}
    calls: dict[str, dict[str, float]] = {}
    weights: dict[str, SavedWeights] = {}
    states: dict[str, SavedWeights] = {}
    sha256: str = ""
    format: str = FORMAT


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The newest good checkpoint, and by step why newer ones are not good."""

    state: RunState | None
    damaged: dict[int, str]


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step}"


def saved_steps(checkpoints: Path) -> list[int]:
    """The steps of all checkpoints, good or not, in order; none where there is no folder."""
    if not checkpoints.is_dir():
        return []
    names = (re.fullmatch(r"step-(0|[1-9][0-9]*)", path.name) for path in checkpoints.iterdir())
    return sorted(int(found[1]) for found in names if found)


def complete(part: Path, target: Path, state: RunState, models: Sequence[str]) -> None:
    """Gives the directory `part`, whose `models` are complete, its state with all digests, and the name `target`.

    `latest` points there afterwards.
    """
    digests = {name: file_digest(part / name / INDEX_FILE) for name in models}
    state = msgspec.structs.replace(state, models=digests)
    state = msgspec.structs.replace(state, sha256=_digest(state))
    write_atomically(part / STATE_FILE, msgspec.json.format(msgspec.json.encode(state)))
    sync_directory(part)
    part.rename(target)
    sync_directory(target.parent)
    _point_to(target.with_name(LATEST), target)


def check(checkpoint: Path) -> RunState:
    """The state of a checkpoint. Raises UserError naming the first file that is not as it was written."""
    try:
        state = read_state(checkpoint)
        for model, digest in state.models.items():
            index = checkpoint / model / INDEX_FILE
            if not index.is_file() or file_digest(index) != digest:
                raise UserError(
                    f"{index} is missing or has other content than when it was saved; use another checkpoint"
                )
            check_content(checkpoint / model, read_index(checkpoint / model))
    except OSError as error:
        raise UserError(
            f"{error.filename or checkpoint} cannot be read ({error.strerror}); use another checkpoint"
        ) from None
    return state


def newest_good(checkpoints: Path) -> Choice:
    """Reads from the newest checkpoint backwards until one is good."""
    damaged: dict[int, str] = {}
    for step in reversed(saved_steps(checkpoints)):
        try:
            return Choice(state=check(step_folder(checkpoints, step)), damaged=damaged)
        except UserError as error:
            damaged[step] = str(error)
    return Choice(state=None, damaged=damaged)


def tidy(checkpoints: Path, step: int) -> None:
    """Leaves no checkpoint after `step`, for a run that goes on from there and needs the names again.

    Later ones are kept as `damaged-step-N`; unfinished ones are removed.
    """
    remove_unfinished(checkpoints)
    for later in (found for found in saved_steps(checkpoints) if found > step):
        aside = checkpoints / f"{DAMAGED}step-{later}"
        delete(aside)
        step_folder(checkpoints, later).rename(aside)
    if step:
        _point_to(checkpoints / LATEST, step_folder(checkpoints, step))
    else:
        delete(checkpoints / LATEST)


def remove_unfinished(checkpoints: Path) -> None:
    """Removes checkpoints that were begun and never got their names; no process may write one."""
    for path in list(checkpoints.iterdir()):
        if path.name.startswith("."):
            delete(path)


def retain(checkpoints: Path, keep: int | None, best: str | None, also: int | None = None) -> None:
    """Removes all but the newest `keep` checkpoints (None: keeps all), the best one and that after `also` steps.

    `best` is a statistic whose highest value is the best, after "min:" the lowest.
    """
    steps = saved_steps(checkpoints)
    kept = set(steps if keep is None else steps[-keep:])
    if best is not None and kept != set(steps) and (found := _best(checkpoints, steps, best)) is not None:
        kept.add(found)
    for step in set(steps) - kept - {also}:
        aside = checkpoints / f".step-{step}.old"  # at no moment is there a part of one under its name
        step_folder(checkpoints, step).rename(aside)
        delete(aside)


def _best(checkpoints: Path, steps: list[int], best: str) -> int | None:
    name, sign = best.removeprefix("min:"), -1.0 if best.startswith("min:") else 1.0
    values: dict[int, float] = {}
    for step in steps:
        with contextlib.suppress(UserError, OSError):  # a damaged one is never the best, and must not end the run
            statistics = read_state(step_folder(checkpoints, step)).statistics
            if name in statistics:
                values[step] = sign * statistics[name]
    return max(values, key=lambda step: (values[step], step), default=None)


def read_state(checkpoint: Path) -> RunState:
    """`run.json`, if it is as it was written. Raises UserError, and OSError where it cannot be read."""
    path = checkpoint / STATE_FILE
    try:
        state = decode_versioned(read_bytes(path), RunState, FORMAT)
    except BadContentError as error:
        raise UserError(f"{path} is damaged, or another version's ({error}); use another checkpoint") from None
    if state.sha256 != _digest(state):
        raise UserError(f"{path} has other content than when it was saved; use another checkpoint")
    if checkpoint != step_folder(checkpoint.parent, state.step):
        raise UserError(f"{path} is of the checkpoint after step {state.step}; use another checkpoint")
    return state


def _digest(state: RunState) -> str:
    fields = msgspec.to_builtins(msgspec.structs.replace(state, sha256=""), order="deterministic")
    for name in ("calls", "weights", "states"):  # which older checkpoints do not have
        if not fields[name]:
            del fields[name]
    return hashlib.sha256(msgspec.json.encode(fields)).hexdigest()


def _point_to(link: Path, target: Path) -> None:
    """Makes `link` a relative symbolic link to its sibling `target`, atomically."""
    if link.is_dir() and not link.is_symlink():  # which no link replaces
        delete(link)
    part = link.with_name(f".{link.name}.part")
    part.unlink(missing_ok=True)
    part.symlink_to(target.name)
    part.replace(link)
