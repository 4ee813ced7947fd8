"""`status.json`: where a run stands, for the launcher and for people."""

import time
from pathlib import Path
from typing import Literal

import msgspec

from realhf.api.files import write_atomically

RunState = Literal["starting", "running", "done", "failed", "interrupted", "replan"]


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """`status.json`: where the run stands. `message` says what went wrong, if something did, and
    `blamed` are the workers that it blames. "replan": it has ended after a checkpoint, to go on under another plan."""

    state: RunState
    step: int
    steps: int
    message: str = ""
    blamed: tuple[int, ...] = ()
    updated: float = 0.0


def write_status(path: Path, status: Status) -> None:
    write_atomically(path, msgspec.json.encode(msgspec.structs.replace(status, updated=time.time())) + b"\n")


def read_status(path: Path) -> Status | None:
    """The status, or None before the first one was written."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Status)
    except FileNotFoundError:
        return None
