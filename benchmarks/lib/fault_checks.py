"""What a run that was struck is held against: the run without a fault, and an empty machine."""

import contextlib
import json
import socket
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec
import psutil

from realhf.rundir.events import Event

MEASURED = {"calls", "time_s", "tokens_per_s", "peak_bytes"}


class Reference:
    """The run without a fault: its metrics but for times, and the bytes of its last checkpoint."""

    def __init__(self, run_dir: Path):
        self._metrics, self._parameters = _metrics(run_dir), _parameters(run_dir)
        assert self._parameters, "no checkpoint"

    def is_equalled_by(self, run_dir: Path, lost_steps: Collection[int] = ()) -> bool:
        """Bit for bit; of `lost_steps` the metrics were destroyed, and may be missing."""
        found = _metrics(run_dir)
        made = {line["step"] for line in found}
        expected = [line for line in self._metrics if line["step"] in made or line["step"] not in lost_steps]
        return found == expected and _parameters(run_dir) == self._parameters


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file that are JSON objects: read without the code that is put to the test."""
    found = []
    for line in path.read_bytes().split(b"\n") if path.exists() else ():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def read_events(run_dir: Path) -> list[Event]:
    return msgspec.convert(read_lines(run_dir / "events.jsonl"), list[Event])


def _metrics(run_dir: Path) -> list[dict]:
    return [
        {name: value for name, value in line.items() if name not in MEASURED}
        for line in read_lines(run_dir / "metrics.jsonl")
    ]


def _parameters(run_dir: Path) -> dict[str, bytes]:
    """Parameters and optimizer states of the last checkpoint, as they lie in its files."""
    latest = (run_dir / "checkpoints/latest").resolve()
    return {str(path.relative_to(latest)): path.read_bytes() for path in latest.glob("*/*.safetensors")}


def leaks(run_dir: Path, temporary: Path, shared_memory: Path | None) -> list[str]:
    """Processes, listening sockets, shared memory and unfinished files that a run has left; None is not looked at."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(str(run_dir) in word for word in process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"process {process.pid}: {' '.join(process.cmdline())}")
        except psutil.Error:
            continue
    address = run_dir / "rendezvous/master.json"
    if address.exists():
        host, _, port = json.loads(address.read_bytes())["address"].removeprefix("tcp://").rpartition(":")
        with socket.socket() as probe:
            if probe.connect_ex((host, int(port))) == 0:
                found.append(f"port {port}")
    for folder in (temporary, shared_memory):
        found += [str(path) for path in folder.iterdir()] if folder else []
    found += [str(path) for path in run_dir.rglob(".*")]
    found += [str(path) for path in run_dir.rglob("*.tmp")]
    return found
