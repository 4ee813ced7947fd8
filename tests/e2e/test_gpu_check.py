"""The one command for a machine with a GPU takes every step, whatever became of the others, and ends each in time."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from tests.docs.blocks import ROOT
from tests.waiting import PATIENCE_S, wait_until

SCRIPT = ROOT / "scripts/gpu_check.py"


@pytest.fixture
def gpu_check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("on_cpu", [False, True])
def test_all_steps_together_take_less_than_ten_minutes(gpu_check: ModuleType, tmp_path: Path, on_cpu: bool) -> None:
    steps = gpu_check.steps(tmp_path, on_cpu=on_cpu)
    assert sum(step.deadline_s for step in steps) < 600
    assert ("--gpu" in steps[0].command) is not on_cpu
    for step in steps:
        assert all(
            (ROOT / word).exists()
            for word in step.command
            if word.startswith(("tests/", "experiments/", "benchmarks/"))
        )


def test_a_step_that_fails_or_hangs_keeps_no_other_from_its_turn(
    gpu_check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hangs = "import subprocess, sys, time; p = subprocess.Popen(['sleep', '1000']); print(p.pid, flush=True); p.wait()"

    def step(name: str, code: str, deadline_s: float = PATIENCE_S) -> object:
        return gpu_check.Step(name=name, command=(sys.executable, "-c", code), deadline_s=deadline_s)

    taken = [step("bad", "raise SystemExit(3)"), step("hangs", hangs, 5.0), step("good", "print('all is well')")]
    monkeypatch.setattr(gpu_check, "steps", lambda out, on_cpu: taken)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--cpu", "--out", str(tmp_path)])
    assert gpu_check.main() == 1
    result = json.loads((tmp_path / "gpu_check.json").read_text())
    assert [outcome["result"] for outcome in result["steps"]] == [
        "failed with exit code 3", "not done within 5 s", "passed",
    ]  # fmt: skip
    assert (tmp_path / "good.log").read_text() == "all is well\n"
    child = int((tmp_path / "hangs.log").read_text())
    wait_until(lambda: not is_running(child), "the end of what a step has started")
    assert result["commit"]
    assert "not done within 5 s" in capsys.readouterr().out
    monkeypatch.setattr(gpu_check, "steps", lambda out, on_cpu: taken[2:])
    assert gpu_check.main() == 0


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_without_a_gpu_it_says_so() -> None:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    words = [sys.executable, str(SCRIPT)]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 2
    assert "this machine has no GPU; --cpu takes the steps in small on a CPU" in done.stderr


@pytest.mark.slow
def test_every_step_runs_in_small_on_a_cpu(
    gpu_check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for its deadline, which a busy machine may miss: as `python scripts/gpu_check.py --cpu --out gpu-check`."""
    for step in gpu_check.steps(tmp_path, on_cpu=True):
        outcome = gpu_check.run(replace(step, deadline_s=PATIENCE_S), tmp_path)
        assert outcome.result == "passed", Path(outcome.log).read_text()[-4000:]
    assert json.loads((tmp_path / "training.json").read_text())["results"]
