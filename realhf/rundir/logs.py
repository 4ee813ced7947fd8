"""Log lines of master and workers: when, who, in which step and call, and what."""

import logging
import re
import sys
from collections.abc import Callable
from typing import IO, Any

# What a worker's activity says while it executes a request, such as "actor_generate of step 3: compute".
_REQUEST = re.compile(r"(?P<call>[^ ,]+) of (?P<batch>step|evaluation batch) (?P<number>\d+): \w+")


def start_logging(process: str, activity: Callable[[], str] = lambda: "", stream: IO[str] | None = None) -> None:
    """Sends all log records of this process, of level INFO and above, to `stream` (default: stderr).

    A line is `2026-01-31 12:00:00.123 INFO worker-3 step=7 call=actor_generate what happened`; what has no step or
    call leaves them out. Steps count from 1.

    Args:
        process: "master" or "worker-N".
        activity: what the process is doing, from which step and call are read for every record, whoever logs it.
            A record may bring its own (`at`).
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_LineFormatter(process, activity))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def at(step: int, call: str | None = None) -> dict[str, Any]:
    """For the argument `extra` of a logger: step (from 1) and call of one record."""
    return {"place": f"step={step} " + (f"call={call} " if call else "")}


def place_of(activity: str) -> str:
    """`step=7 call=actor_generate ` from what a worker is doing; empty where that is no request of a batch."""
    match = _REQUEST.fullmatch(activity)
    return f"{match['batch'].replace(' ', '_')}={match['number']} call={match['call']} " if match else ""


class _LineFormatter(logging.Formatter):
    def __init__(self, process: str, activity: Callable[[], str]):
        super().__init__(
            f"%(asctime)s.%(msecs)03d %(levelname)s {process} %(place)s%(message)s", datefmt="%Y-%m-%d %H:%M:%S"
        )
        self._activity = activity

    def format(self, record: logging.LogRecord) -> str:
        if not hasattr(record, "place"):
            record.place = place_of(self._activity())
        return super().format(record)
