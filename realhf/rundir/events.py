"""`events.jsonl`: the events of a run as a whole: starts, checkpoints, failures, restarts, other plans."""

import sys
import time
from pathlib import Path
from typing import Literal

import msgspec

from realhf.base.files import decode_json
from realhf.base.shown import visible
from realhf.rundir.lines import Step, Time, append_line, read_lines

EventKind = Literal[
    "started",
    "checkpoint",
    "unsaved",  # a checkpoint could not be written, and the run goes on
    "failed",
    "interrupted",
    "stopped",  # ended with a checkpoint, as was asked
    "requeued",  # its job has started once more
    "resumed",
    "restarted",
    "drift",  # times of calls differ from the prediction
    "uniform_rewards",  # they teach nothing
    "proposal",  # another plan was found, with measured times
    "replanned",  # the run goes on under another plan, or elsewhere
    "damaged",  # a file of the run was, and its unreadable part is gone
    "ended",
]


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One line. `step` is how many steps had been made; `time_s` is seconds since the epoch."""

    time_s: Time
    event: EventKind
    step: Step
    message: str = ""


def note(path: Path, event: EventKind, step: int, message: str = "") -> None:
    """Appends an event. If the file cannot be written, that is only printed: it must not end the run."""
    value = Event(time_s=time.time(), event=event, step=step, message=message)
    try:
        append_line(path, value)
    except OSError as error:
        line = msgspec.json.encode(value).decode()
        print(f"{path} cannot be written ({error.strerror}); not noted: {visible(line)}", file=sys.stderr)


def event_line(line: bytes) -> Event:
    """A line of `events.jsonl`. Raises BadContentError."""
    return decode_json(line, Event)


def read_events(path: Path) -> list[Event]:
    return read_lines(path, event_line).values
