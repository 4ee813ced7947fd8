"""The starts of a run's processes. Each has an id, which tells leftover processes of an earlier start from those of the
present one.

A partition, a slow node or a shared file system may keep a process of an earlier start alive, or bring it up late.
"""

import os
import secrets

from realhf.base.errors import RunError
from realhf.base.files import read_text, write_atomically
from realhf.rundir.paths import RunDirectory

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
