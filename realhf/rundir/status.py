"""`status.json`: where a run stands, for the launcher and for people."""

import contextlib
import time
from pathlib import Path
from typing import Literal

import msgspec

from realhf.base.errors import UserError
from realhf.base.files import read_versioned, write_atomically
from realhf.rundir.lines import Step, Time

FORMAT = "run-status/1"

RunState = Literal["starting", "running", "done", "failed", "interrupted", "stopped", "requeued", "replan"]


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """`message` is the failure, and `blamed` are the workers that it blames.

    "replan": the run has ended after a checkpoint, to go on under another plan; "stopped": because somebody or a notice
    asked for its end; "requeued": so that its job starts once more. `returncode`: the exit code of the launching
    process of a failed run.
    """

    state: RunState
    step: Step
    steps: Step
    message: str = ""
    blamed: tuple[int, ...] = ()
    returncode: int = 1
    updated: Time = 0.0
    format: str = FORMAT


def write_status(path: Path, status: Status) -> None:
    write_atomically(path, msgspec.json.encode(msgspec.structs.replace(status, updated=time.time())) + b"\n")


def read_status(path: Path) -> Status | None:
    """The status, None before the first one. Raises UserError where the file is damaged, or another version's."""
    return read_versioned(path, Status, FORMAT)


def known_status(path: Path) -> Status | None:
    """The status, None too where the file is damaged: the next one replaces it."""
    with contextlib.suppress(UserError):
        return read_status(path)
    return None
