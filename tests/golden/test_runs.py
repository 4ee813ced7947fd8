"""Small runs have the recorded losses and parameters, to 1e-9, draw the same tokens and have the same plans."""

from pathlib import Path

import pytest

from tests.golden.record import DIGESTS, changed_run
from tests.golden.runs import RUNS
from tests.golden.test_planning import text

NAMES = [pytest.param(name, marks=pytest.mark.slow) if run.slow else name for name, run in RUNS.items()]


@pytest.mark.distributed
@pytest.mark.parametrize("name", NAMES)
def test_nothing_changed(name: str, tmp_path: Path) -> None:
    _, found = changed_run(name, tmp_path)
    assert not found, text(found)


def test_every_file_is_of_a_run() -> None:
    assert {path.stem for path in DIGESTS.iterdir()} == set(RUNS)
