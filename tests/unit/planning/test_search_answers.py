"""What is searched in the time there is, and what is said of the answer, on stand-ins."""

import gc
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from realhf.dataflow.plan import CallPlan
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.planning import search
from realhf.planning.certificate import Certificate
from realhf.planning.options import Option
from realhf.planning.predict import Prediction
from realhf.planning.problem.native import SearchRequest
from realhf.planning.request import SearchBudget
from realhf.planning.search import NothingFitsError, SearchResult
from realhf.planning.task import PlanningTask
from tests.unit.planning.graphs import cpu_cluster
from tests.unit.planning.test_search_parts import (
    COPYING,
    GIB,
    LARGE,
    TASK,
    budget_clock,
    predicted,
    result_of,
)
from tests.unit.planning.test_search_sets import RULES

# --- the best of several sets


@pytest.mark.parametrize("number", [1, 2])
def test_the_best_of_several_sets_says_which_models_wait(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in ("_with_best_steps", "with_room_left", "with_best_copies", "with_best_carriers", "with_changes"):
        monkeypatch.setattr(search, step, lambda task, prediction: prediction)
    first, second = result_of(2.0, evaluations=10, rules=RULES), result_of(1.0, evaluations=5, offload=("ref",))
    found = search._best_of(TASK, search._Sets([first, second], [], number))
    offload = ("ref",) if number > 1 else None
    assert found.certificate == replace(second.certificate, offload=offload)
    assert (found.evaluations, found.rules, found.prediction) == (15, RULES, second.prediction)


def test_the_best_plan_has_other_steps_in_flight_then_other_copies_and_then_other_carriers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The proof is not about such copies."""
    fewer, copied, carried = predicted(0.9), predicted(0.85), predicted(0.82)
    copying = predicted(0.8, calls={"a": COPYING}, peak_bytes=2 * GIB)
    best = result_of(1.0)
    monkeypatch.setattr(search, "_with_best_steps", lambda task, found: fewer if found is best.prediction else None)
    monkeypatch.setattr(search, "with_room_left", lambda task, found: found)
    monkeypatch.setattr(search, "with_best_copies", lambda task, found: copied if found is fewer else None)
    monkeypatch.setattr(search, "with_best_carriers", lambda task, found: carried if found is copied else None)
    monkeypatch.setattr(search, "with_changes", lambda task, found: copying if found is carried else None)
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


ALONE = "actor_train_step"


def options_of(number: int) -> dict[str, list[Option]]:
    return {ALONE: [Option(Layout(DeviceMesh(0, 1), ParallelStrategy()), 1)] * number}


@pytest.mark.parametrize(
    ("budget", "share", "seconds", "expected"),
    [
        (SearchBudget(evaluations=1000), 0.5, 4.0, (500, None)),
        (SearchBudget(evaluations=1), 0.2, 4.0, (1, None)),
        (SearchBudget(), 0.5, 4.0, (20_000, None)),
        (SearchBudget(seconds=14), 0.5, 4.0, (20_000, 4.0)),  # half of 10 s without half of 4 s
        (SearchBudget(seconds=30), 0.5, 20.0, (20_000, 0.05)),
    ],
)
def test_a_search_has_tables_starts_and_a_share_of_what_is_left_beside_what_will_be_said(
    budget: SearchBudget, share: float, seconds: float, expected: tuple[int, float | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Options and tables take `seconds`. An option that only a start has counts among the tables' and not among those
    of the search."""
    clock, now = budget_clock(monkeypatch, budget)
    said, rows = list[tuple[str, str]](), options_of(1999)
    known = [predicted(1.0, calls={ALONE: CallPlan(devices=(0, 2), dp=2)})]

    def build(task: Any, options: Any, *, groups: bool) -> Any:
        assert not gc.isenabled()
        assert (task, options, groups) == (TASK, rows, True)
        now.s += seconds
        return "problem"

    monkeypatch.setattr(search, "worthwhile_options", lambda task: rows)
    monkeypatch.setattr(search, "build_problem", build)
    monkeypatch.setattr(search, "native_problem", lambda problem: ("native", problem))
    prepared = search._prepare(TASK, known, clock, share, lambda *words: said.append(words))
    assert said == [("options", ""), ("tables", "2,000 options")]
    assert (prepared.options, prepared.num_options) == (rows, {ALONE: 1999})
    assert prepared.native == ("native", "problem")
    request = prepared.request
    assert (request.budget.evaluations, request.budget.seconds) == expected
    assert (request.seed, request.starts) == (7, [[1999]])


def prepared_of(starts: Sequence[Sequence[int]] = ()) -> search._Prepared:
    request = SearchRequest(budget=SearchBudget(), starts=starts)
    native: Any = Native()
    return search._Prepared(options_of(2), {"a": 3}, native, request)


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
    result = search._result(task, RULES, known, prepared_of(starts), found_of(**words))
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
        search._result(TASK, RULES, [], prepared_of(), found_of())
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
    assert search._noted(found).plan.notes == {"peak_memory_gib": 1.235}
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
