"""`status.json`: where a run stands, for the launcher and for people."""

import contextlib
import time
from pathlib import Path
from typing import Literal

import msgspec

from realhf.base.errors import UserError
from realhf.base.files import BadContentError, decode_versioned, write_atomically
from realhf.rundir.lines import Step, Time

FORMAT = "run-status/1"

RunState = Literal["starting", "running", "done", "failed", "interrupted", "replan"]


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """`message` says what went wrong, and `blamed` are the workers that it blames.

    "replan": the run has ended after a checkpoint, to go on under another plan.
    """

    state: RunState
    step: Step
    steps: Step
    message: str = ""
    blamed: tuple[int, ...] = ()
    updated: Time = 0.0
    format: str = FORMAT


def write_status(path: Path, status: Status) -> None:
    write_atomically(path, msgspec.json.encode(msgspec.structs.replace(status, updated=time.time())) + b"\n")


def read_status(path: Path) -> Status | None:
    """The status, None before the first one. Raises UserError where the file is damaged, or another version's."""
    try:
        return decode_versioned(path.read_bytes(), Status, FORMAT)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); remove it") from None
    except BadContentError as error:
        raise UserError(f"{path} is damaged ({error}); remove it") from None


def known_status(path: Path) -> Status | None:
    """The status, None too where the file is damaged: the next one replaces it."""
    with contextlib.suppress(UserError):
        return read_status(path)
    return None
