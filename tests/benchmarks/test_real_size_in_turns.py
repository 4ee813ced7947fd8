"""The job of a real size runs in this checkout and in the one that it is compared with, whatever has moved since."""

import json
import subprocess

import pytest

from tests.e2e.runs import ROOT, benchmark


@pytest.mark.slow
@pytest.mark.distributed
def test_both_checkouts_run_the_job() -> None:
    if subprocess.run(["git", "rev-parse", "--git-dir"], cwd=ROOT, capture_output=True, check=False).returncode:
        pytest.skip("not a git checkout: there is no other commit")
    printed = benchmark("real_size_in_turns", "--quick")
    rows = json.loads(printed.splitlines()[-1])["results"]
    assert [row["case"].partition(": ")[2] for row in rows] == [
        "step", "user of a run", "system of a run", "page faults of a run",
    ]  # fmt: skip
    assert all(row["value"] > 0 and row["baseline"] > 0 for row in rows)
