"""What `benchmarks/intervals.py` counts, by hand; and its small form on this machine."""

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
intervals = importlib.import_module("intervals")


def call(run: int, name: str, ratio: float) -> object:
    """A call whose interval is a fifth to either side."""
    return intervals.MeasuredCall(
        setting="one", run=run, call=name, predicted_s=2.0, interval_s=(1.6, 2.4), measured_s=2.0 * ratio
    )


def test_coverage_and_spreads_by_hand() -> None:
    """Run 1 is twice as slow as predicted and run 2 twice as fast; call b is slower than a in both, by 2 x 21 %."""
    wide = math.exp(0.2)
    calls = [call(1, "a", 2 / wide), call(1, "b", 2 * wide), call(2, "a", 0.5 / wide), call(2, "b", 0.5 * wide)]
    found = intervals.spreads(calls)
    assert found["by run"] == pytest.approx(math.log(2))
    assert found["by call"] == pytest.approx(0.2)
    assert found["the rest"] == pytest.approx(0.0, abs=1e-12)
    assert found["in all"] == pytest.approx(math.hypot(math.log(2), 0.2))
    calls = [call(1, "a", ratio) for ratio in (0.5, 0.81, 1.0, 1.19, 1.3)]
    row = intervals.coverage("some", calls)
    assert (row["value"], row["holds"]) == (0.6, False)
    assert intervals.coverage("all", calls[1:4] * 20)["holds"] is False  # none of sixty outside is too wide
    assert intervals.coverage("all", calls[1:4])["holds"] is True


@pytest.mark.slow
def test_the_small_form_measures_calls_and_their_intervals() -> None:
    """On a busy machine more calls may be outside: coverage itself is the whole benchmark's."""
    command = [sys.executable, str(ROOT / "benchmarks/intervals.py"), "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    rows = {row["case"]: row for row in result["results"]}
    assert result["benchmark"] == "intervals"
    assert 0.3 <= rows["in their interval: all 6 calls"]["value"] <= 1.0
    assert 1.0 < rows["upper over lower end (median)"]["value"] < 30
