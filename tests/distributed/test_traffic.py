"""Bytes that the engine sends in a step, by the modes of operators: those of the paper (OSDP, IJCAI 2023: 3 to 2)."""

from collections.abc import Sequence

import pytest

from realhf.architecture.compute import MODES, ModeRules
from realhf.engine.train.gathering import GatheredUnit
from realhf.geometry.shards import units
from realhf.parallel.collectives import traffic
from realhf.parallel.groups import GroupTable
from tests.distributed.pool import run_distributed
from tests.distributed.test_operator_modes import TWO, way
from tests.distributed.test_training_compute import Case, built
from tests.unit.engine.losses import next_token_loss, trained_tokens

pytestmark = pytest.mark.distributed

SLICES = (("layers.*.*", "4 sharded"),)
RULES: dict[str, ModeRules] = {
    **{mode: (("*", mode),) for mode in MODES},
    "4 slices": (("*", "sharded"), *SLICES),
    "mixed": (("*", "sharded"), ("layers.0.*", "replicated"), ("layers.1.down", "2 sharded + 2 zero1")),
}
ITEM = 8  # bytes of float64


def cases(dp: int) -> dict[str, Case]:
    return {
        name: Case(dp=dp, config=TWO, micro_batches=1, compute=way(*rules, prefetch=False))
        for name, rules in RULES.items()
    }


def sent_bytes(rank: int, dp: int) -> dict[str, dict[str, int]]:
    """By case and collective, in a second step; the first is as any other."""
    wanted = cases(dp)
    table = GroupTable([case.layout for case in wanted.values()], rank)
    found = {}
    for name, case in wanted.items():
        model = built(case.config, table.groups(case.layout), case.compute)
        batch = case.batch.split(dp)[rank]
        for _ in range(2):
            with traffic() as counted:
                model.train_step(batch, "tokens", next_token_loss, trained_tokens, 1)
        found[name] = dict(counted.sent_bytes)
    return found


@pytest.mark.parametrize("dp", [2, 4])
def test_bytes_of_a_step_are_those_of_the_modes(dp: int) -> None:
    ranks = run_distributed(sent_bytes, dp, dp)
    assert all(rank == ranks[0] for rank in ranks)
    for name, case in cases(dp).items():
        gathered = reduced = 0
        for unit in units(case.config, case.layout, 0, case.compute.data_parallel):
            size_bytes = unit.flat.size * ITEM
            reduced += size_bytes
            # The backward pass of an embedding reads no value, and the head's begins when its forward pass has ended.
            once = unit.mode != "sharded" or unit.name in ("embedding", "head")
            gathered += size_bytes if once else 2 * size_bytes
        assert ranks[0][name] == {
            "reduce_scatter": reduced * (dp - 1) // dp,
            "all_gather": gathered * (dp - 1) // dp,
        }, name


def left_after_backward(rank: int) -> list[str]:
    """The units whose gradients wait to be reduced when a backward pass has ended."""
    case = Case(dp=2, config=TWO, micro_batches=1, compute=way(("*", "sharded")))
    model = built(case.config, GroupTable([case.layout], rank).groups(case.layout), case.compute)
    gathering, left = model.parameters.gathering, []
    names = {gathered: unit.name for unit, gathered in model.parameters.gathered.items()}
    reduce = gathering.reduce

    def reduced(but: Sequence[GatheredUnit] = ()) -> None:
        if not but:
            left.extend(names[unit] for unit in gathering._with_gradients)
        reduce(but)

    gathering.reduce = reduced
    model.train_step(case.batch.split(2)[rank], "tokens", next_token_loss, trained_tokens, 1)
    return left


def test_gradients_of_one_unit_are_there_at_a_time() -> None:
    """The embedding's come last, and no unit is gathered for them."""
    assert run_distributed(left_after_backward, 2) == [["embedding"], ["embedding"]]


def test_nothing_is_counted_outside() -> None:
    with traffic() as counted:
        pass
    assert not counted.calls
