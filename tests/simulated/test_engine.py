"""Training and generation in every kind of layout over ProcessGroupNCCL."""

import pytest

from realhf.dataflow.graph import GENERATE, TRAIN_STEP
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.planning.model.communicators import axes_used, group_key
from tests.simulated.simulator import Simulator
from tests.unit.api.calls import call

# Each kernel is compiled and loaded once for all shapes, in front of the first generation that needs it.
LINES = [
    "trained in step 0",
    "trained in step 1",
    "loaded attend_split",
    *(f"generated with decode graphs {graphs}" for graphs in ("off", "call", "kept")),
    "loaded attend_split",
    "loaded join_splits",
    "generated behind long prompts",
    "end",
]
# The sum of the ranks of all communicators, by (dp, tp, pp). All ranks have the world, and the groups of axes of more
# than one rank; axes with the same ranks share one. torch makes one for each pair of stages that send to each other: in
# generation each sends to the next, and the last to the first.
RANKS_OF_ALL = {
    (1, 1, 1): 0,
    (2, 1, 1): 2 * 2,  # world; data, model
    (1, 2, 1): 2 * 2,  # world; tensor, model
    (1, 1, 2): 3 * 2,  # world; model; stages
    (2, 2, 1): 4 * 4,  # world; data; tensor; model
    (2, 1, 2): 4 * 4,  # world; data; model; stages
    (1, 2, 2): 4 * 4,  # world; tensor; model; stages
    (1, 1, 4): 4 * 4,  # world; model; two pairs
    (1, 2, 3): 5 * 6,  # world; tensor; model; two pairs
}


def planned(strategy: ParallelStrategy) -> int:
    """The communicators of a rank that the planner counts for the two calls, with that of the world."""
    layout = Layout(DeviceMesh(0, strategy.size), strategy)
    calls = call("actor", TRAIN_STEP), call("actor", GENERATE)
    axes = {axis for each in calls for axis in axes_used(each, strategy, gathers_parameters=False)}
    return len({group_key(layout, axis) for axis in axes}) + (strategy.size > 1)


def test_flash_attn_reads_the_cache_where_triton_is_left_out(simulator: Simulator) -> None:
    outcome = simulator.run("engine", 1, 1, 1, 1, environment={"REALHF_WITHOUT": "triton"})
    loaded = [line for line in LINES if line.startswith("loaded")]
    assert [line for line in outcome.logs[0].splitlines() if line in LINES] == [x for x in LINES if x not in loaded]


@pytest.mark.parametrize(("dp", "tp", "pp"), [(1, 2, 1), (2, 1, 2)])
def test_sums_in_one_order_have_kernels_of_their_own(simulator: Simulator, dp: int, tp: int, pp: int) -> None:
    """Each is compiled and loaded once, for all shapes; nothing waits or allocates by values as steps are recorded."""
    outcome = simulator.run("in_order", dp * tp * pp, dp, tp, pp)
    for rank, log in enumerate(outcome.logs):
        loaded = sorted(line.removeprefix("loaded ") for line in log.splitlines() if line.startswith("loaded"))
        is_first_stage = rank < dp * tp  # where tokens are looked up
        assert loaded == [*(["add_named_rows"] if is_first_stage else []), "add_products", "add_row", "attend_split"]
        assert log.splitlines()[-1] == "end"


@pytest.mark.parametrize(("dp", "tp", "pp"), RANKS_OF_ALL)
def test_steps(simulator: Simulator, dp: int, tp: int, pp: int) -> None:
    strategy = ParallelStrategy(dp, tp, pp)
    outcome = simulator.run("engine", strategy.size, dp, tp, pp)
    for log in outcome.logs:
        assert [line for line in log.splitlines() if line in LINES] == LINES
    assert outcome.memberships == RANKS_OF_ALL[dp, tp, pp]
    assert outcome.memberships == strategy.size * planned(strategy)


def test_only_groups_that_a_call_uses_have_communicators(simulator: Simulator) -> None:
    """And layouts share them: of dp 2 tp 2 and tp 2 pp 2 these are the world, tensor, model, data, and the stages."""
    outcome = simulator.run("layouts", 4)
    assert [log.splitlines()[-1] for log in outcome.logs] == ["end"] * 4
    assert outcome.memberships == 5 * 4
