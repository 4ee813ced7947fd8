"""Every planning golden is what the code of today gives; `python -m tests.golden.record` shows by what one is not."""

from pathlib import Path

import pytest

from tests.golden.cases import CASES
from tests.golden.contents import Difference
from tests.golden.record import PLANNING, changed_plans

SHOWN = 20


def text(found: list[Difference]) -> str:
    more = f"\nand {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return "\n".join(map(str, found[:SHOWN])) + more


SLOW = ("ppo_mixture_of_experts", "ppo_stale")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in CASES]
)
def test_nothing_changed(name: str, tmp_path: Path) -> None:
    _, found = changed_plans(name, tmp_path)
    assert not found, text(found)


def test_every_file_is_of_a_case() -> None:
    assert {path.stem for path in PLANNING.iterdir()} == set(CASES)
