"""The starts of a run: the id of each, the launcher and the job of the last, the request of one whose job plans it.

The id tells leftover processes of an earlier start from those of the present one: a partition, a slow node or a shared
file system may keep a process of an earlier start alive, or bring it up late.
"""

import os
import secrets
import socket
from pathlib import Path

import msgspec

from realhf.base.errors import RunError, UserError
from realhf.base.files import read_text, read_versioned, write_atomically
from realhf.rundir.paths import RunDirectory
from realhf.rundir.status import known_status

LAUNCHED_FORMAT = "launched/1"
LATER_FORMAT = "later-run/1"
_ENDS = {"failed": "failed", "stopped": "was stopped", "interrupted": "was interrupted"}
# Gives each process the id of its start.
START_VARIABLE = "REALHF_START_ID"


class StaleStartError(RunError):
    """A process belongs to an earlier start of its run: it has to end, and to write nothing more."""


def begin_start(directory: RunDirectory) -> None:
    """Gives the run's next start an id. From now on processes of earlier starts are stale."""
    write_atomically(directory.start, f"{secrets.token_hex(4)}\n".encode())


def current_start(directory: RunDirectory) -> str:
    """The id of the run's newest start; "" where none is known."""
    try:
        return read_text(directory.start).strip()
    except (OSError, UnicodeDecodeError):
        return ""


def own_start() -> str:
    """The id of the start that this process belongs to; "" where it has none."""
    return os.environ.get(START_VARIABLE, "")


def check_start(directory: RunDirectory, start_id: str) -> None:
    """Raises StaleStartError for an id of an earlier start; where nothing is known of starts, it is the present one."""
    current = current_start(directory)
    if current and start_id and start_id != current:
        raise StaleStartError(
            f"this process belongs to start {start_id} of the run in {directory.path}, which goes on with start "
            f"{current}: it ends, and leaves the run alone"
        )


class Launched(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`launcher/job.json`: the last start of a run, for later commands.

    `launcher`: as `--launcher` names it. `job`: the cluster's id of the job, "" without one. `words`: the command line
    that started the run last. `host`, `process`: where that ran.
    """

    launcher: str
    job: str = ""
    words: tuple[str, ...] = ()
    host: str = ""
    process: int = 0
    format: str = LAUNCHED_FORMAT


def write_launched(path: Path, launcher: str, job: str, words: tuple[str, ...]) -> None:
    """Raises OSError naming the file."""
    value = Launched(launcher=launcher, job=job, words=words, host=socket.gethostname(), process=os.getpid())
    write_atomically(path, msgspec.json.format(msgspec.json.encode(value)) + b"\n")


def read_launched(path: Path) -> Launched | None:
    """None before the first start. Raises UserError where the file is damaged, or another version's."""
    return read_versioned(path, Launched, LAUNCHED_FORMAT)


class LaterRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`launcher/request.json`: the request of a run that its job plans.

    `words`: the command line of `realhf run`, given in `working_directory`. `after`: the directory of the run that has
    to end well before, "" for none.
    """

    words: tuple[str, ...]
    working_directory: str
    after: str = ""
    format: str = LATER_FORMAT


def write_later(directory: RunDirectory, words: tuple[str, ...], after: str) -> None:
    """Raises OSError naming the file."""
    value = LaterRun(words=words, working_directory=os.getcwd(), after=after)
    write_atomically(directory.request, msgspec.json.format(msgspec.json.encode(value)) + b"\n")


def read_later(directory: RunDirectory) -> LaterRun:
    """Raises UserError where the file is missing, damaged, or another version's."""
    found = read_versioned(directory.request, LaterRun, LATER_FORMAT)
    if found is None:
        raise UserError(f"{directory.request} is missing: no run was started here; begin one with another --run-dir")
    return found


def is_to_be_planned(directory: RunDirectory) -> bool:
    """Whether the run's job plans it, and has not done so yet."""
    return not directory.plan.exists() and directory.request.exists()


def start_refusal(run: LaterRun) -> RunError | None:
    """Why a run may not begin: the one before it has not ended well. The exit code is that one's."""
    if not run.after:
        return None
    status = known_status(RunDirectory(Path(run.after)).status)
    state = status.state if status else "gone"
    if state == "done":
        return None
    how = _ENDS.get(state, f"has not ended well: it is {state}")
    code = 130 if state in ("stopped", "interrupted") else status.returncode if status and state == "failed" else 1
    return RunError(f"not started, since the stage before, {run.after}, {how}", returncode=code)
