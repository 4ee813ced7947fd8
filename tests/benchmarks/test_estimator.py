"""What `benchmarks/estimator.py` counts, by hand; and its small form on this machine."""

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
estimator = importlib.import_module("estimator")


def call(name: str, ratio: float) -> Any:
    """A call whose interval is a fifth to either side."""
    return estimator.MeasuredCall(name=name, predicted_s=2.0, interval_s=(1.6, 2.4), measured_s=2.0 * ratio)


def trial(predicted_s: float) -> Any:
    return estimator.Trial(name="one", predicted_s=predicted_s, measured_s=2.0, calls=[])


def test_errors_of_steps_by_hand() -> None:
    mean, worst = estimator.over_all([trial(2.0), trial(2.2), trial(1.6)])
    assert (mean["value"], mean["holds"]) == (pytest.approx(0.1), True)
    assert (worst["value"], worst["ratio"]) == (pytest.approx(0.2), pytest.approx(1.4))
    assert estimator.over_all([trial(1.5)])[1]["holds"] is False
    assert [estimator.row(trial(seconds))["holds"] for seconds in (1.5, 1.7, 2.3, 2.5)] == [False, True, True, False]


def test_coverage_by_hand() -> None:
    ratios = (0.5, 0.81, 1.0, 1.19, 1.3)
    rows = {row["case"]: row for row in estimator.interval_rows([call("a", ratio) for ratio in ratios])}
    assert (rows["in their interval: all 5 calls"]["value"], rows["in their interval: a"]["holds"]) == (0.6, False)
    assert rows["upper over lower end of an interval (median)"]["value"] == pytest.approx(1.5)
    squares = [math.log(ratio) ** 2 for ratio in ratios]
    assert rows["spread of measured / predicted, of calls"]["value"] == pytest.approx(math.sqrt(sum(squares) / 5))
    assert estimator.coverage("nine", [call("a", 1.0)] * 9 + [call("a", 2.0)])["holds"] is True
    assert estimator.coverage("eight", [call("a", 1.0)] * 8 + [call("a", 2.0)])["holds"] is False


@pytest.mark.slow
def test_the_small_form_measures_steps_calls_and_their_intervals() -> None:
    command = [sys.executable, str(ROOT / "benchmarks/estimator.py"), "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    rows = {row["case"]: row for row in json.loads(done.stdout.splitlines()[-1])["results"]}
    assert 0.0 <= rows["in their interval: all 6 calls"]["value"] <= 1.0
    assert rows["mean error of 1 predicted steps"]["value"] >= 0
