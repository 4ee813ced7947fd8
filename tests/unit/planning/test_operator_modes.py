"""Parts of the choice of modes by hand: links, slices, what is asked of the solver, plans and refusals."""

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from realhf.architecture.compute import MODES
from realhf.base.errors import UserError
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.model.hardware import GIB
from realhf.planning.model.osdp import problem as osdp_problem
from realhf.planning.model.osdp.collective_costs import CollectiveCost, CollectiveCosts
from realhf.planning.model.osdp.problem import (
    MOST_SLICES,
    Links,
    Operator,
    OsdpPlan,
    OsdpProblem,
    gib_above,
    given_plan,
    sliced,
    solve,
    uniform_plan,
    with_cuts,
)
from realhf.planning.model.osdp.units import SMALLEST_SLICED_BYTES

COSTS = CollectiveCosts(
    all_reduce=CollectiveCost(latency_s=1.0, seconds_per_byte=0.5),
    all_gather=CollectiveCost(latency_s=2.0, seconds_per_byte=0.25),
    reduce_scatter=CollectiveCost(latency_s=4.0, seconds_per_byte=0.125),
)
RING = Links(num_devices=4, latency_s=0.25, seconds_per_byte=0.01, launch_s=3.0)
FREE = Links(num_devices=4, latency_s=0.0, seconds_per_byte=0.0)


def operator(name: str = "op", **changes: Any) -> Operator:
    values = {"parameter_bytes": 800, "gradient_bytes": 400, "optimizer_bytes": 1600, "kind": "linear"}
    return Operator(name=name, **{**values, **changes})


def problem(*operators: Operator, **changes: Any) -> OsdpProblem:
    given = {"links": FREE, "memory_bytes": GIB, **changes}
    return OsdpProblem(operators=operators or (operator(),), **given)


# --- links


def test_a_ring_within_and_between_nodes() -> None:
    hardware = structs.replace(
        load_hardware("h100"), devices_per_node=8, intra_node_latency_s=0.5, intra_node_bandwidth=4.0,
        inter_node_latency_s=2.0, inter_node_bandwidth=2.0,
    )  # fmt: skip
    within = Links(num_devices=8, latency_s=0.5, seconds_per_byte=0.25)
    assert Links.ring(hardware, 8) == within
    assert Links.ring(hardware, 9) == Links(num_devices=9, latency_s=2.0, seconds_per_byte=0.5)
    assert Links.ring(hardware, 8, launch_s=7.0) == replace(within, launch_s=7.0)


def test_links_of_a_measured_group() -> None:
    found = Links(num_devices=4, measured=COSTS)
    assert (found.latency_s, found.seconds_per_byte, found.handling_s) == (0.0, 0.0, 0.0)
    plain = Links(num_devices=1, latency_s=1.0, seconds_per_byte=1.0)
    assert (plain.launch_s, plain.handling_s, plain.measured) == (0.0, 0.0, None)


@pytest.mark.parametrize("name", ["latency_s", "seconds_per_byte", "launch_s", "handling_s", "overlap"])
def test_links_take_no_negative_time(name: str) -> None:
    fields = {"num_devices": 1, "latency_s": 0.0, "seconds_per_byte": 0.0}
    with pytest.raises(UserError, match=f"{name}=-0.5 must not be negative"):
        Links(**{**fields, name: -0.5})  # type: ignore[arg-type]
    assert getattr(Links(**{**fields, name: 0.5}), name) == 0.5  # type: ignore[arg-type]
    with pytest.raises(UserError, match="num_devices=0 must be at least 1"):
        Links(**{**fields, "num_devices": 0})  # type: ignore[arg-type]


TWO = [0.0, 0.0]  # gathers behind nothing
PASS_S = 3 * (0.25 + 800 * 0.01 / 4)


@pytest.mark.parametrize(
    ("mode", "gathers", "ring_s", "measured_s"),
    [
        ("replicated", 2, 2 * PASS_S + 3, 800 * 0.5),
        ("zero1", 2, 2 * PASS_S + 2 * 3, 800 * (0.25 + 0.125)),
        ("sharded", 1, 2 * PASS_S + 2 * 3, (2 + 200) + (4 + 100) + 2 * 7),
        ("sharded", 2, 3 * PASS_S + 3 * 3, 2 * (2 + 200) + (4 + 100) + 3 * 7),
        ("sharded", 3, 4 * PASS_S + 4 * 3, 3 * (2 + 200) + (4 + 100) + 4 * 7),
    ],
)
def test_seconds_of_a_mode(mode: Any, gathers: int, ring_s: float, measured_s: float) -> None:
    assert RING.pass_s(800) == PASS_S
    ahead_s, measured = [0.0] * gathers, Links(num_devices=4, measured=COSTS, handling_s=7.0)
    assert RING.mode_s(mode, 800, ahead_s) == pytest.approx(ring_s)
    assert measured.mode_s(mode, 800, ahead_s) == pytest.approx(measured_s)
    assert replace(RING, num_devices=1).mode_s(mode, 800, ahead_s) == 0.0
    assert replace(measured, num_devices=1).mode_s(mode, 800, ahead_s) == 0.0


@pytest.mark.parametrize(
    ("overlap", "waited"),
    [
        (0.0, 1 + 1 + 1),
        (1.0, 0 + 1 + 0.5),  # of computation that lasts longer, not at all, and half as long
        (0.25, 0.5 + 1 + 0.875),
    ],
)
def test_a_gather_is_hidden_behind_computation(overlap: float, waited: float) -> None:
    """Of three gathers, behind twice their own time, nothing and half of it. What a gather needs from the engine is
    not hidden, nor is the reduction."""
    ring = replace(RING, overlap=overlap)
    one_s, gather_s = PASS_S + 3, 2 + 200
    assert ring.mode_s("sharded", 800, [2 * one_s, 0.0, one_s / 2]) == pytest.approx((waited + 1) * one_s)
    assert ring.mode_s("zero1", 800, [2 * one_s] * 3) == RING.mode_s("zero1", 800, [0.0])
    measured = Links(num_devices=4, measured=COSTS, handling_s=7.0, overlap=overlap)
    ahead_s = [2.0 * gather_s, 0.0, gather_s / 2]
    assert measured.mode_s("sharded", 800, ahead_s) == pytest.approx(waited * gather_s + 4 + 100 + 4 * 7)


def test_gathers_are_hidden_behind_the_computation_of_the_batch() -> None:
    """By the part of the operator that a slice is, and only where the next one is gathered meanwhile."""
    op, ring = operator(slices=2, gathers=2, ahead_s=(1.0, 2.0)), replace(RING, overlap=0.5)
    found = problem(op, links=ring, prefetch=True, batch=4)
    assert found.slice_seconds(op, "sharded") == ring.mode_s("sharded", 400, [4 * 1.0 / 2, 4 * 2.0 / 2])
    assert found.hides
    for plain in (replace(found, prefetch=False), replace(found, links=RING)):
        assert not plain.hides
        assert plain.slice_seconds(op, "sharded") == RING.mode_s("sharded", 400, [0.0, 0.0])
    assert not problem(operator(), links=ring, prefetch=True).hides


def test_every_batch_hides_as_much_as_it_computes() -> None:
    """By hand: 3 samples leave no room for replication, 2 do. Sharded, a step of 3 has four passes less what is hidden;
    a third of that is more than a pass, half of two."""
    op = operator(gathers=3, ahead_s=(0.5, 1.0, 0.5), activation_bytes=1000)
    links = replace(RING, launch_s=0.0, overlap=1.0)
    given = problem(op, links=links, prefetch=True, memory_bytes=2800 + 2999, modes=("replicated", "sharded"))
    plan = solve([given], range(1, 4))
    assert (plan.batch, plan.slices, plan.problem.batch) == (2, ((1, 0),), 2)
    assert plan.seconds_per_sample == pytest.approx(2 * PASS_S / 2)
    assert plan.proven
    assert plan.lower_bound_s == pytest.approx(plan.seconds_per_sample)
    most = solve([given], range(3, 4))
    assert most.seconds_per_sample == pytest.approx((4 * PASS_S - 3 * (0.5 + 1.0 + 0.5)) / 3)
    of_one = uniform_plan(given, "sharded", range(1, 4))
    assert of_one is not None
    assert (of_one.batch, of_one.step_s) == (3, pytest.approx(most.step_s))


# --- problems


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"memory_bytes": 0}, "memory_bytes=0 must be at least 1"),
        ({"modes": ()}, "modes= must be some of replicated, zero1, sharded, each once"),
        ({"modes": ("zero1", "zero3")}, "modes=zero1,zero3 must be some of replicated, zero1, sharded, each once"),
        ({"modes": ("zero1", "zero1")}, "modes=zero1,zero1 must be some of replicated, zero1, sharded, each once"),
        ({"operators": (operator(slices=0),)}, "operator op: slices=0 must be at least 1, at most 64"),
        ({"operators": (operator(slices=3, most_slices=2),)}, "operator op: slices=3 must be at least 1, at most 2"),
        (
            {"operators": (operator(modes=("zero1", "replicated")),), "modes": ("sharded",)},
            "operator op can be zero1, replicated, and modes=sharded has none of these; add one",
        ),
    ],
)
def test_problems_that_are_none(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=re.escape(text)):
        replace(problem(), **changes)


def test_the_least_problem() -> None:
    assert problem(operator(slices=2, most_slices=2), memory_bytes=1).modes == MODES
    assert problem(operator(slices=1)).operators[0].state_bytes == 2800
    assert problem(operator(modes=("zero1",)), modes=("sharded", "zero1"))


def test_needs_of_a_sample() -> None:
    operators = operator(activation_bytes=10, compute_s=0.5), operator(activation_bytes=20, compute_s=0.25)
    assert problem(*operators).bytes_per_sample == 30
    assert problem(*operators).seconds_per_sample == 0.75
    more = problem(*operators, extra_bytes_per_sample=7, extra_seconds_per_sample=2.0)
    assert (more.bytes_per_sample, more.seconds_per_sample) == (37, 2.75)


@pytest.mark.parametrize(
    ("mode", "update_s", "accumulate_s"),
    [("replicated", 16 / 2, 8 / 2), ("zero1", 16 / 4 / 2, 8 / 2), ("sharded", 16 / 4 / 2, 8 / 4 / 2)],
)
def test_updates_are_divided_where_states_are(mode: Any, update_s: float, accumulate_s: float) -> None:
    """By the four devices, and by the two slices."""
    op = operator(slices=2, update_s=16.0, accumulate_s=8.0)
    assert problem(op).slice_seconds(op, mode) == pytest.approx(update_s + accumulate_s)
    ring = problem(op, links=RING)
    assert ring.slice_seconds(op, mode) == pytest.approx(RING.mode_s(mode, 400, TWO) + update_s + accumulate_s)


@pytest.mark.parametrize(
    ("recompute", "own", "gathers"), [(False, None, 2), (True, None, 3), (True, 1, 1), (False, 5, 5)]
)
def test_how_often_a_slice_is_gathered(recompute: bool, own: int | None, gathers: int) -> None:
    op = operator(gathers=own)
    found = problem(op, recompute=recompute, links=RING)
    assert found.gathers_of(op) == gathers
    assert found.slice_seconds(op, "sharded") == pytest.approx(RING.mode_s("sharded", 800, [0.0] * gathers))


def test_states_are_counted_in_parts_while_64_bits_hold_them() -> None:
    """Four devices and slices of 2 and 3: in 24 parts; on one device 2**61 parts are too many."""
    operators = operator(slices=2), operator(slices=3)
    assert problem(*operators).parts_per_byte == 24
    assert problem(operator(), memory_bytes=2**59 - 1).parts_per_byte == 4
    assert problem(operator(), memory_bytes=2**59).parts_per_byte == 1


@pytest.mark.parametrize(
    ("mode", "whole", "divided"), [("replicated", 2800, 0), ("zero1", 1200, 1600), ("sharded", 0, 2800)]
)
def test_states_of_a_slice(mode: Any, whole: int, divided: int) -> None:
    op = operator(slices=3)
    assert problem(op).slice_parts(op, mode) == (whole * 4 + divided) * 12 // (4 * 3)
    rounded = problem(op, memory_bytes=2**60)
    assert rounded.slice_parts(op, mode) == -(-(whole * 4 + divided) // 12)


@pytest.mark.parametrize(
    ("prefetch", "reduces_whole", "expected"),
    [(False, False, 267), (True, False, 534), (False, True, 267 + 134), (True, True, 534 + 134)],
)
def test_what_is_gathered_of_a_slice(prefetch: bool, reduces_whole: bool, expected: int) -> None:
    """A third of 800 bytes, rounded up, and of gradients of 400."""
    op = operator(slices=3)
    assert problem(op, prefetch=prefetch, reduces_whole=reduces_whole).gather_bytes(op) == expected


def test_a_mode_that_stands_for_another() -> None:
    """The last one of those asked for that the operator can be in."""
    op = operator(modes=("replicated", "zero1"))
    assert problem(op).possible(op, "zero1") == "zero1"
    assert problem(op).possible(op, "sharded") == "zero1"
    assert problem(op, modes=("zero1", "replicated", "sharded")).possible(op, "sharded") == "replicated"


# --- plans


def test_a_plan_in_numbers() -> None:
    """An operator in two slices, one of them sharded, and one that is whole; in float seconds and whole bytes."""
    a = operator("a", slices=2, activation_bytes=10, compute_s=0.5)
    b = operator("b", optimizer_bytes=401, activation_bytes=5, compute_s=0.25)
    given = problem(a, b, links=RING, extra_bytes=7, modes=("zero1", "sharded"))
    plan = OsdpPlan(problem=given, batch=3, slices=((1, 1), (1, 0)))
    assert (plan.lower_bound_s, plan.proven, plan.search_s) == (0.0, False, 0.0)
    assert list(plan.counts()) == [(a, "zero1", 1), (a, "sharded", 1), (b, "zero1", 1), (b, "sharded", 0)]
    communication_s = sum(RING.mode_s(*each, TWO) for each in (("zero1", 400), ("sharded", 400), ("zero1", 800)))
    assert plan.communication_s == pytest.approx(communication_s)
    assert plan.step_s == pytest.approx(communication_s + 3 * 0.75)
    assert plan.seconds_per_sample == pytest.approx(plan.step_s / 3)
    assert plan.samples_per_s == pytest.approx(4 * 3 / plan.step_s)
    # 600 + 800 / 4 with ZeRO-1, 1400 / 4 sharded, and 1200 + 401 / 4, together rounded up; 400 gathered.
    assert plan.memory_bytes == 600 + 200 + 350 + 1200 + 101 + 400 + 7 + 3 * 15
    whole = replace(plan, slices=((2, 0), (1, 0)))
    assert whole.memory_bytes == 1200 + 400 + 1200 + 101 + 7 + 3 * 15, "nothing is gathered"


def test_the_largest_gather_counts() -> None:
    operators = (
        operator("a", parameter_bytes=100),
        operator("b", parameter_bytes=300),
        operator("c", parameter_bytes=900),
    )
    plan = OsdpPlan(problem=problem(*operators), batch=1, slices=((0, 0, 1), (0, 0, 1), (0, 1, 0)))
    assert plan.memory_bytes == (2100 + 2300) // 4 + (900 + 400 + 400) + 300


@pytest.mark.parametrize("batches", [range(3, 3), range(3), range(1, 9, 2)])
def test_batches_that_are_no_range(batches: range) -> None:
    with pytest.raises(UserError, match=re.escape(f"batches={batches} must be a range of one or more batches, from 1")):
        solve([problem()], batches)


def test_the_best_of_several_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one with the least seconds a sample; and how long that took."""
    fast, slow = (problem(operator(compute_s=seconds), links=RING) for seconds in (1.0, 2.0))
    for given in ([fast, slow], [slow, fast]):
        ticks = iter((10.0, 12.5))
        clock = SimpleNamespace(perf_counter=lambda ticks=ticks: next(ticks))
        monkeypatch.setattr(osdp_problem, "time", clock)
        found = solve(given, range(1, 4))
        assert (found.problem, found.batch) == (fast, 3)
        assert found.slices == ((1, 0, 0),)
        assert found.proven
        assert found.lower_bound_s == pytest.approx(found.seconds_per_sample)
        assert found.search_s == 2.5


def test_the_time_limit_is_that_of_each_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    found = {"feasible": True, "batch": 2, "slices": [[1, 0, 0]], "step_s": 0.0, "lower_bound_s": 0.0, "proven": True}
    found["cuts"] = [0]

    def solution(*given: Any) -> Any:
        seen.append(given)
        return found

    monkeypatch.setattr(osdp_problem, "_solution", solution)
    a, b = problem(), problem(operator("b"))
    solve([a, b], range(2, 3), time_limit_s=7.0)
    assert seen == [(a, range(2, 3), 7.0), (b, range(2, 3), 7.0)]
    solve([a], range(2, 3))
    assert seen[-1] == (a, range(2, 3), 1.0)


def test_what_the_solver_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes in parts, and for a mode that an operator cannot be in, what stands for it."""
    asked: dict[str, Any] = {}
    rigid = operator("b", modes=("replicated", "zero1"), activation_bytes=5, compute_s=0.5)
    given = problem(operator("a", slices=3), rigid, links=RING, memory_bytes=10**6, extra_bytes=100)

    def solver(**values: Any) -> Any:
        asked.update(values)
        return {"smallest_fixed_bytes": 25, "slices": [[1, 1, 1], [0, 1, 0]]}

    monkeypatch.setattr(osdp_problem._search, "solve_osdp", solver)
    found: Any = osdp_problem._solution(given, range(2, 6), 9.0)
    a, b = given.operators

    def rows(op: Operator, *modes: Any) -> list[tuple[float, int, bool]]:
        return [(given.slice_seconds(op, mode), given.slice_parts(op, mode), mode == "sharded") for mode in modes]

    assert given.parts_per_byte == 12
    assert asked["operators"] == [
        [(3, 12 * given.gather_bytes(a), rows(a, "replicated", "zero1", "sharded"))],
        [(1, 12 * given.gather_bytes(b), rows(b, "replicated", "zero1", "zero1"))],
    ]
    del asked["operators"]
    assert asked == {
        "memory_bytes": (10**6 - 100) * 12, "bytes_per_sample": 5 * 12, "seconds_per_sample": 0.5,
        "min_batch": 2, "max_batch": 5, "time_limit_s": 9.0,
    }  # fmt: skip
    assert found["smallest_fixed_bytes"] == 3 + 100  # 25 / 12, rounded up
    assert found["slices"] == [[1, 1, 1], [0, 1, 0]]
    monkeypatch.setattr(
        osdp_problem._search, "solve_osdp",
        lambda **_: {"smallest_fixed_bytes": 24, "slices": [[0, 0, 3], [0, 0, 1]]},
    )  # fmt: skip
    found = osdp_problem._solution(given, range(2, 6), 9.0)
    assert found["slices"] == [[0, 0, 3], [0, 1, 0]], "the other stands for sharded"
    assert found["smallest_fixed_bytes"] == 2 + 100
    cut = replace(given, operators=(replace(a, cuts=(2, 5)), rigid))
    monkeypatch.setattr(osdp_problem._search, "solve_osdp", solver)
    osdp_problem._solution(cut, range(2, 6), 9.0)
    assert cut.parts_per_byte == 4 * 2 * 5
    given = replace(cut, operators=(replace(a, slices=10), rigid))  # with the same parts
    assert asked["operators"][0] == [
        (slices, 40 * given.gather_bytes(each), rows(each, "replicated", "zero1", "sharded"))
        for slices in (2, 5) for each in [replace(a, slices=slices)]
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("memory", "activation", "batch", "text"),
    [
        # Sharded: 2800 / 4 and 800 gathered; 10 a sample.
        (
            1000, 10, 1,
            "memory_bytes=1000 (9.313e-07 GiB) holds no choice of modes with batch=1 on each of 4 devices; the "
            "smallest memory that does is 1510 bytes (0.0001 GiB)",
        ),
        (1509, 10, 1, "is 1510 bytes (0.0001 GiB)"),
        (1510, 10, 2, "is 1520 bytes (0.0001 GiB), and the largest batch that fits is 1"),
        (1539, 10, 5, "is 1550 bytes (0.0001 GiB), and the largest batch that fits is 3"),
        (1000, 0, 7, "is 1500 bytes (0.0001 GiB)"),
    ],
)  # fmt: skip
def test_what_would_fit(memory: int, activation: int, batch: int, text: str) -> None:
    given = problem(operator(activation_bytes=activation), memory_bytes=memory)
    smaller_slices = replace(given, operators=(replace(given.operators[0], parameter_bytes=10**6),))
    with pytest.raises(UserError, match=re.escape(text) + "$"):
        solve([smaller_slices, given, smaller_slices], range(batch, batch + 3))


@pytest.mark.parametrize(
    ("size_bytes", "text"), [(GIB, "1"), (GIB + 1, "1.0001"), (3 * GIB // 2, "1.5"), (1, "0.0001"), (0, "0")]
)
def test_gib_that_are_enough(size_bytes: int, text: str) -> None:
    assert gib_above(size_bytes) == text


def test_one_mode_for_all_with_the_largest_batch() -> None:
    given = problem(operator(activation_bytes=100), memory_bytes=2800 + 350)
    found = uniform_plan(given, "replicated", range(1, 9))
    assert found is not None
    assert (found.batch, found.slices, found.problem.modes) == (3, ((1,),), ("replicated",))
    assert uniform_plan(given, "replicated", range(3, 4)) is not None
    assert uniform_plan(given, "replicated", range(4, 9)) is None
    exactly = uniform_plan(replace(given, memory_bytes=3000), "replicated", range(1, 9))
    assert exactly is not None
    assert exactly.batch == 2
    rigid = replace(given, operators=(*given.operators, operator("b", modes=("zero1",))), memory_bytes=GIB)
    for asked, modes, slices in (
        ("sharded", ("sharded", "zero1"), ((1, 0), (0, 1))), ("zero1", ("zero1",), ((1,), (1,))),
    ):  # fmt: skip
        found = uniform_plan(rigid, asked, range(1, 2))  # type: ignore[arg-type]
        assert found is not None
        assert (found.problem.modes, found.slices) == (modes, slices)


def test_given_modes_of_slices() -> None:
    given = problem(operator("a", slices=3), operator("b"), memory_bytes=GIB)
    modes: Any = [["sharded", "zero1", "sharded"], ["replicated"]]
    found = given_plan(given, modes, range(1, 5))
    assert found == OsdpPlan(problem=given, batch=4, slices=((0, 1, 2), (1, 0, 0)))
    assert given_plan(replace(given, memory_bytes=1), modes, range(1, 5)) is None


@pytest.mark.parametrize(
    ("parameter_bytes", "most_slices", "expected"),
    [
        (SMALLEST_SLICED_BYTES, MOST_SLICES, 4),
        (SMALLEST_SLICED_BYTES - 1, MOST_SLICES, 1),
        (SMALLEST_SLICED_BYTES, 2, 2),
        (SMALLEST_SLICED_BYTES, 1, 1),
    ],
)
def test_large_operators_are_cut(parameter_bytes: int, most_slices: int, expected: int) -> None:
    small = operator("small", slices=2)
    given = problem(operator("a", parameter_bytes=parameter_bytes, most_slices=most_slices, slices=1), small)
    found = sliced(given, 4)
    assert [op.slices for op in found.operators] == [expected, 1]
    assert replace(found, operators=given.operators) == given
    chosen = with_cuts(given, 3).operators
    assert [op.cuts for op in chosen] == [tuple(n for n in (1, 2, 3) if n <= expected), (1,)]
    assert [op.cuts for op in with_cuts(given, 1).operators] == [(1,), (1,)]
    assert SMALLEST_SLICED_BYTES == 2**20
