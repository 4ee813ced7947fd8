"""How fast a shared machine is at the moment: a probe on every core, a millisecond of work twenty times a second.

Neighbours on the same host slow a virtual machine by half and more, for seconds or minutes, and no counter of the
guest shows it. What is predicted from timings of one moment and measured at another is compared at equal speed.
"""

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

PERIOD_S = 0.05
ITERATIONS = 15_000

_PROBE = f"""
import os, sys, time
os.sched_setaffinity(0, {{int(sys.argv[1])}})
with open(sys.argv[2], "w", buffering=1) as file:
    while os.getppid() != 1:
        start, total = time.process_time(), 0
        for i in range({ITERATIONS}):
            total += i
        print(time.time(), time.process_time() - start, file=file)
        time.sleep({PERIOD_S})
"""


class Speed:
    """The readings of all cores so far."""

    def __init__(self, files: list[Path]):
        self._files = files

    def slowness(self, start: float, end: float) -> float:
        """Mean seconds of the probe's work between two times of the clock (`time.time`)."""
        readings = [reading for file in self._files for reading in _readings(file) if start <= reading[0] <= end]
        assert readings, f"no reading within {end - start:.2f} s"
        return statistics.mean(seconds for _, seconds in readings)


@contextmanager
def speed_probes() -> Iterator[Speed]:
    """Probes that run until the end of the block."""
    cores = sorted(os.sched_getaffinity(0))
    with TemporaryDirectory() as folder:
        files = [Path(folder) / str(core) for core in cores]
        probes = [
            subprocess.Popen([sys.executable, "-c", _PROBE, str(core), str(file)])
            for core, file in zip(cores, files, strict=True)
        ]
        try:
            yield Speed(files)
        finally:
            for probe in probes:
                probe.kill()
                probe.wait()


def _readings(file: Path) -> list[tuple[float, float]]:
    """(when, seconds of processor time) of every whole line."""
    lines = file.read_text().split("\n")[:-1] if file.is_file() else []
    return [(float(when), float(seconds)) for when, seconds in (line.split() for line in lines)]
