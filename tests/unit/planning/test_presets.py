"""Presets are legal plans of the meshes they promise, or say why they are not."""

from dataclasses import replace

import pytest

from realhf.dataflow.graph import TRAIN_STEP, DataflowGraph
from realhf.dataflow.plan_checks import check_plan
from realhf.geometry.layout import ParallelStrategy
from realhf.planning.model.cluster import Cluster
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.model.timings import load_costs
from realhf.planning.model.workload import Workload
from realhf.planning.predict import predict
from realhf.planning.presets import PRESETS, PresetResult, evaluate_presets, heuristic
from realhf.planning.task import PlanningTask
from tests.unit.planning.graphs import TINY, call, cpu_cluster, ppo, settings


def task(devices: int, num_nodes: int = 1, memory: int = 2**32) -> PlanningTask:
    graph = ppo()
    return PlanningTask(graph=graph, max_steps_in_flight=2, **settings(graph, cpu_cluster(devices, num_nodes, memory)))


def presets(of: PlanningTask) -> dict[str, PresetResult]:
    return {result.name: result for result in evaluate_presets(of)}


@pytest.mark.parametrize(("devices", "nodes"), [(4, 1), (8, 1), (4, 2)])
def test_presets_are_legal(devices: int, nodes: int) -> None:
    of = task(devices, nodes)
    results = presets(of)
    names = ["heuristic", "real-heuristic", "colocate", "split", "standalone", "hybridflow", "mapping"]
    assert list(results) == list(PRESETS) == names
    for result in results.values():
        assert not result.problem
        assert result.prediction is not None
        assert result.prediction.fits
        check_plan(result.prediction.plan, of.graph, of.batch_size)
        assert predict(of, result.prediction.plan).step_s == result.prediction.step_s


def test_meshes_of_the_presets() -> None:
    meshes = {}
    for name, result in presets(task(8)).items():
        assert result.prediction is not None
        calls = result.prediction.plan.calls
        meshes[name] = {call: entry.devices for call, entry in calls.items()}
    for name in ("heuristic", "real-heuristic", "colocate"):
        assert set(meshes[name].values()) == {(0, 8)}
    actor_side = ("actor_generate", "ref_inference", "actor_train_step")
    for name, devices in meshes["split"].items():
        assert devices == ((0, 4) if name in actor_side else (4, 4))
    alone = meshes["standalone"]
    assert alone["actor_generate"] == alone["actor_train_step"]
    assert alone["critic_inference"] == alone["critic_train_step"]
    four = sorted({alone[f"{model}_inference"] for model in ("reward", "ref", "critic")} | {alone["actor_generate"]})
    assert len(four) == 4
    assert [first for first, _ in four] == [0, *(first + size for first, size in four[:-1])]


def test_colocating_is_no_slower_than_all_alike() -> None:
    results = presets(task(4))
    heuristic, colocate = results["heuristic"].prediction, results["colocate"].prediction
    assert heuristic is not None
    assert colocate is not None
    assert colocate.step_s <= heuristic.step_s * 1.0001


def test_presets_that_cannot_run_say_why() -> None:
    results = presets(task(1))
    assert results["split"].problem.startswith("split: 1 devices cannot be halved")
    assert results["standalone"].problem == "none of 1 placements fits into the memory of 1 devices"
    assert results["colocate"].problem == ""
    small = presets(task(4, memory=10_000))
    for name in ("heuristic", "colocate", "split"):
        assert "GiB on device 0, which has" in small[name].problem


def test_a_graph_of_one_model_has_no_two_sides() -> None:
    graph = DataflowGraph([call("sft", TINY, TRAIN_STEP, "seq")], ["seq"])
    of = replace(task(4), graph=graph, **settings(graph, cpu_cluster(4)))
    results = presets(of)
    assert results["split"].problem.startswith("split: all models belong to the side of generation")
    assert results["standalone"].problem == ""


def test_the_heuristic_takes_stages_where_memory_asks_for_them() -> None:
    of = task(8)
    assert heuristic(of).calls["actor_train_step"].strategy == ParallelStrategy(dp=2, tp=4, pp=1)
    graph = ppo("llama70b", "llama7b-critic", mini_batches=1)
    cluster = Cluster(num_nodes=8, devices_per_node=8, hardware=load_hardware("h100"))
    costs = load_costs(graph.models, dtype="bfloat16", hardware=load_hardware("h100"))
    lengths = Workload(prompt_tokens=1024, new_tokens=1024)
    large = replace(of, graph=graph, cluster=cluster, costs=costs, dtype="bfloat16", batch_size=512, workload=lengths)
    plan = heuristic(large)
    # One copy of the actor's training states takes 16 bytes a parameter at least: more than tp=8 alone can hold.
    assert plan.calls["actor_train_step"].tp == 8
    assert plan.calls["actor_train_step"].pp > 1
    assert predict(large, plan).fits
