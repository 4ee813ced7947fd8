"""Tests on simulated GPUs, which need the folder that `scripts/simulated_gpu.py` makes; elsewhere they are skipped."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.simulated.simulator import FOLDER_VARIABLE, Simulator, missing_in, started


@pytest.fixture
def simulator() -> Iterator[Simulator]:
    named = os.environ.get(FOLDER_VARIABLE)
    if not named:
        pytest.skip(f"{FOLDER_VARIABLE} names no folder of scripts/simulated_gpu.py (docs/gpu.md)")
    folder = Path(named).resolve()
    missing = missing_in(folder)
    assert not missing, (
        f"{FOLDER_VARIABLE}={named} lacks {', '.join(missing)}; name a folder that scripts/simulated_gpu.py completed"
    )
    with started(folder) as simulator:
        yield simulator
