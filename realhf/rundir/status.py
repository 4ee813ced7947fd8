"""`status.json`: where a run stands, for the launcher and for people. `launcher/stop`: the request that it end."""

import contextlib
import time
from pathlib import Path
from typing import Literal

import msgspec

from realhf.base.errors import UserError
from realhf.base.files import BadContentError, decode_json, read_bytes, read_versioned, write_atomically
from realhf.rundir.lines import Step, Time

FORMAT = "run-status/1"

RunState = Literal["starting", "running", "done", "failed", "interrupted", "stopped", "requeued", "replan"]
EndReason = Literal["asked", "notice"]


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


class EndRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`launcher/stop`: asks a run to end after the steps that have begun, with a checkpoint.

    "asked": somebody wants it to end (`realhf stop`). "notice": its job is about to end, by preemption or its time
    limit; the batch script writes it. `goes_on`: the job starts once more by itself, and the run goes on from its
    checkpoint.
    """

    reason: EndReason
    goes_on: bool = False

    @property
    def in_words(self) -> str:
        return "as was asked" if self.reason == "asked" else "at the notice that its job was about to end"


def request_end(path: Path, request: EndRequest) -> None:
    """Asks for the end. Raises OSError where the file cannot be written."""
    write_atomically(path, msgspec.json.encode(request) + b"\n")


def requested_end(path: Path) -> EndRequest | None:
    """The request to end; None without one, and while the file cannot be read."""
    with contextlib.suppress(OSError):
        try:
            return decode_json(read_bytes(path), EndRequest)
        except BadContentError:
            return EndRequest(reason="asked")  # a file of this name is meant as a request, whatever it holds
    return None
