"""`launcher/job.json`: the launcher and the job of a run's last start, for later commands."""

import os
import socket
from pathlib import Path

import msgspec

from realhf.base.files import read_versioned, write_atomically

FORMAT = "launched/1"


class Launched(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The last start of a run. `launcher`: as `--launcher` names it. `job`: the cluster's id of the job, "" without
    one. `words`: the command line that started the run last. `host`, `process`: where that ran."""

    launcher: str
    job: str = ""
    words: tuple[str, ...] = ()
    host: str = ""
    process: int = 0
    format: str = FORMAT


def write_launched(path: Path, launcher: str, job: str, words: tuple[str, ...]) -> None:
    """Raises OSError naming the file."""
    value = Launched(launcher=launcher, job=job, words=words, host=socket.gethostname(), process=os.getpid())
    write_atomically(path, msgspec.json.format(msgspec.json.encode(value)) + b"\n")


def read_launched(path: Path) -> Launched | None:
    """None before the first start. Raises UserError where the file is damaged, or another version's."""
    return read_versioned(path, Launched, FORMAT)
