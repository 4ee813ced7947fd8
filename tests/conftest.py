"""What makes a test the same each time: examples, random numbers, numbers of threads, no clocks of hypothesis."""

import argparse
import os
import random
import signal
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported: sums depend on the number of threads

# Read when a kernel is defined: without a GPU, Triton's kernels run in its interpreter.
if not Path("/proc/driver/nvidia").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

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


@pytest.fixture(scope="session", autouse=True)
def _no_data_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Plans that are made outside the checkout see no profiles but those of the tests; nothing is kept for later."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seeds what draws without a seed of its own, before fixtures are made."""
    random.seed(0)
    np.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="1/1", type=_part, metavar="K/N", help="run the Kth of N parts of the tests")


def _part(text: str) -> tuple[int, int]:
    number, _, parts = text.partition("/")
    if not (number.isdecimal() and parts.isdecimal() and 1 <= int(number) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r} is no part; 2/4 is the second of four")
    return int(number), int(parts)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part, parts = config.getoption("--part")
    of_part = [item for item in items if zlib.crc32(item.nodeid.encode()) % parts == part - 1]
    if len(of_part) < len(items):
        config.hook.pytest_deselected(items=[*{*items} - {*of_part}])
        items[:] = of_part
    items.sort(key=lambda item: not item.nodeid.startswith("tests/slurm/"))  # in one process, and so the last to end


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `pytest -n 3`: a file stays in one process, which makes its fixtures once; so do all that need SLURM, which
    mostly wait.

    Files start in the order of their names, after those: the long ones (distributed, e2e) before the short ones (unit).
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "tests/slurm" if file.startswith("tests/slurm/") else file

    config.option.loadscopereorder = False
    return ByFile(config, log)
