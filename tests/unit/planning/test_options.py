"""Meshes, strategies and micro-batches: what is legal, and how many there are."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from realhf.base.errors import UserError
from realhf.dataflow.graph import INFERENCE, TRAIN_STEP
from realhf.dataflow.plan import ExecutionPlan
from realhf.dataflow.plan_checks import check_plan
from realhf.dataflow.protocols import ALL_TO_ALL, DP_PROTO
from realhf.geometry.layout import DeviceMesh, ParallelStrategy
from realhf.planning.model.cluster import Cluster, device_meshes, share_a_node
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.model.timings import load_costs
from realhf.planning.model.workload import Workload
from realhf.planning.options import legal_strategies, micro_batch_counts
from tests.unit.planning.graphs import LENGTHS, TINY, Stub, call, call_model, call_options, cpu_cluster, ppo


def test_meshes_are_parts_of_a_node_or_whole_nodes() -> None:
    meshes = device_meshes(cpu_cluster(4, num_nodes=2))
    expected = [(first, 1) for first in range(8)]
    expected += [(0, 2), (2, 2), (4, 2), (6, 2), (0, 4), (4, 4), (0, 8)]
    assert sorted((m.first, m.size) for m in meshes) == sorted(expected)


def test_nodes_of_other_sizes() -> None:
    meshes = [(m.first, m.size) for m in device_meshes(cpu_cluster(3, num_nodes=2))]
    assert meshes == [(0, 1), (1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (0, 2), (3, 2), (0, 3), (3, 3), (0, 6)]


def test_strategies() -> None:
    legal = {(s.dp, s.tp, s.pp) for s in legal_strategies(TINY, 8)}  # 4 heads, 4 layers
    assert legal == {(8, 1, 1), (4, 2, 1), (4, 1, 2), (2, 4, 1), (2, 2, 2), (2, 1, 4), (1, 4, 2), (1, 2, 4)}


def test_micro_batches() -> None:
    assert micro_batch_counts(ParallelStrategy(dp=2), 16) == [1, 2, 4, 8]
    assert micro_batch_counts(ParallelStrategy(dp=2, pp=3), 48) == [1, 2, 3, 4, 6, 8, 12, 24]
    assert micro_batch_counts(ParallelStrategy(dp=3), 16) == []


def test_every_option_is_a_plan_that_can_run() -> None:
    cluster = cpu_cluster(4)
    graph = ppo()
    definition = graph.calls["actor_train_step"]
    options = call_options(definition, 16, cluster)
    assert len(set(options)) == len(options)
    others = {name: call_options(c, 16, cluster)[0].call_plan() for name, c in graph.calls.items()}
    for option in options:
        plan = ExecutionPlan(num_devices=4, calls={**others, definition.name: option.call_plan()})
        check_plan(plan, graph, 16)


def test_mini_batches_must_divide_the_batch() -> None:
    with pytest.raises(UserError, match="mini_batches=3 does not divide batch_size=16"):
        call_options(call("actor", TINY, TRAIN_STEP, "x", mini_batches=3), 16, cpu_cluster(2))


def test_published_size_of_the_plan_space() -> None:
    """ReaL: more than 500 options a call and more than 10^16 plans for PPO on 8 x 8 devices."""
    cluster = Cluster(num_nodes=8, devices_per_node=8, hardware=load_hardware("h100"))
    graph = ppo("llama7b", "llama7b-critic", mini_batches=8)
    layouts = [len({o.layout for o in call_options(c, 512, cluster)}) for c in graph.calls.values()]
    assert min(layouts) > 500
    assert math.prod(layouts) > 10**16


def test_cluster_rules() -> None:
    with pytest.raises(UserError, match="devices_per_node 0"):
        cpu_cluster(0)
    cluster = cpu_cluster(4, num_nodes=2)
    assert share_a_node(cluster, DeviceMesh(0, 2), DeviceMesh(2, 2))
    assert not share_a_node(cluster, DeviceMesh(0, 2), DeviceMesh(4, 2))
    assert not share_a_node(cluster, DeviceMesh(0, 8), DeviceMesh(0, 8))


def test_workload() -> None:
    workload = Workload(prompt_tokens=7.5, new_tokens=3, calls={"other": Workload(prompt_tokens=2)})
    assert (workload.max_tokens, workload.of("other").tokens, workload.of("this").tokens) == (11, 2, 10.5)
    with pytest.raises(UserError, match="max_new_tokens=2 is below"):
        Workload(prompt_tokens=1, new_tokens=3, max_new_tokens=2)
    with pytest.raises(UserError, match="prompt_tokens=0"):
        Workload(prompt_tokens=0)


@dataclass(frozen=True, kw_only=True)
class Rule(Stub):
    """A score of the data alone."""

    uses_model: ClassVar[bool] = False


def test_a_call_under_a_protocol_of_its_own() -> None:
    """Options are the layouts that its protocol takes, where its parts divide the batch; a rule costs no pass."""
    cluster, rule = cpu_cluster(4), replace(call("judge", TINY, INFERENCE, "seq", "score"), interface_impl=Rule())
    dp_only = call_options(replace(rule, protocol=DP_PROTO), 8, cluster)
    assert {(o.layout.mesh.size, o.layout.strategy.dp, o.micro_batches) for o in dp_only} == {
        (1, 1, 1),
        (2, 2, 1),
        (4, 4, 1),
    }
    of_pass = call_options(replace(rule, interface_impl=Stub(), protocol=DP_PROTO), 8, cluster)
    assert {o.layout.strategy for o in of_pass} == {o.layout.strategy for o in dp_only}
    # Two samples: four devices are too many for one each, tensor-parallel ones too.
    one_each = replace(rule, protocol=ALL_TO_ALL)
    sizes = {(o.layout.mesh.size, o.layout.strategy.tp) for o in call_options(one_each, 2, cluster)}
    assert sizes == {(1, 1), (2, 1), (2, 2)}
    costs = load_costs({"judge": TINY}, dtype="float32", hardware=cluster.hardware)
    cost = call_model(call=one_each, batch_size=8, workload=LENGTHS, cluster=cluster, costs=costs, dtype="float32")
    assert cost.seconds(ParallelStrategy(tp=4), 1) == cost.timings.hardware.call_overhead_s
    assert cost.work(*dp_only[0].shape).dynamic_bytes() == 0
