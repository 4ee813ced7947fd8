"""The whole search of plans, and a search near a plan, each part on stand-ins for the others."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from realhf.dataflow.plan import CallCompute, CallPlan, ExecutionPlan
from realhf.geometry.layout import DeviceMesh
from realhf.planning import search
from realhf.planning.certificate import Certificate
from realhf.planning.predict import Prediction
from realhf.planning.presets import PresetResult
from realhf.planning.problem.native import DeviceNeed
from realhf.planning.request import SearchBudget, unwatched
from realhf.planning.search import NothingFitsError, SearchResult
from realhf.planning.task import PlanningTask
from tests.unit.planning.graphs import cpu_cluster, ppo, settings, task_of

TASK = task_of(ppo(), seed=7, **settings(ppo(), cpu_cluster(4)))


LARGE = replace(TASK, cluster=cpu_cluster(4, num_nodes=17))  # 68 devices


NOTES = {"seed": 1, "lower_bound_s": 0.25, "proven_optimal": True}


COPYING = CallPlan(devices=(0, 1), copy_from="other")


GIB = 2.0**30


def predicted(
    step_s: float,
    *,
    offload: tuple[str, ...] = (),
    calls: Mapping[str, CallPlan] | None = None,
    fits: bool = True,
    peak_bytes: float = GIB,
) -> Prediction:
    plan = ExecutionPlan(
        num_devices=4, calls=dict(calls or {}), offload=offload, predicted_step_s=step_s, notes=dict(NOTES)
    )
    need = DeviceNeed(communicator_bytes=0.0, static_bytes=0.0, peak_bytes=peak_bytes)
    return Prediction(plan=plan, call_s={}, transfer_s={}, step_s=step_s, needs=[need], fits=fits)


def result_of(
    step_s: float, *, evaluations: int = 10, rules: Sequence[PresetResult] = (), **words: Any
) -> SearchResult:
    return SearchResult(
        prediction=predicted(step_s, **words),
        certificate=Certificate(cost_s=step_s, lower_bound_s=0.5, proven=False),
        evaluations=evaluations,
        evaluations_per_s=5.0,
        trace=(),
        num_options={"a": 3},
        rules=tuple(rules),
    )


def nothing_fits(smallest_bytes: float = 3 * GIB, offload: tuple[str, ...] = ()) -> NothingFitsError:
    return NothingFitsError(smallest_bytes, TASK.cluster, offload)


def budget_clock(monkeypatch: pytest.MonkeyPatch, budget: SearchBudget) -> tuple[search._Clock, SimpleNamespace]:
    """A clock that begins now, and the time, which stands still."""
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(search, "time", SimpleNamespace(perf_counter=lambda: now.s))
    return search._Clock(budget, begun=100.0), now


@pytest.mark.parametrize(
    ("numbers", "evaluations"),
    [((999,), 20_000), ((1001,), 20_020), ((1001, 500), 30_020), ((99_999, 1), 2_000_000), ((100_001,), 2_000_000)],
)
def test_a_budget_of_twenty_plans_for_each_option(numbers: Sequence[int], evaluations: int) -> None:
    options: Any = {str(place): range(number) for place, number in enumerate(numbers)}
    assert search.default_evaluations(options) == evaluations


def test_a_clock_counts_from_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, now = budget_clock(monkeypatch, SearchBudget(seconds=7))
    now.s = 102.0
    assert (clock.passed_s, clock.left_s) == (2.0, 5.0)
    assert search._Clock(SearchBudget(evaluations=1), begun=100.0).left_s == math.inf


# --- the whole search


@pytest.mark.parametrize(
    ("task", "part"),
    [(TASK, 1.0), (LARGE, 0.8), (replace(LARGE, breadth="plain"), 1.0), (replace(TASK, breadth="plain"), 1.0)],
)
def test_a_search_near_the_plan_follows_where_not_all_was_searched_by_itself(
    task: PlanningTask, part: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a fifth of the budget; a breadth that was asked for is what is searched."""
    asked: list[Any] = []
    first, best, wider = search._Sets([result_of(1.0)], [], 1), result_of(0.9), result_of(0.8)
    near = search._Sets([wider], [], 1)

    def sets(of: Any, clock: Any, watch: Any, *, part: float) -> search._Sets:
        assert (of, clock.budget, watch) == (task, budget, unwatched)
        asked.append(part)
        return first

    def near_of(of: Any, clock: Any, found: Any, watch: Any) -> search._Sets:
        assert (of, clock.budget, found, watch) == (task, budget, first, unwatched)
        return near

    budget = SearchBudget(evaluations=10)
    monkeypatch.setattr(search, "_search_sets", sets)
    monkeypatch.setattr(search, "_search_near", near_of)
    monkeypatch.setattr(search, "_best_of", lambda of, found: best if (of, found) == (task, first) else None)
    both = [task, best, near]
    monkeypatch.setattr(search, "_with_wider", lambda *words: wider if list(words) == both else None)
    assert search.search_plan(task, budget) is (best if part == 1.0 else wider)
    assert asked == [part]


def test_where_nothing_fits_the_smallest_plan_of_all_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter(([3 * GIB, 2 * GIB], [1.0 * GIB]))

    def sets(*_: Any, **__: Any) -> search._Sets:
        return search._Sets([], [nothing_fits(size) for size in next(sizes)], 1)

    monkeypatch.setattr(search, "_search_sets", sets)
    monkeypatch.setattr(search, "_search_near", sets)
    with pytest.raises(NothingFitsError, match=r"needs 1\.00 GiB"):
        search.search_plan(LARGE, SearchBudget())


# --- near a plan


class Near:
    """Stands in for what a search near a plan asks; `ways` by the number of its meshes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ways: Mapping[int, int], breadth: str | None = "all") -> None:
        self.asked: list[Any] = []
        self.left_s = list[float]()
        self.found = search._Sets([result_of(1.0)], [], 1)
        monkeypatch.setattr(search, "num_ways", lambda task: ways[len(task.near)])

        def in_time(task: PlanningTask, left_s: float) -> str | None:
            self.left_s.append(left_s)
            return breadth

        def sets(task: Any, clock: search._Clock, watch: Any, *, begins: Any) -> search._Sets:
            self.asked.append((task.near, task.breadth, clock.budget, watch, begins))
            return self.found

        monkeypatch.setattr(search, "breadth_in_time", in_time)
        monkeypatch.setattr(search, "_search_sets", sets)


ON = {name: CallPlan(devices=(first, 2)) for name, first in (("a", 2), ("b", 0), ("c", 2))}


@pytest.mark.parametrize(
    ("budget", "evaluations", "seconds"),
    [
        (SearchBudget(evaluations=1000), 200, None),
        (SearchBudget(evaluations=1), 1, None),
        (SearchBudget(seconds=5.0), None, 5.0),
        (SearchBudget(), None, None),
    ],
)
def test_a_search_near_the_best_plan_is_on_its_meshes(
    budget: SearchBudget, evaluations: int | None, seconds: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = Near(monkeypatch, {2: search.MOST_WAYS_NEAR})
    clock, _ = budget_clock(monkeypatch, budget)
    best = result_of(1.0, calls=ON)
    sets = search._Sets([result_of(2.0), best], [], 1)
    assert search._search_near(LARGE, clock, sets, unwatched) is near.found
    meshes = (DeviceMesh(2, 2), DeviceMesh(0, 2))
    rest = SearchBudget(evaluations=evaluations, seconds=seconds)
    assert near.asked == [(meshes, "all", rest, unwatched, best)]
    assert near.left_s == [clock.left_s]


def test_where_no_plan_was_found_it_is_on_the_cluster_and_its_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    near = Near(monkeypatch, {3: 30_000})
    clock, _ = budget_clock(monkeypatch, SearchBudget(evaluations=100))
    search._search_near(TASK, clock, search._Sets([], [nothing_fits()], 1), unwatched)
    [(meshes, *_, begins)] = near.asked
    assert (meshes, begins) == ((DeviceMesh(0, 4), DeviceMesh(0, 2), DeviceMesh(2, 2)), None)


@pytest.mark.parametrize(("most", "kept"), [(30_000, 2), (30_001, 1)])
def test_too_many_ways_are_searched_on_fewer_meshes(most: int, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one they are searched however many there are."""
    near = Near(monkeypatch, {3: 40_000, 2: most, 1: 50_000})
    clock, _ = budget_clock(monkeypatch, SearchBudget(evaluations=100))
    search._search_near(TASK, clock, search._Sets([], [], 1), unwatched)
    meshes = near.asked[0][0]
    assert meshes == (DeviceMesh(0, 4), DeviceMesh(0, 2))[:kept]


def test_there_is_no_search_near_a_plan_without_time_for_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    near = Near(monkeypatch, {3: 1}, breadth="computation")
    clock, now = budget_clock(monkeypatch, SearchBudget(seconds=1.0))
    assert search._search_near(TASK, clock, search._Sets([], [], 1), unwatched) == search._Sets([], [], 0)
    assert near.asked == []
    near = Near(monkeypatch, {3: 1})
    now.s += 2.0
    search._search_near(TASK, clock, search._Sets([], [], 1), unwatched)
    assert near.asked[0][2].seconds == 0.01, "the least that a budget can have"


# --- the faster one of both searches


def wider_of(monkeypatch: pytest.MonkeyPatch, best: SearchResult | None, wider: SearchResult | None) -> Any:
    monkeypatch.setattr(search, "_best_of", lambda task, sets: sets.results[0])
    return search._with_wider(TASK, best, search._Sets([wider] if wider else [], [], 1))


def test_one_search_alone_is_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    one = result_of(1.0)
    assert wider_of(monkeypatch, one, None) is one
    assert wider_of(monkeypatch, None, one) is one
    assert wider_of(monkeypatch, None, None) is None


@pytest.mark.parametrize("step_s", [1.0, 1.1, 1.0 - 1e-10, 1.0 - 1e-9])
def test_a_wider_search_that_finds_nothing_faster_counts_its_plans(
    step_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = result_of(1.0, evaluations=10)
    found = wider_of(monkeypatch, best, result_of(step_s, evaluations=5))
    assert found == replace(best, evaluations=15)


@pytest.mark.parametrize(
    "words",
    [
        {"offload": ("ref",)},
        {"calls": {**ON, "a": CallPlan(devices=(0, 2), pp=2, chunks=2)}},
        {"calls": {**ON, "a": CallPlan(devices=(0, 2), pp=2, compute=CallCompute(kv_cache_tokens=64))}},
    ],
    ids=["offload", "chunks", "room"],
)
def test_a_wider_plan_is_none_of_those_that_the_proof_is_about(
    words: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    best, wider = result_of(1.0, evaluations=10), result_of(0.9, evaluations=5, **words)
    found = wider_of(monkeypatch, best, wider)
    assert found.certificate == replace(best.certificate, wider_s=0.9)
    assert found.plan.notes == {"seed": 1, "peak_memory_gib": 1.0}
    assert (found.prediction.step_s, found.evaluations, found.plan.calls) == (0.9, 15, wider.plan.calls)
    copying = wider_of(monkeypatch, best, result_of(0.9, offload=("ref",), calls={"a": COPYING}))
    assert copying.certificate == replace(best.certificate, wider_s=0.9, copying_s=0.9)


def test_a_faster_plan_that_is_not_wider_is_one_of_those(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless its copies come from elsewhere, it has the proof of the first search in its notes."""
    best, wider = result_of(1.0, evaluations=10), result_of(0.9, evaluations=5, calls=ON)
    wider = replace(wider, certificate=replace(wider.certificate, cost_s=0.8, lower_bound_s=0.1))
    found = wider_of(monkeypatch, best, wider)
    assert found.certificate == replace(best.certificate, cost_s=0.8)
    assert (found.prediction.step_s, found.evaluations, found.plan.calls) == (0.9, 15, ON)
    proof = {"lower_bound_s": 0.5, "proven_optimal": False}
    assert found.plan.notes == {"seed": 1, "peak_memory_gib": 1.0, **proof}
    copying = wider_of(monkeypatch, best, result_of(0.9, calls={"a": COPYING}))
    assert copying.certificate == replace(best.certificate, cost_s=0.9, copying_s=0.9)
    assert copying.plan.notes == {"seed": 1, "peak_memory_gib": 1.0}
