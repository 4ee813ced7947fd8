"""Processes as the kernel shows them: who is alive, and who descends from whom."""

import contextlib
import glob
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessState:
    """A living process. The start time (in clock ticks) tells it from a later one with its number."""

    parent: int
    start_ticks: int


def process_state(pid: int) -> ProcessState | None:
    """None for a process that has ended, reaped or not."""
    # The second field is the program's name in parentheses and may hold anything.
    fields = read_text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    if not fields or fields[0] == "Z":
        return None
    return ProcessState(parent=int(fields[1]), start_ticks=int(fields[19]))


def descendants(pid: int) -> list[int]:
    """All below `pid`, nearest first."""
    children = [
        int(child)
        for listing in glob.glob(f"/proc/{pid}/task/*/children")
        for child in read_text(Path(listing)).split()
    ]
    return children + [below for child in children for below in descendants(child)]


def read_text(path: Path) -> str:
    """What the file holds, nothing if it cannot be read."""
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")
    return ""


def write_text(path: Path, text: str, *, mode: int = 0o644) -> None:
    path.touch(mode=mode)
    path.write_text(text)
