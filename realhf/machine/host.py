"""The cores and the memory that a process may use: those of the machine, within the limits set for the process."""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

import psutil

ROOT = Path("/")


@dataclass(frozen=True, kw_only=True)
class Host:
    """The cores and the memory that this process may use.

    `cores_limit` and `memory_limit` name the limit if the machine has more: "the affinity of this process", or the file
    of a control group.
    """

    cores: int
    memory_bytes: int
    cores_limit: str = ""
    memory_limit: str = ""


def threads_given(environ: Mapping[str, str] = os.environ) -> int | None:
    """The threads of a process by OMP_NUM_THREADS, which may be empty, or a list; None where it says nothing."""
    given = environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(given) if given.isdecimal() and int(given) else None


# A limit, and its name.
_Limit = tuple[float, str]


def read_host(root: Path = ROOT) -> Host:
    """Reads the limits of this process.

    Cores: the affinity, or the smallest processor quota of a control group, rounded down, at least 1. Memory: the
    machine's, or the smallest limit of a control group.

    `root` is where /proc and /sys are looked for. Control groups of both versions are read, with all their parents
    (https://docs.kernel.org/admin-guide/cgroup-v2.html, cpu.max, memory.max, memory.high; cgroup-v1/memory.html and
    scheduler/sched-bwc.html for cfs_quota_us).
    """
    available, there = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    cores: list[_Limit] = [(available, "the affinity of this process" if available < there else "")]
    memory: list[_Limit] = [(psutil.virtual_memory().total, "")]
    for folder, version in _groups(root, "cpu"):
        cores += _quota(folder) if version == 2 else _quota_of_version_1(folder)
    for folder, version in _groups(root, "memory"):
        for name in ("memory.max", "memory.high") if version == 2 else ("memory.limit_in_bytes",):
            memory += _read(folder / name, int)
    (fewest, cores_limit), (least, memory_limit) = (min(limits, key=itemgetter(0)) for limits in (cores, memory))
    return Host(
        cores=max(1, math.floor(fewest)),
        memory_bytes=int(least),
        cores_limit=cores_limit,
        memory_limit=memory_limit,
    )


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """The folders of this process's control groups, up to the topmost visible one, each with its version."""
    mounts = [line.split() for line in _lines(root / "proc/self/mountinfo")]
    for line in _lines(root / "proc/self/cgroup"):
        _, names, path = line.split(":", 2)
        version = 2 if not names else 1
        if version == 1 and controller not in names.split(","):
            continue
        for mount in mounts:
            kind, _, options = mount[mount.index("-") + 1 :][:3]  # proc(5)
            of_version = "cgroup2" if version == 2 else "cgroup"
            if kind == of_version and (version == 2 or controller in options.split(",")):
                yield from ((folder, version) for folder in _upwards(root, mount[3], mount[4], path))


def _upwards(root: Path, mount_root: str, mount_point: str, path: str) -> Iterator[Path]:
    """The folder of a group and its parents. In a container only the process's own group may be visible."""
    top = root / mount_point.lstrip("/")
    is_within = Path(path).is_relative_to(mount_root) and ".." not in path
    relative = Path(path).relative_to(mount_root) if is_within else Path()
    for parts in range(len(relative.parts), -1, -1):
        yield top.joinpath(*relative.parts[:parts])


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # not Linux, or /proc hides it: no limit is known
        return []


def _read(path: Path, parse: Callable[[str], float]) -> list[_Limit]:
    """The limit in a file; none if there is no such file, or it has no number ("max")."""
    try:
        return [(parse(path.read_text()), str(path))]
    except (OSError, ValueError):
        return []


def _quota(folder: Path) -> list[_Limit]:
    """`cpu.max` holds "QUOTA PERIOD" in microseconds."""

    def cores(text: str) -> float:
        quota, period = text.split()
        return int(quota) / int(period)

    return _read(folder / "cpu.max", cores)


def _quota_of_version_1(folder: Path) -> list[_Limit]:
    periods = _read(folder / "cpu.cfs_period_us", int)
    quotas = _read(folder / "cpu.cfs_quota_us", int)
    # -1 is no limit.
    return [(quota / period, name) for (quota, name), (period, _) in zip(quotas, periods, strict=False) if quota > 0]
