"""`launcher/stop`: asks a run to end after the steps that have begun, with a checkpoint."""

import contextlib
from pathlib import Path
from typing import Literal

import msgspec

from realhf.base.files import BadContentError, decode_json, read_bytes, write_atomically

EndReason = Literal["asked", "notice"]


class EndRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why a run is to end. "asked": somebody did (`realhf stop`). "notice": its job is about to end, by preemption or
    its time limit; the batch script writes it.

    `goes_on`: the job starts once more by itself, and the run goes on from its checkpoint.
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
