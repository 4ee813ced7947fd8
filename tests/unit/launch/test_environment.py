"""What every process of a run finds in its environment."""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from realhf.launch.process import process_environment
from tests.waiting import PATIENCE_S

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
ALLOCATES = """
import re, torch
tensor = torch.ones(2**24)  # 64 MiB
print(re.search(r"AnonHugePages: *([0-9]+) kB", open("/proc/self/smaps_rollup").read()).group(1))
"""


def huge_kilobytes(environment: dict[str, str]) -> int:
    """Of a process that holds a tensor of 64 MiB."""
    own = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    done = subprocess.run(
        [sys.executable, "-c", ALLOCATES],
        env={**own, **environment}, capture_output=True, text=True, check=True, timeout=PATIENCE_S,
    )  # fmt: skip
    return int(done.stdout)


@pytest.mark.skipif(
    not HUGE_PAGES.exists() or not re.search(r"\[madvise\]", HUGE_PAGES.read_text()),
    reason="the kernel gives huge pages to all, or to nobody",
)
def test_tensors_lie_in_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert huge_kilobytes({}) < 2**12
    assert huge_kilobytes(process_environment()) > 2**12  # a full memory may not have all of it


def test_several_threads_wait_without_spinning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert "OMP_WAIT_POLICY" not in process_environment()
    found = process_environment(threads=4)
    assert (found["OMP_NUM_THREADS"], found["OMP_WAIT_POLICY"]) == ("4", "PASSIVE")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert process_environment(threads=4)["OMP_WAIT_POLICY"] == "ACTIVE"


KEEPS_EVERY_OTHER = """
import ctypes, torch
from realhf.worker.allocator import keep_freed_memory

class Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", *"bcdefgh", "free", "untouched")]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Mallinfo
keep_freed_memory()
kept = []
before = libc.mallinfo2()
for _ in range(60):
    passing = torch.empty(2**18)  # 1 MiB, as large as what was freed before
    kept.append(torch.empty(2**18))
    del passing
after = libc.mallinfo2()
print((after.arena - before.arena) - (after.untouched - before.untouched))
"""


def heap_growth(environment: dict[str, str]) -> int:
    """Of a process that keeps 60 tensors of 1 MiB, each beside another that it frees."""
    own = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(
        [sys.executable, "-c", KEEPS_EVERY_OTHER],
        env={**own, **environment}, capture_output=True, text=True, check=True, timeout=PATIENCE_S,
    )  # fmt: skip
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc")
def test_a_tensor_takes_the_place_of_one_that_was_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    found = process_environment()
    assert heap_growth({"LD_PRELOAD": found["LD_PRELOAD"]}) < 64 * 2**20


def test_what_the_user_preloads_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/opt/malloc.so")
    assert process_environment().get("LD_PRELOAD", "/opt/malloc.so:").startswith("/opt/malloc.so")


def test_what_the_user_sets_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=0")
    found = process_environment()
    assert found["OMP_NUM_THREADS"] == "3"
    assert found["GLIBC_TUNABLES"].endswith(":glibc.malloc.hugetlb=0")
    if HUGE_PAGES.exists() and "[madvise]" in HUGE_PAGES.read_text():
        assert huge_kilobytes(found) < 2**12
