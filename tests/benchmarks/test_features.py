"""What `benchmarks/features.py` says of a setting, by hand; its settings that memory decides; its small form."""

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from realhf.dataflow.plan import CallCompute, CallPlan, ExecutionPlan, Intervals

ROOT = Path(__file__).parents[2]
features = importlib.import_module("features")
COMPUTED = CallCompute(recomputation="full")


def planned(step_s: float, *, compute: CallCompute | None = None, fits: bool = True) -> Any:
    """A plan of one call whose interval is a fifth to either side."""
    call = CallPlan(devices=(0, 1), compute=compute or CallCompute())
    intervals = Intervals(step_s=(0.8 * step_s, 1.2 * step_s), call_s={})
    plan = ExecutionPlan(num_devices=1, calls={"train": call}, intervals=intervals)
    return features.Planned(plan=plan, step_s=step_s, peak_gib=1.0, fits=fits)


def test_when_a_setting_holds() -> None:
    chosen, before = planned(2.0, compute=COMPUTED), planned(2.3)

    def says(chosen: Any, before: Any, *seconds: float) -> list[str]:
        row = features.judged(features.RECOMPUTING, chosen, before, seconds)
        wrong = [name for name in ("chosen", "predicted", "inside", "measured") if not row[name]]
        assert row["holds"] == (not wrong)
        assert row["value"] == seconds[0]
        return wrong

    assert says(chosen, before, 2.1, 2.2) == []
    assert says(chosen, before, 2.1, 2.0) == ["measured"]
    assert says(chosen, before, 1.5, 2.0) == ["inside"]
    assert says(chosen, planned(2.1), 2.1, 2.2) == ["predicted"], "by less than a tenth"
    assert says(chosen, planned(1.0, fits=False), 2.1, 0.0) == []
    assert says(planned(2.0), before, 2.1, 2.2) == ["chosen"]
    assert says(chosen, replace(before, plan=chosen.plan), 2.1, 2.2) == ["chosen"], "the plan before has it, too"


def test_steps_that_take_turns_in_being_long() -> None:
    """Of 1 s and 3 s in turns, three together take 5 / 3 s or 7 / 3 s; the first two do not count."""
    ends, clock = [], 10.0
    for step in range(12):
        clock += 9.0 if step < 2 else (1.0, 3.0)[step % 2]
        ends.append(clock)
    lines = [{"calls": {"a": {"end": end - 0.5}, "b": {"end": end}}} for end in ends]
    assert features.step_seconds(lines) == pytest.approx(2.0)


def test_twelve_settings_and_every_feature() -> None:
    assert len(features.MEASURED) == len(set(map(str, features.MEASURED))) == 12
    assert {setting.feature for setting in features.MEASURED} == features.FEATURES.keys() - {"offload"}
    assert {setting.feature for setting in features.SIMULATED} == {"offload"}


@pytest.mark.slow
@pytest.mark.parametrize("setting", features.QUICK, ids=str)
def test_where_memory_decides_the_plan_before_does_not_fit(setting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was measured on this machine."""
    monkeypatch.chdir(ROOT)
    chosen, before = features.plans(setting)
    assert chosen.fits
    assert not before.fits
    assert features.FEATURES[setting.feature].is_in(chosen.plan)
    assert not features.FEATURES[setting.feature].is_in(before.plan)
    limit = setting.memory_gib or 74.6
    assert chosen.peak_gib <= limit < before.peak_gib


@pytest.mark.slow
def test_the_small_form_runs_what_it_chooses() -> None:
    """On a busy machine, and without a profile, a step may be outside its interval."""
    command = [sys.executable, str(ROOT / "benchmarks/features.py"), "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["benchmark"] == "features"
    assert [row["case"] for row in result["results"]] == list(map(str, features.QUICK))
    for row in result["results"]:
        assert row["chosen"]
        assert row["predicted"]
        assert row["measured"]
        assert not row["before_fits"]
        assert row["value"] > 0
