"""Cores and memory of this machine, within the limits of control groups that are laid out in a folder."""

import os
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from realhf.machine.host import Host, read_host, threads_given

GIB = 2**30
V2 = "30 20 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "31 20 0:27 {root} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "32 20 0:28 {root} /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n"
)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 cores, all of them allowed, and 64 GiB."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GIB))


def lay_out(root: Path, mounts: str, groups: str, files: dict[str, str]) -> Path:
    """A /proc and a /sys/fs/cgroup under `root`."""
    for name, text in {"proc/self/mountinfo": mounts, "proc/self/cgroup": groups, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_machine_without_limits_has_all_it_has(tmp_path: Path) -> None:
    assert read_host(tmp_path) == Host(cores=16, memory_bytes=64 * GIB)
    unlimited = {"cpu.max": "max 100000\n", "memory.max": "max\n", "memory.high": "max\n"}
    files = {f"sys/fs/cgroup/job/{name}": text for name, text in unlimited.items()}
    assert read_host(lay_out(tmp_path, V2, "0::/job\n", files)) == Host(cores=16, memory_bytes=64 * GIB)


def test_the_affinity_limits_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 4, 5})
    host = read_host(tmp_path)
    assert (host.cores, host.cores_limit) == (3, "the affinity of this process")


@pytest.mark.parametrize(
    ("quota", "cores"), [("400000 100000", 4), ("250000 100000", 2), ("50000 100000", 1), ("9900000 100000", 16)]
)
def test_a_quota_of_processors_is_rounded_down_to_at_least_one(tmp_path: Path, quota: str, cores: int) -> None:
    lay_out(tmp_path, V2, "0::/job\n", {"sys/fs/cgroup/job/cpu.max": quota})
    assert read_host(tmp_path).cores == cores


def test_of_nested_groups_the_smallest_limit_counts(tmp_path: Path) -> None:
    files = {
        "slice/cpu.max": "300000 100000",
        "slice/memory.max": str(10 * GIB),
        "slice/job/cpu.max": "800000 100000",
        "slice/job/memory.max": str(20 * GIB),
        "slice/job/task/memory.max": "max",
        "slice/job/task/memory.high": str(12 * GIB),
    }
    lay_out(tmp_path, V2, "0::/slice/job/task\n", {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    folder = tmp_path / "sys/fs/cgroup/slice"
    assert read_host(tmp_path) == Host(
        cores=3, memory_bytes=10 * GIB, cores_limit=f"{folder / 'cpu.max'}", memory_limit=f"{folder / 'memory.max'}"
    )


@pytest.mark.parametrize("root", ["/", "/docker/1234"])
def test_version_1_with_its_own_hierarchies(tmp_path: Path, root: str) -> None:
    """A container sees its own group as the top, while /proc names the group as the host does."""
    inside = "" if root == "/docker/1234" else "docker/1234/"
    files = {
        f"cpu,cpuacct/{inside}cpu.cfs_quota_us": "600000",
        f"cpu,cpuacct/{inside}cpu.cfs_period_us": "200000",
        f"memory/{inside}memory.limit_in_bytes": str(6 * GIB),
        "memory/memory.limit_in_bytes": str(6 * GIB if not inside else 9223372036854771712),
    }
    groups = "9:memory:/docker/1234\n2:cpu,cpuacct:/docker/1234\n1:name=systemd:/docker/1234\n0::/\n"
    files = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    host = read_host(lay_out(tmp_path, V1.format(root=root), groups, files))
    assert (host.cores, host.memory_bytes) == (3, 6 * GIB)


def test_version_1_without_limits(tmp_path: Path) -> None:
    files = {
        "cpu,cpuacct/cpu.cfs_quota_us": "-1",
        "cpu,cpuacct/cpu.cfs_period_us": "100000",
        "memory/memory.limit_in_bytes": "9223372036854771712",
    }
    groups = "9:memory:/\n2:cpu,cpuacct:/\n0::/\n"
    lay_out(tmp_path, V1.format(root="/"), groups, {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    assert read_host(tmp_path) == Host(cores=16, memory_bytes=64 * GIB)


def test_a_group_of_another_namespace_is_read_from_what_is_mounted(tmp_path: Path) -> None:
    lay_out(tmp_path, V2, "0::/../../other\n", {"sys/fs/cgroup/memory.max": str(3 * GIB)})
    assert read_host(tmp_path).memory_bytes == 3 * GIB


@pytest.mark.parametrize(
    ("given", "threads"), [({}, None), ({"OMP_NUM_THREADS": ""}, None), ({"OMP_NUM_THREADS": "0"}, None),
                           ({"OMP_NUM_THREADS": "3"}, 3), ({"OMP_NUM_THREADS": "4,2"}, 4)]
)  # fmt: skip
def test_threads_of_a_process_as_its_environment_says(given: dict[str, str], threads: int | None) -> None:
    assert threads_given(given) == threads
