"""The reasons that go with a plan: each agrees with what the planner says when it is asked for it alone."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from realhf.api.plan import ExecutionPlan, load_plan, save_plan
from realhf.search.alternatives import best_alternatives
from realhf.search.explanation import explain
from realhf.search.searcher import search_plan
from tests.unit.search.graphs import cpu_cluster, ppo, settings
from tests.unit.search.test_analysis import split_plan, task


def test_the_memory_of_every_device_is_the_prediction() -> None:
    of = task(4)
    prediction = of.predict(split_plan(of))  # devices 2 and 3 have nothing to do
    why = explain(of, prediction, None)
    for device, needed in enumerate(prediction.device_bytes):
        memory = why.memory_of(device)
        assert memory is not None
        assert memory.peak_bytes == round(needed)
        assert 0 <= memory.static_bytes <= memory.peak_bytes
    assert why.memory[-1].devices == (2, 2)  # alike, so told once
    assert why.memory_of(4) is None
    assert (why.origin, why.certificate) == ("given to the run", "")
    assert why.device_memory_bytes == of.cluster.device_memory_bytes


def test_the_best_other_layouts_survive_the_plan_file(tmp_path: Path) -> None:
    of = task(2)
    prediction = of.predict(split_plan(of))
    why = explain(of, prediction, None)
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
    result = search_plan(graph, seed=1, evaluations=2000, max_steps_in_flight=2, **settings(graph, cluster))
    why = explain(of, of.predict(result.plan), result)
    assert f"{result.evaluations:,} plans" in why.origin
    assert why.certificate.startswith("optimal" if result.proven else "no plan")
    assert why.heuristic_step_s is not None
    assert why.heuristic_step_s >= result.lower_bound_s
    assert all(one.slower_by > -1e-9 for one in why.instead if result.proven)


def test_a_plan_of_one_device_has_nothing_else() -> None:
    of = task(1)
    calls = {name: replace(call, devices=(0, 1)) for name, call in split_plan(of).calls.items()}
    plan: ExecutionPlan = of.plan(calls, "by hand")
    why = explain(of, of.predict(plan), None)
    assert {(one.layout, one.num_others) for one in why.instead} == {("", 0)}
