"""Models that are confined to some of the devices: the planner looks nowhere else for them."""

from collections.abc import Mapping

import pytest

from realhf.base.errors import UserError
from realhf.dataflow.graph import DataflowGraph
from realhf.dataflow.pools import Pool
from realhf.geometry.layout import DeviceMesh
from realhf.planning.explain.comparison import best_alternatives
from realhf.planning.explain.remedies import smallest_peak_bytes
from realhf.planning.model.cluster import device_meshes
from realhf.planning.options import pool_meshes
from realhf.planning.presets import evaluate_presets
from realhf.planning.request import SearchBudget
from realhf.planning.search import search_plan
from realhf.planning.task import PlanningTask
from tests.unit.planning.graphs import call_options, cpu_cluster, ppo, settings, task_of

ACTOR, CRITIC = Pool("actor", devices=range(0, 2)), Pool("critic", devices=range(2, 4))
POOLS = {"actor": ACTOR, "ref": ACTOR, "critic": CRITIC, "reward": CRITIC}
BUDGET = SearchBudget(evaluations=2000)


def confined(pools: Mapping[str, Pool], batch_size: int = 16, devices: int = 4) -> PlanningTask:
    plain = ppo()
    graph = DataflowGraph(list(plain.calls.values()), plain.dataset_keys, pools=pools)
    return task_of(graph, **settings(graph, cpu_cluster(devices), batch_size))


def test_meshes_of_a_pool() -> None:
    cluster = cpu_cluster(4, num_nodes=2)
    assert pool_meshes(cluster, None) == device_meshes(cluster)
    assert pool_meshes(cluster, Pool("all", devices=range(8)))[-1] == DeviceMesh(0, 8)
    # Three neighbours of one node are a mesh where they are a pool; a run over two nodes is none.
    meshes = pool_meshes(cluster, Pool("odd", devices=[0, 1, 2, 3, 4, 5, 6]))
    assert meshes[-1] == DeviceMesh(0, 4)
    assert DeviceMesh(4, 2) in meshes
    assert pool_meshes(cluster, Pool("three", devices=[5, 6, 7]))[-1] == DeviceMesh(5, 3)


def test_a_searched_plan_and_what_it_is_compared_with_keep_to_the_pools() -> None:
    task = confined(POOLS)
    found = search_plan(task, BUDGET)
    alternatives = {each.call: each.option for each in best_alternatives(task, found.plan) if each.option}
    for plan in (found.plan.calls, alternatives):
        for name, call in plan.items():
            assert call.mesh in POOLS[task.graph.calls[name].model_name]
    free = search_plan(confined({}), BUDGET)
    assert found.certificate.lower_bound_s >= free.certificate.lower_bound_s
    assert sum(found.num_options.values()) < sum(free.num_options.values())


def test_rules_that_leave_the_pools_are_no_plans() -> None:
    results = {result.name: result for result in evaluate_presets(confined(POOLS))}
    assert "are not all of pool 'actor' (devices 0-1)" in results["heuristic"].problem
    colocated = results["colocate"].prediction
    assert colocated is not None
    assert {call.devices for call in colocated.plan.calls.values()} == {(0, 2), (2, 2)}
    assert not results["split"].problem, "the same halves"


def test_a_model_without_a_pool_may_use_all_devices() -> None:
    task = confined({"critic": Pool("one", devices=[3])})
    plan = search_plan(task, BUDGET).plan
    assert plan.calls["critic_train_step"].devices == plan.calls["critic_inference"].devices == (3, 1)
    assert any(call.devices != (3, 1) for call in plan.calls.values())


def test_what_cannot_fit_is_refused() -> None:
    task = confined({"critic": Pool("three", devices=[5, 6, 7])}, batch_size=16, devices=8)
    assert {o.layout.mesh.size for o in call_options(task.graph.calls["critic_inference"], 16, task.cluster)} > {1, 2}
    nothing = ppo("llama7b", "llama7b-critic")
    graph = DataflowGraph(list(nothing.calls.values()), nothing.dataset_keys, pools={"actor": Pool("p", devices=[0])})
    small = task_of(graph, **settings(graph, cpu_cluster(4)))
    with pytest.raises(UserError, match="no plan fits into memory"):
        search_plan(small, BUDGET)
    peak = smallest_peak_bytes(small)
    assert peak is not None
    assert peak > 7e9 * 16, "all of a trained model on the pool's one device"
