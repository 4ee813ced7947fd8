"""Sets of models in host memory and their budgets, on stand-ins for the searches."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from realhf.planning import search
from realhf.planning.predict import Prediction
from realhf.planning.presets import PresetResult
from realhf.planning.request import SearchBudget, unwatched
from realhf.planning.search import SearchResult
from realhf.planning.task import PlanningTask
from tests.unit.planning.test_search_parts import TASK, budget_clock, nothing_fits, predicted, result_of

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

    def _prepare(self, task: PlanningTask, known: list[Prediction], clock: Any, share: float, watch: Any) -> Any:
        assert (clock, watch) == (self.clock, unwatched)
        self.known.append(known)
        self.prepared.append(task.breadth)
        self.now.s += next(self.preparing, 0.0)
        return SimpleNamespace(native=task.offload, request=share)

    def _search(self, native: Any, share: float, watch: Any) -> Any:
        assert watch is unwatched
        self.searched.append(native)
        self.shares.append(share)
        took_s = next(self.seconds, 0.0)
        self.now.s += took_s
        return SimpleNamespace(feasible=self.found[native] is not None, seconds=took_s)

    def _result(self, task: PlanningTask, rules: Any, known: Any, prepared: Any, found: Any) -> SearchResult:
        assert (task.offload, known) == (prepared.native, self.known[-1])
        step_s = self.found[prepared.native]
        if step_s is None:
            raise nothing_fits(offload=prepared.native)
        return result_of(step_s, offload=prepared.native, rules=rules)

    def _needed(self, task: PlanningTask, prediction: Prediction) -> tuple[str, ...]:
        self.asked_needed.append(prediction.step_s)
        return self.needed

    def run(self, **words: Any) -> search._Sets:
        return search._search_sets(TASK, self.clock, unwatched, **words)


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
