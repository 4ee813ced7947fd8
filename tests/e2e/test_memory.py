"""What workers take is what the planner says: not more, and little less."""

from pathlib import Path

import pytest

from realhf.dataflow.plan import load_plan
from tests.e2e.runs import ROOT, finished


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_plan_that_is_said_to_fit_fits(tmp_path: Path, dtype: str) -> None:
    """`benchmarks/real_size.py` in miniature: 4 million parameters, tp 2."""
    words = ("--plan", ROOT / "benchmarks/jobs/real_size_plan.json", "--steps", "3", "--dtype", dtype)
    run = finished(tmp_path / "run", ROOT / "benchmarks/jobs/real_size_job.py", *words, "--data-dir", tmp_path / "data")
    rationale = load_plan(run.path / "plan.json").rationale
    assert rationale is not None
    [memory] = rationale.memory
    measured = max(peak for line in run.metrics for peak in line["peak_bytes"])
    assert measured <= memory.peak_bytes <= 1.15 * measured
