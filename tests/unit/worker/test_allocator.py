"""Freed memory stays with the process: a page is faulted in once, not once a step."""

import subprocess
import sys

import pytest

from tests.waiting import PATIENCE_S

STEPS = """
import resource, sys, torch
from realhf.worker.allocator import keep_freed_memory

assert sys.argv[1] == "default" or keep_freed_memory()
def step():
    return [torch.ones(2**18 + i) for i in range(40)]  # 40 MiB

step(), step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(how: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", STEPS, how], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    return int(done.stdout)


START = """
import re, torch
from realhf.worker.allocator import give_back_freed_memory, keep_freed_memory

def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

assert keep_freed_memory()
used = [torch.ones(2**20) for _ in range(50)]  # 200 MiB
kept = torch.ones(2**18)  # so that they are no end of the heap
del used
before = resident()
give_back_freed_memory()
print(before - resident())
assert kept.sum() == 2**18
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_what_a_start_has_used_is_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", START], capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    assert int(done.stdout) > 150 * 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_a_step_reuses_the_memory_of_the_step_before() -> None:
    assert page_faults("default") > 5 * 1000  # else there would be nothing to mend
    assert page_faults("kept") < 1000
