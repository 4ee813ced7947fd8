"""`launcher/request.json`: the request of a run that its job has to plan, because the launching process has not."""

import os
from pathlib import Path

import msgspec

from realhf.base.errors import UserError
from realhf.base.files import read_versioned, write_atomically
from realhf.rundir.paths import RunDirectory
from realhf.rundir.status import known_status

FORMAT = "later-run/1"
_ENDS = {"failed": "failed", "stopped": "was stopped", "interrupted": "was interrupted"}


class LaterRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`words`: the command line of `realhf run`, given in `working_directory`. `after`: the directory of the run that
    has to end well before, "" for none."""

    words: tuple[str, ...]
    working_directory: str
    after: str = ""
    format: str = FORMAT


def write_later(directory: RunDirectory, words: tuple[str, ...], after: str) -> None:
    """Raises OSError naming the file."""
    value = LaterRun(words=words, working_directory=os.getcwd(), after=after)
    write_atomically(directory.request, msgspec.json.format(msgspec.json.encode(value)) + b"\n")


def read_later(directory: RunDirectory) -> LaterRun:
    """Raises UserError where the file is missing, damaged, or another version's."""
    found = read_versioned(directory.request, LaterRun, FORMAT)
    if found is None:
        raise UserError(f"{directory.request} is missing: no run was started here; begin one with another --run-dir")
    return found


def is_to_be_planned(directory: RunDirectory) -> bool:
    """Whether the run's job plans it, and has not done so yet."""
    return not directory.plan.exists() and directory.request.exists()


def start_refusal(run: LaterRun) -> tuple[str, int] | None:
    """Why a run may not begin: the one before it has not ended well. Also the exit code of that one."""
    if not run.after:
        return None
    status = known_status(RunDirectory(Path(run.after)).status)
    state = status.state if status else "gone"
    if state == "done":
        return None
    how = _ENDS.get(state, f"has not ended well: it is {state}")
    code = 130 if state in ("stopped", "interrupted") else status.returncode if status and state == "failed" else 1
    return f"not started, since the stage before, {run.after}, {how}", code
