"""What a search of plans is made of, each part on stand-ins for the others: budgets, sets of models in host memory,
what is searched near a plan, and what is said of the answer."""

import gc
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from realhf.base.errors import UserError
from realhf.dataflow.plan import CallPlan, ExecutionPlan
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.planning import search
from realhf.planning.certificate import Certificate
from realhf.planning.options import Option
from realhf.planning.predict import Prediction
from realhf.planning.presets import PresetResult
from realhf.planning.problem.simulation import DeviceNeed
from realhf.planning.request import SearchBudget, unwatched
from realhf.planning.search import NothingFitsError, SearchResult
from realhf.planning.task import PlanningTask
from tests.unit.planning.graphs import cpu_cluster, ppo, settings, task_of

TASK = task_of(ppo(), **settings(ppo(), cpu_cluster(4)))
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

    def sets(of: Any, clock: Any, seed: int, watch: Any, *, part: float) -> search._Sets:
        assert (of, clock.budget, seed, watch) == (task, budget, 7, unwatched)
        asked.append(part)
        return first

    def near_of(of: Any, clock: Any, found: Any, seed: int, watch: Any) -> search._Sets:
        assert (of, clock.budget, found, seed, watch) == (task, budget, first, 7, unwatched)
        return near

    budget = SearchBudget(evaluations=10)
    monkeypatch.setattr(search, "_search_sets", sets)
    monkeypatch.setattr(search, "_search_near", near_of)
    monkeypatch.setattr(search, "_best_of", lambda of, found: best if (of, found) == (task, first) else None)
    both = [task, best, near]
    monkeypatch.setattr(search, "_with_wider", lambda *words: wider if list(words) == both else None)
    assert search.search_plan(task, budget, 7) is (best if part == 1.0 else wider)
    assert asked == [part]


def test_where_nothing_fits_the_smallest_plan_of_all_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter(([3 * GIB, 2 * GIB], [1.0 * GIB]))

    def sets(*_: Any, **__: Any) -> search._Sets:
        return search._Sets([], [nothing_fits(size) for size in next(sizes)], 1)

    monkeypatch.setattr(search, "_search_sets", sets)
    monkeypatch.setattr(search, "_search_near", sets)
    with pytest.raises(NothingFitsError, match=r"needs 1\.00 GiB"):
        search.search_plan(LARGE, SearchBudget(), 0)


def test_models_that_are_none_are_refused_before_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_search_sets", None)
    with pytest.raises(UserError, match="'nobody' is no model"):
        search.search_plan(replace(TASK, offload=("nobody",)), SearchBudget(), 0)


# --- sets of models in host memory


class Searches:
    """Stands in for the searches of sets of models: each takes `seconds` of which `preparing` are no search, looks at
    `breadths` and finds plans of `found` by what waits (None: nothing fits). Keeps what it was asked."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        waiting: Sequence[tuple[str, ...]],
        found: Mapping[tuple[str, ...], float | None],
        *,
        breadths: Sequence[str] = ("all",),
        budget: SearchBudget | None = None,
        seconds: Sequence[float] = (),
        preparing: Sequence[float] = (),
        needed: tuple[str, ...] = (),
        rules: Sequence[PresetResult] = (),
    ) -> None:
        self.found, self.breadths, self.rules, self.needed = found, list(breadths), list(rules), needed
        self.clock, self.now = budget_clock(monkeypatch, budget or SearchBudget(evaluations=1000))
        self.seconds, self.preparing = iter(seconds), iter(preparing)
        self.shares, self.known, self.searched, self.asked_rules = [], [], [], []  # type: ignore[var-annotated]
        self.some_rule_fits, self.asked_needed = list[bool](), list[float]()
        self.prepared: list[Any] = []
        monkeypatch.setattr(search, "offloads", lambda task: list(waiting))
        monkeypatch.setattr(search, "evaluate_presets", self._rules)
        monkeypatch.setattr(search, "_breadths", self._breadths)
        monkeypatch.setattr(search, "_prepare", self._prepare)
        monkeypatch.setattr(search, "search_problem", self._search)
        monkeypatch.setattr(search, "_result", self._result)
        monkeypatch.setattr(search, "_needed_offload", self._needed)

    def _rules(self, task: PlanningTask, watch: Any) -> list[PresetResult]:
        assert watch is unwatched
        self.asked_rules.append(task.offload)
        return list(self.rules)

    def _breadths(self, task: PlanningTask, left_s: float, *, some_rule_fits: bool) -> list[str]:
        assert left_s == self.clock.left_s
        self.some_rule_fits.append(some_rule_fits)
        return self.breadths

    def _prepare(self, task: PlanningTask, rules: Any, known: list[Prediction], watch: Any) -> Any:
        assert watch is unwatched
        self.known.append(known)
        self.prepared.append(task.breadth)
        self.now.s += next(self.preparing, 0.0)

        def request(clock: Any, share: float, seed: int) -> tuple[float, int]:
            assert clock is self.clock
            return share, seed

        return SimpleNamespace(task=task, native=task.offload, request=request, rules=rules)

    def _search(self, native: Any, request: tuple[float, int], watch: Any) -> Any:
        assert watch is unwatched
        assert request[1] == 7
        self.searched.append(native)
        self.shares.append(request[0])
        took_s = next(self.seconds, 0.0)
        self.now.s += took_s
        return SimpleNamespace(feasible=self.found[native] is not None, seconds=took_s)

    def _result(self, prepared: Any, found: Any, seed: int) -> SearchResult:
        assert seed == 7
        step_s = self.found[prepared.native]
        if step_s is None:
            raise nothing_fits(offload=prepared.native)
        return result_of(step_s, offload=prepared.native, rules=prepared.rules)

    def _needed(self, task: PlanningTask, prediction: Prediction) -> tuple[str, ...]:
        self.asked_needed.append(prediction.step_s)
        return self.needed

    def run(self, **words: Any) -> search._Sets:
        return search._search_sets(TASK, self.clock, 7, unwatched, **words)


def test_one_set_of_models_has_all_of_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Searches(monkeypatch, [()], {(): 1.0})
    found = one.run()
    assert (one.searched, one.shares, one.asked_needed) == ([()], [1.0], [])
    assert ([each.prediction.step_s for each in found.results], found.errors, found.number) == ([1.0], [], 1)
    part = Searches(monkeypatch, [()], {(): 1.0})
    part.run(part=0.5)
    assert part.shares == [0.5]


def test_further_sets_have_a_fifth_of_the_budget_each_and_the_first_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one is what the best plan needs of its models in host memory."""
    sets = Searches(monkeypatch, [(), ("b",), ("a", "b")], {(): 3.0, ("b",): 2.0, ("a", "b"): 1.0, ("a",): 4.0})
    sets.needed = ("a",)
    found = sets.run()
    assert sets.searched == [(), ("b",), ("a", "b"), ("a",)]
    assert sets.shares == pytest.approx([0.4, 0.2, 0.2, 0.2])
    assert sets.asked_needed == [1.0]
    assert found.number == 4
    assert sets.asked_rules == sets.searched


def test_what_is_needed_of_the_models_is_not_searched_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = Searches(monkeypatch, [(), ("b",)], {(): 3.0, ("b",): 2.0}, needed=())
    assert sets.run().number == 3
    assert (sets.searched, sets.asked_needed) == ([(), ("b",)], [2.0])


def test_where_no_set_fits_none_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = Searches(monkeypatch, [(), ("b",)], {(): None, ("b",): None})
    found = sets.run()
    assert (found.results, len(found.errors), sets.asked_needed) == ([], 2, [])
    assert "with b in host memory" in str(found.errors[1])


def test_a_set_that_fits_follows_one_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = Searches(monkeypatch, [(), ("b",)], {(): None, ("b",): 2.0}, needed=("b",))
    found = sets.run()
    assert (len(found.results), len(found.errors)) == (1, 1)


@pytest.mark.parametrize(("prepared_s", "left_s", "searched"), [(3.0, 2.9, 1), (3.0, 3.1, 2), (0.25, 0.3, 2)])
def test_a_further_set_is_searched_where_there_is_time_to_prepare_it(
    prepared_s: float, left_s: float, searched: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the first took before its search of 5 s."""
    budget = SearchBudget(seconds=5 + prepared_s + left_s)
    waiting = [(), ("b",)]
    sets = Searches(
        monkeypatch, waiting, {(): 2.0, ("b",): 1.0}, budget=budget, seconds=[5.0], preparing=[prepared_s], needed=()
    )
    sets.run()
    assert len(sets.searched) == searched


def test_the_longest_preparation_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """After 3 s and 1 s, 2 s are too few for a third set."""
    sets = Searches(
        monkeypatch,
        [(), ("b",), ("a", "b")],
        {(): 2.0, ("b",): 1.0, ("a", "b"): 1.0},
        budget=SearchBudget(seconds=6),
        preparing=[3.0, 1.0],
    )
    sets.run()
    assert len(sets.searched) == 2
    sets.now.s, sets.preparing = 100.0, iter([1.9, 1.9, 0.0])
    sets.run()
    assert len(sets.searched) == 2 + 3, "each took 1.9 s of the 6 s"


def test_without_a_result_time_does_not_end_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = Searches(
        monkeypatch, [(), ("b",)], {(): None, ("b",): 1.0}, budget=SearchBudget(seconds=1), preparing=[3.0], needed=()
    )
    sets.run()
    assert sets.searched == [(), ("b",)]


def test_the_next_breadth_is_searched_until_a_plan_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = Searches(monkeypatch, [()], {(): None}, breadths=["plain", "all"])
    nothing.run()
    assert (nothing.searched, nothing.prepared) == ([(), ()], ["plain", "all"])
    enough = Searches(monkeypatch, [()], {(): 1.0}, breadths=["plain", "all"])
    enough.run()
    assert enough.searched == [()]


def rule(name: str, step_s: float | None, problem: str = "") -> PresetResult:
    return PresetResult(name=name, prediction=None if step_s is None else predicted(step_s), problem=problem)


RULES = (rule("good", 2.0), rule("large", 1.0, "needs too much"), rule("none", None, "no such"), rule("best", 1.5))


def test_the_search_begins_with_the_rules_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = Searches(monkeypatch, [()], {(): 1.0}, rules=RULES)
    [found] = sets.run().results
    assert [[each.step_s for each in known] for known in sets.known] == [[2.0, 1.5]]
    assert (sets.some_rule_fits, found.rules) == ([True], RULES)
    without = Searches(monkeypatch, [()], {(): 1.0}, rules=RULES[1:3])
    without.run()
    assert (without.known, without.some_rule_fits) == ([[]], [False])


def test_without_time_for_a_search_the_best_rule_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = Searches(monkeypatch, [(), ("b",)], {}, breadths=[], rules=RULES)
    found = sets.run()
    assert (sets.searched, sets.asked_rules, [each.prediction.step_s for each in found.results]) == ([], [()], [1.5])
    assert (found.results[0].evaluations, found.results[0].rules) == (0, RULES)


def test_a_search_near_a_plan_takes_over_its_rules_and_begins_there_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the models that wait in that plan; for others there are other rules."""
    begins = result_of(0.7, offload=("b",), rules=RULES)
    sets = Searches(monkeypatch, [(), ("b",)], {(): 1.0, ("b",): 0.5}, rules=(rule("other", 9.0),), needed=())
    sets.run(begins=begins)
    assert sets.asked_rules == [()]
    assert [[each.step_s for each in known] for known in sets.known] == [[9.0], [2.0, 1.5, 0.7]]


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

        def sets(task: Any, clock: search._Clock, seed: int, watch: Any, *, begins: Any) -> search._Sets:
            self.asked.append((task.near, task.breadth, clock.budget, seed, watch, begins))
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
    assert search._search_near(LARGE, clock, sets, 3, unwatched) is near.found
    meshes = (DeviceMesh(2, 2), DeviceMesh(0, 2))
    rest = SearchBudget(evaluations=evaluations, seconds=seconds)
    assert near.asked == [(meshes, "all", rest, 3, unwatched, best)]
    assert near.left_s == [clock.left_s]


def test_where_no_plan_was_found_it_is_on_the_cluster_and_its_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    near = Near(monkeypatch, {3: 30_000})
    clock, _ = budget_clock(monkeypatch, SearchBudget(evaluations=100))
    search._search_near(TASK, clock, search._Sets([], [nothing_fits()], 1), 3, unwatched)
    [(meshes, *_, begins)] = near.asked
    assert (meshes, begins) == ((DeviceMesh(0, 4), DeviceMesh(0, 2), DeviceMesh(2, 2)), None)


@pytest.mark.parametrize(("most", "kept"), [(30_000, 2), (30_001, 1)])
def test_too_many_ways_are_searched_on_fewer_meshes(most: int, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one they are searched however many there are."""
    near = Near(monkeypatch, {3: 40_000, 2: most, 1: 50_000})
    clock, _ = budget_clock(monkeypatch, SearchBudget(evaluations=100))
    search._search_near(TASK, clock, search._Sets([], [], 1), 3, unwatched)
    meshes = near.asked[0][0]
    assert meshes == (DeviceMesh(0, 4), DeviceMesh(0, 2))[:kept]


def test_there_is_no_search_near_a_plan_without_time_for_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    near = Near(monkeypatch, {3: 1}, breadth="computation")
    clock, now = budget_clock(monkeypatch, SearchBudget(seconds=1.0))
    assert search._search_near(TASK, clock, search._Sets([], [], 1), 3, unwatched) == search._Sets([], [], 0)
    assert near.asked == []
    near = Near(monkeypatch, {3: 1})
    now.s += 2.0
    search._search_near(TASK, clock, search._Sets([], [], 1), 3, unwatched)
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
    [{"offload": ("ref",)}, {"calls": {**ON, "a": CallPlan(devices=(0, 2), pp=2, chunks=2)}}],
    ids=["offload", "chunks"],
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


# --- the best of several sets


@pytest.mark.parametrize("number", [1, 2])
def test_the_best_of_several_sets_says_which_models_wait(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_with_best_steps", lambda task, prediction: prediction)
    monkeypatch.setattr(search, "with_best_copies", lambda task, prediction: prediction)
    first, second = result_of(2.0, evaluations=10, rules=RULES), result_of(1.0, evaluations=5, offload=("ref",))
    found = search._best_of(TASK, search._Sets([first, second], [], number))
    offload = ("ref",) if number > 1 else None
    assert found.certificate == replace(second.certificate, offload=offload)
    assert (found.evaluations, found.rules, found.prediction) == (15, RULES, second.prediction)


def test_the_best_plan_has_other_steps_in_flight_and_then_other_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof is not about such copies."""
    fewer, copying = predicted(0.9), predicted(0.8, calls={"a": COPYING}, peak_bytes=2 * GIB)
    best = result_of(1.0)
    monkeypatch.setattr(search, "_with_best_steps", lambda task, found: fewer if found is best.prediction else None)
    monkeypatch.setattr(search, "with_best_copies", lambda task, found: copying if found is fewer else None)
    found = search._best_of(TASK, search._Sets([best], [], 1))
    assert found.certificate == replace(best.certificate, copying_s=0.8)
    assert found.plan.notes == {"seed": 1, "peak_memory_gib": 2.0}
    assert found.prediction.step_s == 0.8


# --- what is searched


@pytest.mark.parametrize(
    ("in_time", "fits", "searched", "breadths"),
    [
        ("computation", True, "all", ["computation"]),
        (None, True, "all", []),
        ("computation", False, "all", ["computation", "all"]),
        (None, False, "all", ["plain", "all"]),
        ("all", False, "all", ["all"]),
        (None, False, "plain", ["plain"]),
    ],
)
def test_what_there_is_time_for_and_where_nothing_is_known_to_fit_all(
    in_time: Any, fits: bool, searched: Any, breadths: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = replace(TASK, breadth=searched)
    monkeypatch.setattr(search, "breadth_in_time", lambda of, left_s: in_time if (of, left_s) == (task, 3.0) else 0)
    assert search._breadths(task, 3.0, some_rule_fits=fits) == breadths
    near = replace(task, near=(DeviceMesh(0, 1),))
    assert search._breadths(near, 3.0, some_rule_fits=fits) == [searched]


@pytest.mark.parametrize(
    ("left_s", "breadth"),
    [(0.25, "all"), (0.24, "computation"), (0.025, "computation"), (0.024, "plain"), (0.002, None)],
)
def test_options_may_take_two_fifths_of_what_is_left(
    left_s: float, breadth: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ten-thousandth of a second each: of 0.25 s, 0.1 s are for 1000 ways."""
    number = {"all": 1000, "computation": 100, "plain": 10}
    monkeypatch.setattr(search, "num_ways", lambda task: number[task.searched])
    assert search.breadth_in_time(TASK, left_s + 1e-9) == breadth
    assert search.breadth_in_time(replace(TASK, breadth="plain"), 1.0) == "plain"


def prepared_of(**words: Any) -> search._Prepared:
    fields: dict[str, Any] = {
        "task": TASK, "rules": [], "known": [], "options": {"a": [0] * 2000}, "num_options": {"a": 3}, "starts": [],
        "native": None, "seconds": 0.0,
    }  # fmt: skip
    return search._Prepared(**fields | words)


@pytest.mark.parametrize(
    ("budget", "share", "seconds", "expected"),
    [
        (SearchBudget(evaluations=1000), 0.5, 4.0, (500, None)),
        (SearchBudget(evaluations=1), 0.2, 4.0, (1, None)),
        (SearchBudget(), 0.5, 4.0, (20_000, None)),
        (SearchBudget(seconds=10), 0.5, 4.0, (20_000, 4.0)),  # half of 10 s without half of 4 s
        (SearchBudget(seconds=10), 0.5, 20.0, (20_000, 0.05)),
    ],
)
def test_a_share_of_what_is_left_beside_what_will_be_said(
    budget: SearchBudget, share: float, seconds: float, expected: tuple[int, float | None], monkeypatch: Any
) -> None:
    clock, _ = budget_clock(monkeypatch, budget)
    request = prepared_of(seconds=seconds, starts=[[1]]).request(clock, share, 3)
    assert (request.budget.evaluations, request.budget.seconds) == expected
    assert (request.seed, request.starts) == (3, [[1]])


def test_tables_are_made_of_the_options_and_of_the_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """An option that only a start has counts among the tables' and not among those of the search."""
    now, said = SimpleNamespace(s=5.0), list[tuple[str, str]]()
    monkeypatch.setattr(search, "time", SimpleNamespace(perf_counter=lambda: now.s))
    name = "actor_train_step"
    rows = {name: [Option(Layout(DeviceMesh(0, 1), ParallelStrategy()), 1)] * 1}
    known = [predicted(1.0, calls={name: CallPlan(devices=(0, 2), dp=2)})]
    monkeypatch.setattr(search, "worthwhile_options", lambda task: rows)

    def build(task: Any, options: Any, *, groups: bool) -> Any:
        assert not gc.isenabled()
        now.s = 7.5
        return (options, groups)

    monkeypatch.setattr(search, "build_problem", build)
    monkeypatch.setattr(search, "native_problem", lambda problem: ("native", *problem))
    prepared = search._prepare(TASK, list(RULES), known, lambda *words: said.append(words))
    assert said == [("options", ""), ("tables", "2 options")]
    assert (prepared.num_options, prepared.starts, prepared.seconds) == ({name: 1}, [[1]], 2.5)
    assert prepared.native == ("native", rows, True)
    assert (prepared.task, prepared.rules, prepared.known, prepared.options) == (TASK, list(RULES), known, rows)


def test_starts_are_numbers_of_options_whatever_groups_they_have() -> None:
    one, two = (Option(Layout(DeviceMesh(first, 4), ParallelStrategy(dp=4)), 1) for first in (0, 4))
    calls = {
        "a": CallPlan(devices=(4, 4), dp=4, micro_dp=(2, 1)),
        "b": CallPlan(devices=(0, 4), dp=4),
        "c": CallPlan(devices=(0, 4), dp=4, micro_batches=2),
    }
    options = {name: [one, two] for name in calls}
    assert search._choice(predicted(1.0, calls=calls).plan, options) == [1, 0, 2]
    assert options["c"][2] == structs.replace(one, micro_batches=2)
    assert options["a"] == options["b"] == [one, two]


@pytest.mark.parametrize("was_enabled", [True, False])
def test_garbage_is_collected_afterwards_as_before(was_enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where what was made failed. All objects count as old then."""
    done: list[str] = []
    names = ("disable", "freeze", "unfreeze", "enable")
    fake = {name: lambda name=name: done.append(name) for name in names}
    monkeypatch.setattr(search, "gc", SimpleNamespace(isenabled=lambda: was_enabled, **fake))
    with search.without_collection():
        assert done == ["disable"]
    assert done[1:] == (["freeze", "unfreeze", "enable"] if was_enabled else [])
    done.clear()
    with pytest.raises(ZeroDivisionError), search.without_collection():
        raise ZeroDivisionError
    assert ("enable" in done) == was_enabled


# --- the answer


class Native:
    """A problem whose plans take a second for each number of their choice."""

    def evaluate(self, choice: Sequence[int]) -> dict[str, float]:
        return {"step_time": float(sum(choice)), "peak_bytes": 100.0 * GIB if choice == [99] else 0.0}

    def smallest_plan(self, seed: int) -> list[int]:
        assert seed == 7
        return [99]


def found_of(**words: Any) -> Any:
    fields = {
        "feasible": True, "choice": [2], "step_s": 2.0, "lower_bound_s": 1.5, "proven": True, "evaluations": 30,
        "seconds": 3.0, "trace": ((0.1, 2.0),),
    }  # fmt: skip
    return SimpleNamespace(**fields | words)


def answer(
    monkeypatch: pytest.MonkeyPatch, searched: Prediction, known: Sequence[Prediction] = (), **words: Any
) -> SearchResult:
    """The result where the search found [2] and the plans by rule are [3], [4], ..."""
    task = words.pop("task", TASK)
    plans: list[Any] = []
    monkeypatch.setattr(search, "chosen", lambda options, choice: ("calls", choice))

    def ordered(of: Any, plan: Any, native: Any, choice: Any) -> Prediction:
        assert (of, choice) == (task, [2])
        plans.append(plan)
        return searched

    monkeypatch.setattr(search, "_ordered", ordered)
    monkeypatch.setattr(PlanningTask, "plan", lambda self, calls, **notes: (calls, notes))
    starts = [[3 + place] for place in range(len(known))]
    prepared = prepared_of(task=task, native=Native(), known=list(known), starts=starts, rules=list(RULES))
    result = search._result(prepared, found_of(**words), 7)
    costs = "measured" if task.costs.profiled else "analytic"
    assert plans in ([], [(("calls", [2]), {"costs": costs, "seed": 7, "evaluations": 30})])
    return result


def test_the_answer_of_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    result = answer(monkeypatch, predicted(2.5), [predicted(2.5), predicted(3.0)])
    assert result.certificate == Certificate(cost_s=2.0, lower_bound_s=1.5, proven=True)
    assert (result.evaluations, result.evaluations_per_s, result.trace) == (30, 10.0, ((0.1, 2.0),))
    assert (result.num_options, result.rules) == ({"a": 3}, RULES)
    proof = {"lower_bound_s": 1.5, "proven_optimal": True}
    assert result.plan.notes == {"seed": 1, "peak_memory_gib": 1.0, **proof}
    assert answer(monkeypatch, predicted(2.5), seconds=0.0).evaluations_per_s == pytest.approx(30e9)


def test_the_plan_says_whether_its_costs_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(search, "chosen", lambda options, choice: {})
    monkeypatch.setattr(search, "_ordered", lambda *words: predicted(2.5))
    monkeypatch.setattr(PlanningTask, "plan", lambda self, calls, **notes: said.append(notes["costs"]))
    for profiled in (True, False):
        monkeypatch.setattr(type(TASK.costs), "profiled", profiled)
        search._result(prepared_of(native=Native()), found_of(), 7)
    assert said == ["measured", "analytic"]


def test_a_rule_that_is_faster_in_its_own_order_is_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is proven is so of its own cost."""
    result = answer(monkeypatch, predicted(2.5), [predicted(2.6), predicted(2.4)])
    assert (result.prediction.step_s, result.certificate.cost_s, result.certificate.proven) == (2.4, 4.0, False)
    assert answer(monkeypatch, predicted(2.5, fits=False), [predicted(2.6)]).prediction.step_s == 2.6
    assert answer(monkeypatch, predicted(2.5), proven=False).certificate.proven is False


def test_where_the_search_found_nothing_the_rules_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    result = answer(monkeypatch, predicted(0.1), [predicted(2.6)], feasible=False, proven=False)
    assert (result.prediction.step_s, result.certificate.cost_s) == (2.6, 3.0)
    with pytest.raises(NothingFitsError, match=r"with ref in host memory.*needs 100\.00 GiB"):
        answer(monkeypatch, predicted(0.1), task=replace(TASK, offload=("ref",)), feasible=False)


def test_the_certificate_of_an_answer_says_what_was_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    near = (DeviceMesh(0, 2), DeviceMesh(2, 2))
    task = replace(LARGE, near=near)
    certificate = answer(monkeypatch, predicted(2.5), task=task).certificate
    assert (certificate.breadth, certificate.num_meshes, certificate.has_all_meshes) == ("computation", 2, False)


def test_the_best_rule_is_certain_of_nothing() -> None:
    known = [predicted(2.0), predicted(1.5), predicted(1.7)]
    result = search._best_rule(LARGE, RULES, known)
    assert result.certificate == Certificate(cost_s=1.5, lower_bound_s=0.0, proven=False, has_all_meshes=False)
    assert (result.evaluations, result.evaluations_per_s, result.trace, result.num_options) == (0, 0.0, (), {})
    assert (result.rules, result.prediction.step_s) == (RULES, 1.5)
    assert result.plan.notes == {"seed": 1, "peak_memory_gib": 1.0, "lower_bound_s": 0.0, "proven_optimal": False}


@pytest.mark.parametrize(("step_s", "is_noted"), [(0.5, True), (0.5 * (1 - 0.8e-9), True), (0.5 * (1 - 1.5e-9), False)])
def test_a_bound_is_noted_of_a_plan_that_does_not_beat_it(step_s: float, is_noted: bool) -> None:
    found = replace(predicted(step_s), plan=structs.replace(predicted(step_s).plan, notes={}))
    noted = search._noted(found, Certificate(cost_s=1.0, lower_bound_s=0.5, proven=True)).plan.notes
    assert noted == {"peak_memory_gib": 1.0} | ({"lower_bound_s": 0.5, "proven_optimal": True} if is_noted else {})


def test_notes_are_rounded() -> None:
    found = replace(predicted(1.0, peak_bytes=1.23456 * GIB), plan=structs.replace(predicted(1.0).plan, notes={}))
    certificate = Certificate(cost_s=1.0, lower_bound_s=0.123456789, proven=False)
    notes = {"peak_memory_gib": 1.235, "lower_bound_s": 0.123457, "proven_optimal": False}
    assert search._noted(found, certificate).plan.notes == notes
    assert search._unproven(found).plan.notes == {"peak_memory_gib": 1.235}
    unknown = replace(found, plan=structs.replace(found.plan, predicted_step_s=None))
    assert search._noted(unknown, certificate).plan.notes == {"peak_memory_gib": 1.235}


def test_the_options_of_every_call_or_all_where_none_may_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "actor_generate"
    monkeypatch.setattr(search, "worthwhile", lambda task, of: () if of == name else (of,))

    def options(task: Any, of: str, keeps: Any) -> list[str]:
        assert keeps == search.Dominance(TASK)
        return [f"all of {of}"]

    monkeypatch.setattr(search, "options_to_search", options)
    expected = {of: [of] for of in TASK.graph.model_calls} | {name: [f"all of {name}"]}
    assert search.worthwhile_options(TASK) == expected


def test_what_does_not_fit_is_told_in_full() -> None:
    """With the memory of the smallest plan that anybody knows."""
    cluster = cpu_cluster(2, num_nodes=3, memory=2**31)
    assert str(NothingFitsError(3.5 * GIB, cluster, ())) == (
        "no plan fits into memory: the smallest one found needs 3.50 GiB on a device but 3 x 2 devices (cpu) have 2.00 "
        f"GiB each, of {cluster.hardware.description}; use more devices, a smaller batch or shorter sequences"
    )
    error = NothingFitsError(3.5 * GIB, cluster, ("ref", "reward"))
    part = "the smallest one found, with ref, reward in host memory while nothing needs them, needs "
    assert f"{part}3.50 GiB" in str(error)
    assert f"{part}3.25 GiB" in str(error.knowing(3.25 * GIB))
    assert f"{part}3.50 GiB" in str(error.knowing(4 * GIB))
