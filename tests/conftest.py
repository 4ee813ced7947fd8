"""What makes a test the same each time: examples, random numbers, numbers of threads, no clocks of hypothesis."""

import os
import random
import signal
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported: sums depend on the number of threads

# Hundreds of small processes would spend more time on clearing huge pages than they gain.
os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=0")

# The background of a shell script ignores SIGINT, and so would the runs that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# `pytest --hypothesis-profile=explore` looks for new examples.
settings.register_profile(
    "suite", derandomize=True, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("explore", settings.get_profile("suite"), derandomize=False)
settings.load_profile("suite")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seeds what draws without a seed of its own, before fixtures are made."""
    random.seed(0)
    np.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
