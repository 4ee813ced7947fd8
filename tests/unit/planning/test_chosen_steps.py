"""What a search chooses beside layouts: how many steps are in flight, and which models wait in host memory."""

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from realhf.dataflow.graph import TRAIN_STEP, DataflowGraph
from realhf.dataflow.plan import ExecutionPlan, OrderEntry
from realhf.planning import search
from realhf.planning.certificate import Certificate
from realhf.planning.model.cluster import Cluster
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.model.timings import load_costs
from realhf.planning.predict import Prediction, predict_in_best_order
from realhf.planning.problem.native import DeviceNeed
from realhf.planning.request import SearchBudget
from realhf.planning.task import PlanningTask
from tests.unit.planning.graphs import TINY, call, cpu_cluster, ppo, settings, task_of


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

    def predict(self, task: "Asked", plan: ExecutionPlan) -> Prediction:
        assert (task, plan.offload, plan.order) == (self, ("m",), ()), "in an order of its own"
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
    assert search.search_plan(task, SearchBudget(evaluations=50)).plan.max_steps_in_flight == 2
    monkeypatch.setattr(search, "predict_in_best_order", faster_alone)
    assert search.search_plan(task, SearchBudget(evaluations=50)).plan.max_steps_in_flight == 1


def test_models_wait_in_host_memory_only_where_that_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a the plan is as fast and fits; without b it does not fit, without c it is slower, without d faster."""
    tried = []

    def without(task: Any, plan: ExecutionPlan) -> Prediction:
        assert plan.order == (), "in an order of its own"
        tried.append(plan.offload)
        missing = set("abcd") - set(plan.offload)
        step_s = 1.0 + 0.1 * ("c" in missing) - 0.1 * ("d" in missing)
        return replace(predicted(2, step_s), plan=plan, fits="b" not in missing)

    monkeypatch.setattr(search, "predict_in_best_order", without)
    begin = predicted(2, 1.0)
    task: Any = None
    begin = replace(begin, plan=structs.replace(begin.plan, offload=tuple("abcd")))
    assert search._needed_offload(task, begin) == ("b", "c")
    assert tried == [("b", "c", "d"), ("c", "d"), ("b", "d"), ("b", "c")], "each of those that are left"


def test_which_models_a_search_lets_wait() -> None:
    """As asked; where it may choose, nothing, the models that nobody trains, and all."""
    graph = ppo()
    hardware = load_hardware("h100")
    cluster = Cluster(num_nodes=1, devices_per_node=2, hardware=hardware)
    costs = load_costs(graph.models, dtype="bfloat16", hardware=hardware)
    task = task_of(graph, **{**settings(graph, cluster), "costs": costs, "dtype": "bfloat16"})
    assert search.offloads(task) == [()]
    assert search.offloads(replace(task, offload=("ref",))) == [("ref",)]
    free = replace(task, may_offload=True)
    resting, everything = ("reward", "ref"), ("actor", "reward", "ref", "critic")
    assert search.offloads(free) == [(), resting, everything]
    assert search.offloads(replace(free, offload=resting)) == [resting, everything], "none twice"
    assert search.offloads(replace(free, breadth="computation")) == [()]
    on_cpu = task_of(graph, may_offload=True, **settings(graph, cpu_cluster(2)))
    assert search.offloads(on_cpu) == [()], "in a host's memory there is no other place"


@pytest.mark.parametrize(("step_s", "is_noted"), [(1.0, True), (0.9, True), (0.8, False)])
def test_a_plan_has_the_proof_in_its_notes_unless_its_own_order_beats_the_bound(step_s: float, is_noted: bool) -> None:
    """The bound, 0.9 s, is about simulated plans."""
    found = predicted(2, step_s)
    need = DeviceNeed(communicator_bytes=0.0, static_bytes=0.0, peak_bytes=2.0**30)
    plan = structs.replace(found.plan, predicted_step_s=step_s, notes={"seed": 1})
    found = replace(found, plan=plan, needs=[need])
    certificate = Certificate(cost_s=1.0, lower_bound_s=0.9, proven=False)
    notes = search._noted(found, certificate).plan.notes
    proof = {"lower_bound_s": 0.9, "proven_optimal": False} if is_noted else {}
    assert notes == {"seed": 1, "peak_memory_gib": 1.0, **proof}
    assert search._noted(search._noted(found, certificate)).plan.notes == {"seed": 1, "peak_memory_gib": 1.0}
