"""`inputs.json`: the files that a run reads from outside its directory, by their digests. A run goes on with the inputs
it began with. No torch here."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec

from realhf.base.digest import known_digest
from realhf.base.errors import UserError
from realhf.base.files import read_versioned, write_atomically, writing_a_run
from realhf.data.files.opening import data_files
from realhf.data.merged import MergedDataset
from realhf.data.recorded import step_folder
from realhf.data.text_dataset import TextDataset
from realhf.data.tokenizer import tokenizer_files
from realhf.models.hugging_face_files import checkpoint_files
from realhf.rundir.paths import RunDirectory
from realhf.rundir.run import Run

FORMAT = "inputs/1"
ACCEPT = "--accept-changed-inputs"
_SHOWN = 3  # files with changes, in a message


class InputFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file as it was read: its size, and the digest of its content (`realhf.base.digest`)."""

    size_bytes: int
    digest: str


Files = dict[str, InputFile]  # by path, as the experiment gives it


class Inputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The files that a run reads, by purpose ("data set")."""

    files: dict[str, Files]
    format: str = FORMAT


def keep_inputs(run: Run, directory: RunDirectory, *, anew: bool = False) -> None:
    """Notes the inputs of this start of the run that are not noted yet; `anew` replaces earlier notes.

    Raises UserError if a file cannot be read, RunError if the note cannot be written.
    """
    noted = _noted(directory)
    found = inputs_of(run)
    with writing_a_run():
        content = msgspec.json.encode(Inputs(files=noted | found if anew else found | noted))
        write_atomically(directory.inputs, msgspec.json.format(content, indent=2) + b"\n")


def check_inputs(run: Run, directory: RunDirectory) -> None:
    """Raises UserError if this start would read other inputs than the run began with. Inputs that were not noted
    pass."""
    noted = _noted(directory)
    if not noted:  # an older version made the run
        return
    for what, files in inputs_of(run).items():
        if what not in noted or files == noted[what]:
            continue
        changes = list(_changes(noted[what], files))
        more = f", and {len(changes) - _SHOWN} more" if len(changes) > _SHOWN else ""
        raise UserError(
            f"the {what} of the run in {directory.path} has changed since the run began: "
            f"{', '.join(changes[:_SHOWN])}{more}; put it back, or start a new run with another --run-dir "
            f"(--resume {ACCEPT} resumes with the present files)"
        )


def inputs_of(run: Run) -> dict[str, Files]:
    """By purpose, the files that a start of the run reads, without the checkpoints of models that come from the run's
    own, and without rollouts of finished steps. Raises UserError if a file cannot be read."""
    found: dict[str, Files] = {}
    try:
        for what, paths, digest in _read(run):
            of_kind = found.setdefault(what, {})
            for path in paths:
                of_kind[str(path)] = InputFile(size_bytes=path.stat().st_size, digest=digest(path))
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read ({error.strerror}); put it back") from None
    return found


def _read(run: Run) -> Iterator[tuple[str, list[Path], Callable[[Path], str]]]:
    sets = [("data set", run.experiment.dataset)]
    sets += [(f"{split}'s data set", one.dataset) for split, one in run.experiment.evaluations.items()]
    for what, dataset in sets:
        assert isinstance(dataset, TextDataset | MergedDataset), "workers read no other"
        for part in dataset.parts:
            yield what, data_files(part.path), known_digest
            yield f"tokenizer of the {what}", tokenizer_files(part.tokenizer, part.chat_template), known_digest
    for graph in run.experiment.graphs.values():
        for call in graph.calls.values():
            if call.interface_impl.read_files:
                yield f"code of {call.name}", list(map(Path, call.interface_impl.read_files)), known_digest
    for name, setup in run.experiment.setups.items():
        if setup.checkpoint is not None and not (run.spec.resume_step and name in run.changing_models):
            yield f"checkpoint of model {name}", checkpoint_files(setup.checkpoint), partial(known_digest, sampled=True)
    if run.spec.replay:
        for step in range(run.spec.resume_step, run.experiment.steps):
            folder = step_folder(Path(run.spec.replay), step)
            yield f"replayed step {step + 1}", sorted(folder.glob("*.safetensors")), known_digest


def _changes(before: Files, now: Files) -> Iterator[str]:
    for path in sorted(before.keys() | now.keys()):
        if path not in now:
            yield f"{path} is gone"
        elif path not in before:
            yield f"{path} is new"
        elif before[path] != now[path]:
            old, new = before[path].size_bytes, now[path].size_bytes
            sizes = f"{new:,} bytes, not {old:,}" if new != old else f"still {new:,} bytes"
            yield f"{path} has other content ({sizes})"


def _noted(directory: RunDirectory) -> dict[str, Files]:
    found = read_versioned(directory.inputs, Inputs, FORMAT)
    return found.files if found else {}
