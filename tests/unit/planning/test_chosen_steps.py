"""How many steps a plan has in flight: fewer where that is faster, never fewer than the staleness of a copy needs."""

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from realhf.dataflow.graph import TRAIN_STEP, DataflowGraph
from realhf.dataflow.plan import ExecutionPlan, OrderEntry
from realhf.planning import search
from realhf.planning.predict import Prediction, predict_in_best_order
from realhf.planning.request import SearchBudget
from realhf.planning.task import PlanningTask
from tests.unit.planning.graphs import TINY, call, cpu_cluster, settings, task_of


def predicted(steps_in_flight: int, step_s: float) -> Prediction:
    plan = ExecutionPlan(
        num_devices=1, calls={}, max_steps_in_flight=steps_in_flight, offload=("m",), order=(OrderEntry(call="first"),)
    )
    return Prediction(plan=plan, call_s={}, transfer_s={}, step_s=step_s, needs=[], fits=True)


class Asked:
    """A task whose plans take these seconds by their steps in flight; keeps which were asked for."""

    def __init__(self, seconds: Mapping[int, float], stalenesses: tuple[int, ...] = ()):
        self.seconds, self.tried = seconds, list[int]()
        self.graph = SimpleNamespace(follows={k: SimpleNamespace(staleness=k) for k in stalenesses})

    def varied(self, *, max_steps_in_flight: int, offload: tuple[str, ...]) -> "Asked":
        assert offload == ("m",), "as the plan has them"
        self.within = max_steps_in_flight
        return self

    def predict(self, task: "Asked", plan: ExecutionPlan) -> Prediction:
        assert (plan.max_steps_in_flight, plan.order) == (task.within, ()), "in an order of its own"
        self.tried.append(plan.max_steps_in_flight)
        return predicted(plan.max_steps_in_flight, self.seconds[plan.max_steps_in_flight])


def chosen(monkeypatch: pytest.MonkeyPatch, most: int, asked: Asked) -> int:
    monkeypatch.setattr(search, "predict_in_best_order", asked.predict)
    task: Any = asked
    return search._with_best_steps(task, predicted(most, asked.seconds[most])).plan.max_steps_in_flight


@pytest.mark.parametrize(
    ("seconds", "steps"),
    [
        ({1: 0.9, 2: 1.0}, 1),
        ({1: 1.0, 2: 1.0}, 2),  # as fast is no reason
        ({1: 1.1, 2: 1.0}, 2),
        ({3: 0.9, 4: 0.8, 5: 0.85, 6: 1.0}, 4),  # the fastest of all
        ({3: 1.2, 4: 1.1, 5: 1.0 - 1e-12, 6: 1.0}, 6),  # nor is rounding
    ],
)
def test_fewer_steps_are_in_flight_where_that_is_faster(
    monkeypatch: pytest.MonkeyPatch, seconds: Mapping[int, float], steps: int
) -> None:
    asked = Asked(seconds)
    assert chosen(monkeypatch, max(seconds), asked) == steps
    assert asked.tried == sorted(set(seconds) - {max(seconds)}), "all that are simulated for as long"


@pytest.mark.parametrize(("stalenesses", "tried"), [((3,), [4, 5]), ((2, 4), [5]), ((5,), []), ((2,), [3, 4, 5])])
def test_never_fewer_than_staleness_needs(
    monkeypatch: pytest.MonkeyPatch, stalenesses: tuple[int, ...], tried: list[int]
) -> None:
    """A copy that follows k versions behind is read in k steps that are open besides the one in training."""
    asked = Asked({steps: float(steps) for steps in range(1, 7)}, stalenesses)
    assert chosen(monkeypatch, 6, asked) == (tried[0] if tried else 6)
    assert asked.tried == tried


def test_a_search_ends_with_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    def faster_alone(task: PlanningTask, plan: ExecutionPlan) -> Prediction:
        found = predict_in_best_order(task, plan)
        return replace(found, step_s=found.step_s / (10 if plan.max_steps_in_flight == 1 else 1))

    graph = DataflowGraph([call("sft", TINY, TRAIN_STEP, "prompts")], ["prompts"])
    task = task_of(graph, **settings(graph, cpu_cluster(1)))
    assert search.search_plan(task, SearchBudget(evaluations=50), 0).plan.max_steps_in_flight == 2
    monkeypatch.setattr(search, "predict_in_best_order", faster_alone)
    assert search.search_plan(task, SearchBudget(evaluations=50), 0).plan.max_steps_in_flight == 1
