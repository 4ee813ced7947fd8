"""The job of a real size runs in this checkout and in the one that it is compared with, whatever has moved since."""

import json
import os
import subprocess
import sys

import pytest

from tests.e2e.runs import ROOT
from tests.waiting import PATIENCE_S


@pytest.mark.slow
@pytest.mark.distributed
def test_both_checkouts_run_the_job() -> None:
    if subprocess.run(["git", "rev-parse", "--git-dir"], cwd=ROOT, capture_output=True, check=False).returncode:
        pytest.skip("not a git checkout: there is no other commit")
    done = subprocess.run(
        [sys.executable, "benchmarks/real_size_in_turns.py", "--quick"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = json.loads(done.stdout.splitlines()[-1])["results"]
    assert [row["case"].partition(": ")[2] for row in rows] == [
        "step", "user of a run", "system of a run", "page faults of a run",
    ]  # fmt: skip
    assert all(row["value"] > 0 and row["baseline"] > 0 for row in rows)
