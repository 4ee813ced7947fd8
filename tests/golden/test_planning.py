"""Every planning golden is what the code of today gives; `python -m tests.golden.record` shows by what one is not."""

from pathlib import Path

import pytest

from tests.golden.cases import CASES
from tests.golden.record import PLANNING, changes, planned

SHOWN = 20


@pytest.mark.parametrize("name", CASES)
def test_nothing_changed(name: str, tmp_path: Path) -> None:
    found = changes(PLANNING / f"{name}.json", planned(name, tmp_path))
    more = f"\nand {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    assert not found, "\n".join(map(str, found[:SHOWN])) + more


def test_every_file_is_of_a_case() -> None:
    assert {path.stem for path in PLANNING.iterdir()} == set(CASES)
