"""A finished run leaves the times of its calls beside the profile, and the next plan is surer."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from realhf.data import sort_task
from realhf.planning.model.experience import RunTimes, runs_folder
from realhf.planning.model.profile import load_profile
from tests.e2e.test_algorithms_plans import SMALL
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
JOB = (str(ROOT / "experiments/ppo.py"), "--num-workers", "2", "--batch-size", "16", "--ppo.max-new-tokens", "4")
PLAN = ("--plan", "plan.json")


def realhf(*words: str, folder: Path) -> None:
    """A command in a folder outside of the checkout, with profiles of its own."""
    environment = {**os.environ, "XDG_DATA_HOME": str(folder / "data"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "realhf.cli", *words]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr


def widths(folder: Path, *words: str) -> dict[str, float]:
    """Of the planned calls, the upper over the lower end of the interval."""
    realhf("plan", *JOB, *PLAN, *words, "--output", "found.json", folder=folder)
    intervals = json.loads((folder / "found.json").read_bytes())["intervals"]
    return {name: high / low for name, (low, high) in intervals["call_s"].items()}


@pytest.mark.slow
def test_a_run_makes_the_next_plan_surer(tmp_path: Path) -> None:
    realhf("profile", *JOB, "--max-tokens", "64", "--repetitions", "2", folder=tmp_path)
    realhf("plan", *JOB, "--evaluations", "100", "--output", "plan.json", folder=tmp_path)
    before = widths(tmp_path)
    realhf("run", *JOB, *PLAN, "--steps", "6", "--no-evaluate", "--run-dir", "run", folder=tmp_path)
    profiles = [path for path in (tmp_path / "data/realhf/profiles/cpu").glob("*.json") if path.stem != "constants"]
    assert len(profiles) == 2
    kept = [
        json.loads(path.read_bytes()) for profile in profiles for path in sorted(runs_folder(profile).glob("*.json"))
    ]
    assert [run["run"] for run in kept] == [str(tmp_path / "run")] * 2
    assert sum(len(run["calls"]) for run in kept) == 6
    assert {run["format"] for run in kept} == {RunTimes.__struct_defaults__[-1]}
    assert all("layers" in load_profile(profile).spread for profile in profiles)
    after, ignored = widths(tmp_path), widths(tmp_path, "--ignore-runs")
    assert ignored == pytest.approx(before)
    assert all(after[name] < before[name] for name in before)


@pytest.mark.slow
def test_times_under_reproducible_layout_lie_beside_the_profile_of_its_kernels(tmp_path: Path) -> None:
    data = sort_task.ensure(tmp_path / "task")
    job = ("sft", "--data", str(data / "sft.jsonl"), "--tokenizer", str(data / "tokenizer.json"), *SMALL)
    job = (*job, "--batch-size", "8", "--num-workers", "2", "--reproducible", "layout")
    realhf("profile", *job, "--max-tokens", "64", "--repetitions", "2", folder=tmp_path)
    realhf("run", *job, "--steps", "6", "--evaluations", "20", "--run-dir", "run", folder=tmp_path)
    [profile] = (tmp_path / "data/realhf/profiles/cpu").glob("*.json")
    assert load_profile(profile).reproducible == "layout"
    [kept] = runs_folder(profile).glob("*.json")
    assert json.loads(kept.read_bytes())["run"] == str(tmp_path / "run")
