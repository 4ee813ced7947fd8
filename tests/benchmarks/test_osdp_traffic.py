"""What a plan of modes says that a device sends in a step, against numbers worked out by hand."""

import importlib
from dataclasses import replace

import pytest

from realhf.planning.model.osdp.problem import Links, Mode, Operator, OsdpPlan, OsdpProblem
from tests.unit.planning.test_operator_modes import operator, problem

sent_bytes = importlib.import_module("lib.osdp_traffic").planned_sent_bytes

# In the order of their use; the values of an embedding are gathered for its forward pass alone.
SIZES = {"embedding": 100, "first": 40, "second": 60}


def plan(counts: dict[str, dict[Mode, int]], *, prefetch: bool = False) -> OsdpPlan:
    operators = tuple(
        Operator(
            name=name,
            kind=name,
            parameter_bytes=size,
            gradient_bytes=size,
            optimizer_bytes=2 * size,
            slices=sum(counts[name].values()),
            gathers=1 if name == "embedding" else 2,
        )
        for name, size in SIZES.items()
    )
    links = Links(num_devices=4, latency_s=0.0, seconds_per_byte=0.0)
    given = OsdpProblem(operators=operators, links=links, memory_bytes=10**6, prefetch=prefetch)
    rows = tuple(tuple(counts[name].get(mode, 0) for mode in given.modes) for name in SIZES)
    return OsdpPlan(problem=given, batch=1, slices=rows)


@pytest.mark.parametrize(
    ("mode", "prefetch", "passes"),
    [
        ("replicated", False, 2 * 200),
        ("zero1", True, 2 * 200),
        # Twice 100 of the embedding, and three times the others, but that "second", and with prefetch "first" too, is
        # still there after the forward pass.
        ("sharded", False, 2 * 100 + 3 * 40 + 2 * 60),
        ("sharded", True, 2 * 100 + 2 * 40 + 2 * 60),
    ],
)
def test_one_mode_for_all(mode: Mode, prefetch: bool, passes: int) -> None:
    assert sent_bytes(plan({name: {mode: 1} for name in SIZES}, prefetch=prefetch)) == passes * 3 / 4


def test_slices_in_several_modes() -> None:
    mixed: dict[str, dict[Mode, int]] = {
        "embedding": {"replicated": 1},
        "first": {"sharded": 1, "zero1": 3},  # slices of 10
        "second": {"zero1": 1},
    }
    # The one sharded slice is still there after the forward pass.
    assert sent_bytes(plan(mixed)) == (2 * 100 + 2 * 10 + 2 * 30 + 2 * 60) * 3 / 4
    sliced = plan({**mixed, "second": {"sharded": 4}})  # of 15 each, the last one still there
    assert sent_bytes(sliced) == (2 * 100 + 3 * 10 + 2 * 30 + 3 * 60 - 15) * 3 / 4


@pytest.mark.parametrize(("count", "prefetch", "passes"), [(1, False, 2), (2, False, 5), (2, True, 4), (3, True, 7)])
def test_bytes_that_are_sent(count: int, prefetch: bool, passes: int) -> None:
    """Three passes of each of so many slices, but for the last, or the last two, that are still there."""
    op = operator(slices=3)
    found = OsdpPlan(problem=problem(op, prefetch=prefetch), batch=1, slices=((0, 3 - count, count),))
    assert sent_bytes(found) == pytest.approx((passes + 2 * (3 - count)) * 800 / 3 * 3 / 4)
    once = replace(op, gathers=1)
    found = OsdpPlan(problem=problem(once, prefetch=prefetch), batch=1, slices=((0, 3 - count, count),))
    assert sent_bytes(found) == pytest.approx(2 * 3 * 800 / 3 * 3 / 4)
