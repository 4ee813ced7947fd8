"""Log lines of master and workers: when, who, in which step and call, and what."""

import contextlib
import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any

from realhf.base.files import open_regular
from realhf.base.shown import visible

# A worker's activity while it executes a request, such as "actor_generate of step 3: compute".
_REQUEST = re.compile(r"(?P<call>[^ ,]+) of (?P<batch>step|evaluation\S* batch) (?P<number>\d+): \w+")


def start_logging(process: str, activity: Callable[[], str] = lambda: "", stream: IO[str] | None = None) -> None:
    """Sends all log records of this process, of level INFO and above, to `stream` (default: stderr).

    A line is `2026-01-31 12:00:00.123 INFO worker-3 step=7 call=actor_generate what happened`, with step (from 1) and
    call where there are any. They are read from `activity`, which says what the process is doing, unless a thread
    (`doing`) or a record (`at`) says its own.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_LineFormatter(process, activity))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


# The process whose code runs, where master and worker share one. A thread begins with the default, so those of the
# worker have it; the master's thread is given its own.
_PROCESS: ContextVar[str] = ContextVar("process", default="worker-0")


@contextlib.contextmanager
def logging_to(path: Path, process: str, activity: Callable[[], str] = lambda: "") -> Iterator[None]:
    """Inside, records of one of several `processes` in this one are appended to `path`, as `start_logging` writes them:
    those of the present context (`contextvars`), for the worker also those of any other thread."""
    root = logging.getLogger()
    with open_regular(path, "a") as file:
        handler = logging.StreamHandler(file)
        handler.setFormatter(_LineFormatter(process, activity))
        handler.addFilter(lambda _: _PROCESS.get() == process)
        _PROCESS.set(process)
        root.addHandler(handler)
        try:
            yield
        finally:
            root.removeHandler(handler)


# The activity of the running thread, where it is not that of the process.
_ACTIVITY: ContextVar[str] = ContextVar("activity", default="")


@contextlib.contextmanager
def doing(activity: str) -> Iterator[None]:
    """Inside, records of the present thread are of `activity`, such as "score of step 3: beside"."""
    before = _ACTIVITY.set(activity)
    try:
        yield
    finally:
        _ACTIVITY.reset(before)


def at(step: int, call: str | None = None) -> dict[str, Any]:
    """A logger's `extra`: step (from 1) and call of one record."""
    return {"place": f"step={step} " + (f"call={call} " if call else "")}


def place_of(activity: str) -> str:
    """`step=7 call=actor_generate `; empty where the activity is no request of a batch."""
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
            record.place = place_of(_ACTIVITY.get() or self._activity())
        return visible(super().format(record))  # a message may quote a response, or a file
