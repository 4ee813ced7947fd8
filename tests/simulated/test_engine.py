"""Training and generation in every kind of layout over ProcessGroupNCCL."""

import pytest

from tests.simulated.simulator import Simulator

LINES = [
    "trained in step 0",
    "trained in step 1",
    *(f"generated with decode graphs {graphs}" for graphs in ("off", "call", "kept")),
    "end",
]


@pytest.mark.parametrize(
    ("dp", "tp", "pp"), [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 1, 4)]
)
def test_steps(simulator: Simulator, dp: int, tp: int, pp: int) -> None:
    outcome = simulator.run("engine", dp * tp * pp, dp, tp, pp)
    for log in outcome.logs:
        assert [line for line in log.splitlines() if line in LINES] == LINES
    print("COMM", (dp, tp, pp), outcome.memberships)
