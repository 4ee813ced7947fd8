"""With `reproducible="layout"` the bits of rollouts, statistics and parameters are the same under every plan."""

from pathlib import Path

import pytest

from tests.e2e.runs import FinishedRun
from tests.e2e.test_algorithms_plans import STEPS, Pattern, Runs, at, statistics

pytestmark = pytest.mark.distributed

# dp x micro-batches of a training is 4: the parts of a mini-batch's gradient.
ONE = Pattern((at(0, 4),), (at(0),), (at(0),))
PATTERNS = {
    "two, mixed": Pattern(
        train=(at(0, 2, dp=2), at(0, 4, tp=2)),
        generate=(at(0, 2, tp=2), at(0, dp=2)),
        infer=(at(1), at(0, dp=2), at(0, pp=2), at(0, 2, tp=2)),
    ),
    "four, mixed": Pattern(
        train=(at(0, 2, dp=2, tp=2), at(0, dp=4), at(0, 4, pp=2, tp=2)),
        generate=(at(0, dp=2, tp=2), at(0, 2, dp=4)),
        infer=(at(0, tp=2, pp=2), at(2, dp=2), at(0, 2, tp=4), at(3)),
    ),
    "four, deep": Pattern(
        train=(at(0, 4, tp=4), at(0, 2, dp=2, pp=2)), generate=(at(0, pp=2, dp=2),), infer=(at(0, dp=4),)
    ),
}


def of(runs: Runs, folder: Path, name: str, pattern: Pattern) -> FinishedRun:
    return runs.run(folder, name, pattern, "--steps", str(STEPS))


def digests(run: FinishedRun) -> list[dict[str, tuple[str, str]]]:
    """By step and call of the weights that it used and made."""
    return [
        {name: (call.get("weights", ""), call.get("new_weights", "")) for name, call in line["calls"].items()}
        for line in run.metrics
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["sft", "grpo", "ppo"])
def test_every_bit_is_the_same_under_every_plan(name: str, dtype: str, tmp_path: Path) -> None:
    runs = Runs(tmp_path, "--dtype", dtype, "--reproducible", "layout", one=ONE)
    expected = of(runs, tmp_path / "one", name, ONE)
    for place, pattern in enumerate(PATTERNS.values()):
        run = of(runs, tmp_path / f"run-{place}", name, pattern)
        assert digests(run) == digests(expected)
        assert statistics(run) == statistics(expected)
