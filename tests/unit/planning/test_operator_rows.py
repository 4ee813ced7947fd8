"""Measured collectives, operators that cannot be in every mode, and the table of a plan."""

from dataclasses import replace

import pytest

from realhf.base.errors import UserError
from realhf.planning.model.hardware import GIB
from realhf.planning.model.osdp.collective_costs import CollectiveCost, CollectiveCosts
from realhf.planning.model.osdp.problem import Links, Operator, OsdpPlan, OsdpProblem, solve, uniform_plan
from realhf.planning.model.osdp.table import (
    WIDEST_NAME,
    OperatorRow,
    aligned,
    operator_rows,
    plan_rows,
    plan_text,
)

COSTS = CollectiveCosts(
    all_reduce=CollectiveCost(latency_s=1.0, seconds_per_byte=0.5),
    all_gather=CollectiveCost(latency_s=2.0, seconds_per_byte=0.25),
    reduce_scatter=CollectiveCost(latency_s=4.0, seconds_per_byte=0.125),
)


def operator(name: str, **changes: object) -> Operator:
    values = {"parameter_bytes": 800, "gradient_bytes": 800, "optimizer_bytes": 1600, "kind": "linear"}
    return Operator(name=name, **{**values, **changes})  # type: ignore[arg-type]


def problem(*operators: Operator, **changes: object) -> OsdpProblem:
    given = {"links": Links(num_devices=4, measured=COSTS), "memory_bytes": GIB, **changes}
    return OsdpProblem(operators=operators, **given)  # type: ignore[arg-type]


# By hand, for a slice of 400 bytes whose update takes 8 s, 2 s where 4 ranks divide it, and adding its gradient 4, 1
# where it is sharded. What is not gathered is one vector, whose latency is not the operator's.
@pytest.mark.parametrize(
    ("mode", "gathers", "seconds"),
    [
        ("replicated", None, 400 * 0.5 + 8 + 4),
        ("zero1", None, 400 * 0.375 + 2 + 4),
        ("sharded", None, 2 * (2 + 100) + 4 + 50 + 2 + 1),
        ("sharded", 1, 2 + 100 + 4 + 50 + 2 + 1),
    ],
)
def test_measured_collectives_by_hand(mode: str, gathers: int | None, seconds: float) -> None:
    op = operator("op", slices=2, update_s=16.0, accumulate_s=8.0, gathers=gathers)
    assert problem(op).slice_seconds(op, mode) == pytest.approx(seconds)  # type: ignore[arg-type]


def test_handling_is_of_gathers_and_reductions_by_hand() -> None:
    links = Links(num_devices=4, measured=COSTS, handling_s=10.0)
    assert links.mode_s("sharded", 400, [0.0, 0.0]) == 2 * (2 + 100) + 4 + 50 + 3 * 10
    assert links.mode_s("zero1", 400, [0.0, 0.0]) == 400 * 0.375


def test_memory_by_hand() -> None:
    op = operator("op", slices=2)
    cut = problem(op, extra_bytes=7, extra_bytes_per_sample=10, prefetch=True, reduces_whole=True)
    plan = OsdpPlan(problem=cut, batch=3, slices=((0, 1, 1),))
    # A slice with ZeRO-1 has 400 + 400 + 800 / 4, a sharded one 1600 / 4; two slices are gathered, one is reduced.
    assert plan.memory_bytes == 1000 + 400 + 3 * 400 + 7 + 30


def test_an_operator_that_is_never_sharded() -> None:
    others = operator("others", modes=("replicated", "zero1"), most_slices=1)
    # A sharded one has 3200 / 4 and 800 more while it is gathered, others 1600 + 1600 / 4.
    tight = problem(operator("a"), operator("b"), others, memory_bytes=4500, extra_bytes=100)
    plan = solve([tight], range(1, 2))
    assert plan.slices == ((0, 0, 1), (0, 0, 1), (0, 1, 0))
    assert plan.memory_bytes == 2 * 800 + 800 + 2000 + 100
    with pytest.raises(UserError, match="the smallest memory that does is 4500 bytes"):
        solve([replace(tight, memory_bytes=3000)], range(1, 2))
    with pytest.raises(UserError, match="operator others can be replicated, zero1"):
        replace(tight, modes=("sharded",))
    uniform = uniform_plan(replace(tight, memory_bytes=GIB), "sharded", range(1, 2))
    assert uniform is not None
    assert {op.name: mode for op, mode, count in uniform.counts() if count} == {
        "a": "sharded", "b": "sharded", "others": "zero1",
    }  # fmt: skip


def test_layers_that_are_alike_share_a_row() -> None:
    names = [*(f"layers.{n}.up" for n in range(6)), "head"]
    several = problem(*(operator(name, slices=2) for name in names))
    modes = [(0, 2, 0)] * 3 + [(0, 1, 1)] + [(0, 2, 0)] * 2 + [(2, 0, 0)]
    plan = OsdpPlan(problem=several, batch=1, slices=tuple(modes))
    rows = operator_rows(plan)
    assert [(row.operators, row.count, row.modes) for row in rows] == [
        ("layers.0-2,4-5.up", 5, "2 zero1"),
        ("layers.3.up", 1, "1 zero1 + 1 sharded"),
        ("head", 1, "2 replicated"),
    ]
    assert sum(row.seconds for row in rows) == pytest.approx(plan.communication_s)
    assert rows[0].bytes == 5 * (800 + 800 + 1600 / 4)
    assert rows[2].bytes == 3200
    lines = plan_text(plan, {"sharded": None}).splitlines()
    assert "4 ranks, batch 1" in lines[0]
    assert lines[-1].split() == ["all", "sharded", "-", "-", "-", "-", "too", "large", "-"]


def test_a_table_is_at_most_100_columns_wide() -> None:
    op = operator(f"layers.{'x' * 90}.up", slices=64)
    plan = OsdpPlan(problem=problem(op), batch=1, slices=((21, 21, 22),))
    assert max(map(len, plan_text(plan, {"zero1": plan}).splitlines())) <= 100


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    rows = [["name", "mode", "GiB"], ["a", "sharded", "10"]]
    assert list(aligned(rows, words=2)) == ["name  mode     GiB", "a     sharded   10"]
    assert list(aligned(rows, words=1)) == ["name     mode  GiB", "a     sharded   10"]


@pytest.mark.parametrize(
    ("length", "shown"), [(WIDEST_NAME, "x" * 32), (33, "x" * 28 + " ..."), (3, "xxx"), (60, "x" * 28 + " ...")]
)
def test_long_names_are_cut(length: int, shown: str) -> None:
    row = OperatorRow(operators="x" * length, count=1, modes="zero1", seconds=0.0015, bytes=2.5 * 2**20)
    assert row.cells == (shown, "zero1", "1.500", "2.50")


def test_a_row_has_its_slices_in_seconds_and_bytes() -> None:
    """Slices of three modes; of an operator in one piece no number is said."""
    op = operator("up", slices=4)
    several = problem(op, operator("down"), memory_bytes=2**61)  # so that states are rounded up, a slice at a time
    plan = OsdpPlan(problem=several, batch=1, slices=((1, 0, 3), (0, 0, 1)))
    up, down = operator_rows(plan)
    assert (up.modes, down.modes) == ("1 replicated + 3 sharded", "sharded")
    # An all-reduce of 200 bytes without latency, and three times two gathers and a reduction.
    assert up.seconds == pytest.approx(200 * 0.5 + 3 * (2 * (2 + 50) + 4 + 25))
    assert (up.bytes, down.bytes) == (3200 / 4 + 3 * 200, 800)
    halves = replace(plan, problem=problem(operator("up", slices=4, optimizer_bytes=1602), operator("down")))
    assert operator_rows(halves)[0].bytes == 3202 / 4 + 3 * 3202 / 16


@pytest.mark.parametrize(
    ("names", "rows"),
    [
        (["head"], ["head"]),
        (["layers.3.up"], ["layers.3.up"]),
        (["layers.0.up", "layers.1.up", "layers.3.up", "layers.5.up", "layers.6.up"], ["layers.0-1,3,5-6.up"]),
        (["layers.0.up", "layers.0.down", "layers.1.up"], ["layers.0-1.up", "layers.0.down"]),
        (["blocks.2.of.7.up", "blocks.3.of.7.up"], ["blocks.2-3.of.7.up"]),
        (["blocks.2.of.7.up", "blocks.2.of.8.up"], ["blocks.2.of.7.up", "blocks.2.of.8.up"]),
        (["norms", "norms"], ["norms"]),
    ],
)
def test_names_that_differ_in_a_layer(names: list[str], rows: list[str]) -> None:
    several = problem(*map(operator, names))
    plan = OsdpPlan(problem=several, batch=1, slices=((0, 1, 0),) * len(names))
    assert [row.operators for row in operator_rows(plan)] == rows


def test_plans_beside_the_chosen_one() -> None:
    """One pass of an all-gather and a reduce-scatter takes 800 x 0.375 s, an all-reduce 400 s; a sample 100 s."""
    op = operator("up", compute_s=100.0, activation_bytes=GIB)
    given = problem(op, memory_bytes=8 * GIB)
    chosen = OsdpPlan(problem=given, batch=2, slices=((0, 1, 0),))
    small = OsdpPlan(problem=problem(operator("up", compute_s=100.0)), batch=1, slices=((1, 0, 0),))
    rows = plan_rows(chosen, {"replicated": small, "sharded": None, "zero1": chosen})
    assert rows == [
        ("chosen", "2", "500.0000", "300.0000", "0.02", "2.00", "1.000"),
        ("all replicated", "1", "500.0000", "400.0000", "0.01", "3e-06", "2.000"),
        ("all sharded", "-", "-", "-", "-", "too large", "-"),
        ("all ZeRO-1", "2", "500.0000", "300.0000", "0.02", "2.00", "1.000"),
    ]
    exactly = replace(given, operators=(operator("up", parameter_bytes=GIB - 1800, optimizer_bytes=4000),))
    [row] = plan_rows(OsdpPlan(problem=exactly, batch=1, slices=((0, 1, 0),)), {})
    assert row[5] == "1.00"


def test_a_plan_in_text() -> None:
    op = operator("layers.0.up", parameter_bytes=2**21, activation_bytes=2**20, slices=2, compute_s=0.5)
    other = operator("head", parameter_bytes=2**23)
    given = problem(op, other, memory_bytes=2**30, extra_bytes=2**19, links=Links(
        num_devices=4, latency_s=0.0, seconds_per_byte=0.0
    ))  # fmt: skip
    plan = OsdpPlan(problem=given, batch=3, slices=((0, 1, 1), (0, 1, 0)))
    assert plan_text(plan, {}).splitlines() == [
        "4 ranks, batch 3: 0.01343 of 1 GiB",  # 13.75 MiB
        "of these 1.00 MiB for gathers, 3.50 MiB for activations",
        "",
        "operator     modes                   ms   MiB",
        "layers.0.up  1 zero1 + 1 sharded  0.000  1.25",
        "head         zero1                0.000  8.00",
        "",
        "plan    batch  step s  comm. s  samples/s    GiB  ratio",
        "chosen      3  1.5000   0.0000       8.00  0.013  1.000",
    ]
    divided = replace(plan, slices=((0, 2, 0), (0, 1, 0)))
    assert plan_text(divided, {}).splitlines()[1] == "of these 0.00 MiB for gathers, 3.50 MiB for activations"
    both = replace(plan, slices=((0, 1, 1), (0, 0, 1)))
    assert plan_text(both, {}).splitlines()[1] == "of these 8.00 MiB for gathers, 3.50 MiB for activations"
