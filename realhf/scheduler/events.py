"""`events.jsonl`: what happened to a run as a whole: starts, checkpoints, failures, restarts, other plans."""

import sys
import time
from pathlib import Path
from typing import Literal

import msgspec

EventKind = Literal[
    "started",
    "checkpoint",
    "unsaved",  # a checkpoint could not be written, and the run goes on
    "failed",
    "interrupted",
    "resumed",
    "restarted",
    "drift",  # calls do not take what was predicted
    "proposal",  # another plan was found, with measured times
    "replanned",  # the run goes on under another plan, or elsewhere
    "ended",
]


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One line. `step` is how many steps had been made; `time_s` is seconds since the epoch."""

    time_s: float
    event: EventKind
    step: int
    message: str = ""


def note(path: Path, event: EventKind, step: int, message: str = "") -> None:
    """Appends an event. A file that cannot be written must not end what it reports on: then it is only said."""
    line = msgspec.json.encode(Event(time_s=time.time(), event=event, step=step, message=message)) + b"\n"
    try:
        with path.open("ab", buffering=0) as file:
            file.write(line)
    except OSError as error:
        print(f"{path}: {error.strerror}; not noted: {line.decode().rstrip()}", file=sys.stderr)


def read_events(path: Path) -> list[Event]:
    """All events so far; [] where there is no file. A line that a crash cut off is left out."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    events = []
    for line in lines:
        try:
            events.append(msgspec.json.decode(line, type=Event))
        except msgspec.MsgspecError:
            continue
    return events
