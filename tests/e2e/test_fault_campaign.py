"""The fault campaign of benchmarks/faults.py in short: struck from outside, a run ends as if nothing had happened."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import ROOT
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.distributed


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Finds a module of benchmarks/ by its name."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module


def test_a_killed_run_goes_on_from_the_newest_checkpoint_that_is_whole(benchmarks: Any, tmp_path: Path) -> None:
    """In step 7 of 10, checkpoints after every second: the third is corrupted and a worker killed, at one moment."""
    fault = benchmarks("fault_injection").Fault(
        kind="corrupted checkpoint", victim="worker-1", phase="generation", watched="worker-1", after_checkpoints=3
    )
    campaign = benchmarks("fault_campaign").Campaign(
        tmp_path, steps=10, interval=2, hold_at=7, call_timeout_s=PATIENCE_S
    )
    outcome = campaign.run(1, fault, recovers=True)
    assert outcome.activity == "actor_generate of step 7: compute"
    assert outcome.message.startswith(
        "worker-1 was killed by signal 9 (SIGKILL); last activity: actor_generate of step 7"
    )
    assert (outcome.checkpoints_before, outcome.steps_at_failure) == ([2, 4, 6], 6)
    assert (outcome.restored, outcome.redone, outcome.is_newest_good) == (4, 2, True)
    assert outcome.is_equal, "metrics and parameters, bit for bit"
    assert outcome.left_behind == []


def may_mount() -> bool:
    """Whether a disk of its own can be mounted, to be filled."""
    namespaces = ["--mount"] if os.geteuid() == 0 else ["--user", "--map-root-user", "--mount"]
    try:
        return subprocess.run(["unshare", *namespaces, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]).returncode == 0
    except OSError:
        return False


@pytest.mark.slow
def test_every_kind_of_fault(tmp_path: Path) -> None:
    """A hang, a full disk, a cut connection and so on; and a run without recovery, which is resumed."""
    if not may_mount():
        pytest.skip("this user may not mount a disk in a namespace of its own")
    table = tmp_path / "faults.md"
    done = subprocess.run(
        [sys.executable, "benchmarks/faults.py", "--each", "--table", table],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in table.with_suffix(".jsonl").read_text().splitlines()]
    kinds = [(row["fault"]["kind"], row["mode"]) for row in rows]
    auto = ["kill", "hang", "exception", "connection cut", "full disk", "corrupted checkpoint"]
    assert sorted(kinds) == sorted([*((kind, "auto") for kind in auto), ("kill", "by hand")])
    assert all(row["holds"] for row in rows)
