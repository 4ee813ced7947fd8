"""A long run keeps the memory and the files it had after its first steps."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.distributed


@pytest.mark.slow
def test_a_thousand_steps_leave_every_process_as_it_was(tmp_path: Path) -> None:
    result = tmp_path / "endurance.json"
    done = subprocess.run(
        [sys.executable, "benchmarks/endurance.py", "--json", result],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = json.loads(result.read_text())["results"]
    assert {row["case"].partition(":")[0] for row in rows} == {"launcher", "master", "worker-0", "worker-1"}
