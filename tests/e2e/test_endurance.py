"""A long run keeps the memory and the files it had after its first steps."""

import json
from pathlib import Path

import pytest

from tests.e2e.runs import benchmark

pytestmark = pytest.mark.distributed


@pytest.mark.slow
def test_every_process_stays_as_it_was(tmp_path: Path) -> None:
    result = tmp_path / "endurance.json"
    benchmark("endurance", "--quick", "--json", result)
    rows = json.loads(result.read_text())["results"]
    assert {row["case"].partition(":")[0] for row in rows} == {"launcher", "master", "worker-0", "worker-1"}
