"""From the words of a command line to an experiment."""

from collections.abc import Sequence
from typing import Any

import tyro

from realhf.base.errors import UserError
from realhf.rundir.run import RunSpec, load_experiment_class, saved_experiment


def experiment_of(path: str, words: Sequence[str] = (), saved: RunSpec | None = None) -> Any:
    """The experiment of a file, its fields set from `--field value` words, else as in a `saved` run or by default.

    Raises:
        UserError: the file has no such class, or `saved` is of another one.
        SystemExit: a word is wrong, which is explained on stderr (code 2); `--fields` has listed all fields (0).
    """
    cls = load_experiment_class(path)
    prog = f"realhf COMMAND {path}"
    if "--fields" in words:
        tyro.cli(cls, args=["--help"], prog=prog, config=(tyro.conf.AvoidSubcommands,))
    if saved is not None and cls.__name__ != saved.experiment_class:
        raise UserError(
            f"{path} has the experiment {cls.__name__}, the run is one of {saved.experiment_class} in "
            f"{saved.experiment_file}; give that file"
        )
    start = {} if saved is None else {"default": saved_experiment(saved, cls, path)}
    return tyro.cli(cls, args=list(words), prog=prog, config=(tyro.conf.AvoidSubcommands,), add_help=False, **start)
