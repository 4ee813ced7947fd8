"""The reasons that go with a plan: each agrees with what the planner says when it is asked for it alone."""

import dataclasses
from pathlib import Path

import pytest
from msgspec.structs import replace

from realhf.dataflow.plan import ExecutionPlan, load_plan, save_plan
from realhf.dataflow.rationale import Rationale
from realhf.planning.explain.analysis import analyse
from realhf.planning.explain.comparison import best_alternatives, describe, explain
from realhf.planning.predict import predict
from realhf.planning.request import SearchBudget
from realhf.planning.search import SearchResult, search_plan
from realhf.planning.task import PlanningTask
from realhf.report.plan_page import memory_figure
from tests.unit.planning.graphs import cpu_cluster, ppo, settings, task_of
from tests.unit.planning.test_analysis import split_plan, task


def why_of(of: PlanningTask, plan: ExecutionPlan | SearchResult) -> Rationale:
    rationale = explain(describe(of, plan)).rationale
    assert rationale is not None
    return rationale


def test_the_memory_of_every_device_is_the_prediction() -> None:
    of = task(4)
    prediction = predict(of, split_plan(of))  # devices 2 and 3 have nothing to do
    why = why_of(of, prediction.plan)
    for device, needed in enumerate(prediction.device_bytes):
        memory = why.memory_of(device)
        assert memory is not None
        assert memory.peak_bytes == round(needed)
        assert 0 <= memory.static_bytes <= memory.peak_bytes
    assert why.memory[-1].devices == (2, 2)  # alike, so told once
    assert why.memory_of(4) is None
    assert (why.origin, why.certificate) == ("given to the run", "")
    assert why.device_memory_bytes == of.cluster.device_memory_bytes


def test_communicators_are_told_apart_from_what_else_stays() -> None:
    """One of all devices (the world) where calls run; every call has its model's layout."""
    of, each = task(4), 1_000_000.0
    hardware = replace(of.costs.hardware, communicator_bytes=each)
    counting = dataclasses.replace(of, costs=dataclasses.replace(of.costs, hardware=hardware))
    plan = split_plan(of)
    without, prediction = predict(of, plan), predict(counting, plan)
    why = why_of(counting, prediction.plan)
    assert [why.memory_of(device).communicator_bytes for device in range(4)] == [each, each, 0, 0]  # type: ignore[union-attr]
    assert why.memory[0].static_bytes == why_of(of, without.plan).memory[0].static_bytes + each
    analysis = analyse(counting, prediction)
    figure = memory_figure(analysis, 2**32)
    assert [bar.name for bar in figure.data] == ["stays", "communicators", "while a call runs"]
    longest = [sum(bar.x[0] for bar in figure.data), sum(bar.x[1] for bar in figure.data)]
    assert longest == pytest.approx([need / 2**30 for need in prediction.device_bytes[:2]])
    assert len(memory_figure(analyse(of, without), 2**32).data) == 2


def test_the_best_other_layouts_survive_the_plan_file(tmp_path: Path) -> None:
    of = task(2)
    prediction = predict(of, split_plan(of))
    why = why_of(of, prediction.plan)
    for one, other in zip(why.instead, best_alternatives(of, prediction.plan), strict=True):
        assert other.option is not None
        assert one.layout.startswith(str(other.option.layout))
        assert (1 + one.slower_by) * other.planned_step_s == pytest.approx(other.step_s)
    assert [one.call for one in why.instead] == list(prediction.plan.calls)
    save_plan(replace(prediction.plan, rationale=why), tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").rationale == why


def test_a_searched_plan_says_how_good_it_is() -> None:
    graph, cluster = ppo(), cpu_cluster(2)
    of = task(2)
    result = search_plan(task_of(graph, seed=1, **settings(graph, cluster)), SearchBudget(evaluations=2000))
    why = why_of(of, result)
    assert f"{result.evaluations:,} plans" in why.origin
    assert why.certificate.startswith("optimal" if result.certificate.proven else "no plan")
    assert why.heuristic_step_s is not None
    assert why.heuristic_step_s >= result.certificate.lower_bound_s
    assert all(one.slower_by > -1e-9 for one in why.instead if result.certificate.proven)


def test_a_plan_of_one_device_has_nothing_else() -> None:
    of = task(1)
    calls = {name: replace(call, devices=(0, 1)) for name, call in split_plan(of).calls.items()}
    plan: ExecutionPlan = of.plan(calls, preset="by hand")
    why = why_of(of, plan)
    assert {(one.layout, one.num_others) for one in why.instead} == {("", 0)}
