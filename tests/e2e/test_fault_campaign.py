"""The fault campaign of benchmarks/faults.py in short: struck from outside, a run ends as if nothing had happened."""

import importlib
import json
import os
import socket
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.e2e.runs import ROOT, benchmark
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.distributed


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Finds a module of benchmarks/ by its name."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module


@pytest.mark.slow
def test_a_killed_run_goes_on_from_the_newest_checkpoint_that_is_whole(benchmarks: Any, tmp_path: Path) -> None:
    """In step 7 of 10, checkpoints after every second: the third is corrupted and a worker killed, at one moment."""
    fault = benchmarks("lib.fault_injection").Fault(
        kind="corrupted checkpoint", victim="worker-1", phase="generation", watched="worker-1", after_checkpoints=3,
        file="checkpoints/step-*/*/boxes-*.safetensors",
    )  # fmt: skip
    campaign = benchmarks("lib.fault_campaign").Campaign(
        tmp_path, steps=10, interval=2, hold_at=7, call_timeout_s=PATIENCE_S
    )
    outcome = campaign.run(1, fault, recovers=True)
    assert outcome.evidence.startswith("checkpoints/step-6/"), "the damage was seen"
    assert outcome.evidence.endswith("; it is dead")
    assert outcome.activity == "actor_generate of step 7: compute"
    assert outcome.message.startswith(
        "worker-1 was killed by signal 9 (SIGKILL); last activity: actor_generate of step 7"
    )
    assert (outcome.checkpoints_before, outcome.steps_at_failure) == ([2, 4, 6], 6)
    assert (outcome.restored, outcome.redone, outcome.is_newest_good) == (4, 2, True)
    assert outcome.is_equal, "metrics and parameters, bit for bit"
    assert outcome.left_behind == []
    assert outcome.holds
    assert not replace(outcome, evidence="").holds, "a strike that nobody saw"
    assert not replace(outcome, effect="").holds, "a strike that nothing came of"
    assert not replace(outcome, effect="came back").holds, "what was killed does not come back"
    connection = replace(outcome.fault, kind="connection cut")
    assert replace(outcome, fault=connection, effect="came back", redone=0).holds
    assert not replace(outcome, is_plain=False).holds, "a traceback"
    assert not replace(outcome, refusal="run/plan.json is damaged").holds, "one that was not damaged"
    plan = replace(outcome.fault, kind="damaged file", file="plan.json")
    assert replace(outcome, fault=plan, redone=0, refusal="run/plan.json is damaged", is_equal=False).holds

    report, table = benchmarks("lib.fault_outcome"), tmp_path / "faults.md"
    report.write_tables([outcome], table)
    assert f"| {outcome.commit} | auto | corrupted checkpoint | worker-1 |" in table.read_text()
    with table.with_suffix(".jsonl").open("a") as file:
        file.write('{"commit": "another", "of": "an earlier version"}\n')
    assert report.read_rows(table, outcome.commit) == [outcome], "a campaign that was stopped goes on"


def test_cut_connections_are_cut(benchmarks: Any) -> None:
    """Those of a process with a master's port, here one process; it says which."""
    injection = benchmarks("lib.fault_injection")
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as ours, server.accept()[0]:
            assert injection.cut_connections(os.getpid(), os.getpid()) == {ours.getsockname()[1]}
            assert ours.recv(1) == b""
        assert injection.cut_connections(os.getpid(), os.getpid()) == set()


@pytest.mark.parametrize("how", ["bit", "garbage", "cut", "empty"])
def test_damage_is_done_and_seen(benchmarks: Any, how: str, tmp_path: Path) -> None:
    injection, path = benchmarks("lib.fault_injection"), tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "text": "x" * 40}) for step in range(1, 6)]
    path.write_text("\n".join(lines) + "\n")
    assert injection.readable_steps(path) == {1, 2, 3, 4, 5}
    size = path.stat().st_size
    assert injection.damage(path, how).startswith(f"{how}, {size} bytes before")
    left = {"bit": {1, 2, 3, 4, 5}, "garbage": {1, 2, 4, 5}, "cut": {1, 2}, "empty": set()}
    assert injection.readable_steps(path) == left[how]
    if how == "empty":
        assert injection.damage(path, how) == "", "nothing was changed"


def test_a_schedule_damages_every_file(benchmarks: Any) -> None:
    injection = benchmarks("lib.fault_injection")
    schedule = benchmarks("faults").make_schedules(48, 12, 0)
    damaged = {(fault.file, fault.damage) for fault, _ in schedule if fault.file}
    assert damaged == {*injection.OF_CHECKPOINTS, *injection.OF_RUNS}
    assert {fault.kind for fault, _ in schedule} == set(get_args(injection.Kind))
    assert {recovers for fault, recovers in schedule if fault.file == "plan.json"} == {True, False}


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
    benchmark("faults", "--each", "--table", table)
    rows = [json.loads(line) for line in table.with_suffix(".jsonl").read_text().splitlines()]
    kinds = [(row["fault"]["kind"], row["mode"]) for row in rows]
    auto = [
        "kill", "hang", "exception", "connection cut", "full disk", "full run directory", "corrupted checkpoint",
        "damaged file",
    ]  # fmt: skip
    assert sorted(kinds) == sorted([*((kind, "auto") for kind in auto), ("kill", "by hand")])
    assert all(row["holds"] for row in rows)
