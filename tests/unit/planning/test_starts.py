"""No plan by rule that fits is faster than the searched one, whatever the budget, the cluster and the options."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from realhf.dataflow.graph import TRAIN_STEP, DataflowGraph
from realhf.dataflow.plan import CallPlan
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.planning import search
from realhf.planning.explain.comparison import compare, describe
from realhf.planning.model.cluster import Cluster
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.model.timings import load_costs
from realhf.planning.model.workload import Workload
from realhf.planning.options import Option
from realhf.planning.predict import predict
from realhf.planning.presets import evaluate_presets
from realhf.planning.problem.builder import build_problem
from realhf.planning.problem.native import SearchRequest, native_problem, search_problem
from realhf.planning.request import SearchBudget
from realhf.planning.search import SearchResult, search_plan
from realhf.planning.task import PlanningTask
from tests.unit.planning.graphs import TINY, call, cpu_cluster, ppo, settings, with_memory


def searched(task: PlanningTask, evaluations: int | None, seconds: float | None = None, seed: int = 0) -> SearchResult:
    return search_plan(replace(task, seed=seed), SearchBudget(evaluations=evaluations, seconds=seconds))


def check(task: PlanningTask, result: SearchResult) -> None:
    rows = [row.prediction.step_s for row in result.rules if row.prediction and not row.problem]
    assert rows, "nothing to compare with"
    assert result.plan.predicted_step_s is not None
    assert result.plan.predicted_step_s <= min(rows)
    prediction = predict(task, result.plan)
    assert prediction.fits
    assert prediction.step_s == result.plan.predicted_step_s


@hypothesis_settings(max_examples=8)
@given(
    devices=st.sampled_from([(1, 1), (4, 1), (2, 2), (8, 1)]),
    batch_size=st.sampled_from([8, 16, 24, 48]),
    in_flight=st.integers(1, 3),
    prompt_tokens=st.integers(4, 200),
    offload=st.sampled_from([(), ("ref", "reward")]),
    seed=st.integers(0, 3),
)
def test_one_evaluation_is_enough(
    devices: tuple[int, int], batch_size: int, in_flight: int, prompt_tokens: int, offload: tuple[str, ...], seed: int
) -> None:
    graph, workload = ppo(), Workload(prompt_tokens=prompt_tokens, new_tokens=8)
    shared = settings(graph, cpu_cluster(*devices), batch_size, workload)
    task = PlanningTask(graph=graph, max_steps_in_flight=in_flight, offload=offload, **shared)
    check(task, searched(task, 1, seed=seed))


def test_a_searched_plan_notes_what_it_is_from() -> None:
    graph = ppo()
    task = PlanningTask(graph=graph, max_steps_in_flight=1, **settings(graph, cpu_cluster(2)))
    notes = searched(task, 50, seed=3).plan.notes
    assert (notes["hardware"], notes["costs"], notes["seed"]) == ("cpu", "analytic", 3)
    assert 1 <= notes["evaluations"] <= 50  # type: ignore[operator]


@pytest.mark.parametrize(("fits", "chosen"), [((True,), 0), ((False, True), 1), ((False, False), 0)])
def test_a_plan_without_groups_where_the_grouped_one_does_not_fit(
    fits: tuple[bool, ...], chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = ppo(mini_batches=1)
    task = PlanningTask(graph=graph, max_steps_in_flight=1, **settings(graph, cpu_cluster(4)))
    calls = {name: CallPlan(devices=(0, 4), dp=4) for name in graph.calls}
    calls |= {
        "actor_train_step": CallPlan(devices=(0, 4), tp=4), "actor_generate": CallPlan(devices=(0, 4), dp=2, tp=2)
    }  # fmt: skip
    plan, asked = task.plan(calls), []

    def fastest(_: Any, of: Any, native: str, choice: list[int]) -> Any:
        assert (native, choice) == ("tables", [0])
        asked.append(SimpleNamespace(fits=fits[len(asked)], plan=of))
        return asked[-1]

    monkeypatch.setattr(search, "fastest_order", fastest)
    monkeypatch.setattr(search, "with_copies_in_place", lambda *_: None)
    assert search._ordered(task, plan, "tables", [0]) is asked[chosen]  # type: ignore[arg-type]
    assert asked[0].plan.calls["actor_generate"].micro_dp != (1, 1)
    assert [each.plan for each in asked[1:]] == [plan] * (len(fits) - 1)


def large(num_nodes: int, batch_size: int = 512) -> PlanningTask:
    graph = ppo("llama7b", "llama7b-critic")
    return PlanningTask(
        graph=graph,
        batch_size=batch_size,
        workload=Workload(prompt_tokens=1024, new_tokens=1024),
        cluster=Cluster(num_nodes=num_nodes, devices_per_node=8, hardware=load_hardware("h100")),
        costs=load_costs(graph.models, dtype="bfloat16", hardware=load_hardware("h100")),
        max_steps_in_flight=2,
        dtype="bfloat16",
    )


def test_on_a_large_cluster_with_no_time() -> None:
    task = large(2)
    check(task, searched(task, None, seconds=0.01))


def test_meshes_that_the_search_leaves_out_are_added() -> None:
    """Of 34 nodes it has aligned powers of two and all of them; `split` takes halves of 17 nodes."""
    task = large(34, batch_size=34 * 16)
    result = searched(task, 1)
    check(task, result)
    split = next(row.prediction for row in result.rules if row.name == "split")
    assert split is not None
    assert {call.devices[1] for call in split.plan.calls.values()} == {17 * 8}


def test_what_does_not_fit_is_no_candidate() -> None:
    task = large(1, batch_size=64)
    small = replace(task, cluster=with_memory(task.cluster, 47 * 10**9))
    assert any(row.problem and row.prediction for row in evaluate_presets(small)), "a plan by rule must not fit"
    assert predict(small, searched(small, 1).plan).fits


def test_the_table_shows_the_rules_that_the_search_began_with() -> None:
    graph = DataflowGraph([call("sft", TINY, TRAIN_STEP, "seq")], ["seq"])
    task = PlanningTask(graph=graph, max_steps_in_flight=2, **settings(graph, cpu_cluster(4)))
    result = searched(task, 1)
    compared = compare(describe(task, result))
    rows = compared.presets
    again = evaluate_presets(task)
    assert [(row.name, row.problem) for row in rows] == [(rule.name, rule.problem) for rule in again]
    assert all(row.problem or (row.analysis and compared.analysis.step_s <= row.analysis.step_s) for row in rows)


@pytest.mark.parametrize("seed", range(3))
def test_a_search_of_one_evaluation_returns_its_best_start(seed: int) -> None:
    task = large(2)
    options = {
        name: [
            Option(Layout(DeviceMesh(first, 8), ParallelStrategy(8 // tp, tp)), 8)
            for first in (0, 8)
            for tp in (1, 2, 8)
        ]
        for name in task.graph.calls
    }
    native = native_problem(build_problem(task, options))
    starts = [[(seed + i * k) % 6 for i in range(6)] for k in range(5)]
    best = min((native.evaluate(start) for start in starts), key=lambda e: (not e["feasible"], e["cost"]))
    found = search_problem(native, SearchRequest(budget=SearchBudget(evaluations=1), seed=seed, starts=starts))
    assert (not found.feasible, found.cost) <= (not best["feasible"], best["cost"])
