"""Seconds of moves between layouts, and the groups that shorten them, pair by pair."""

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from realhf.dataflow.graph import DataflowGraph
from realhf.dataflow.plan import CallPlan
from realhf.dataflow.protocols import DP_PROTO, THREE_D_PROTO
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.geometry.micro_dp import contains_home, grouped_like
from realhf.geometry.parameters import parameter_count
from realhf.geometry.shards import Placement
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.model.reallocation import (
    Reallocation,
    grouped,
    grouped_reallocations,
    moved_elements,
    moved_to_groups,
    with_groups,
)
from tests.unit.planning.graphs import TINY, cpu_cluster, ppo

LINKS = structs.replace(
    load_hardware("cpu"), intra_node_latency_s=0.5, intra_node_bandwidth=1000.0, inter_node_latency_s=2.0,
    inter_node_bandwidth=100.0,
)  # fmt: skip
WHOLE = parameter_count(TINY)
NODES = cpu_cluster(4, num_nodes=2)


def layout(size: int, tp: int, pp: int, first: int = 0, chunks: int = 1) -> Layout:
    return Layout(DeviceMesh(first, size), ParallelStrategy(size // (tp * pp), tp, pp, chunks))


@pytest.mark.parametrize(
    ("forwarding", "worst", "total", "elements"),
    [
        (True, 100, 300, 100),  # what one device receives
        (True, 100, 600, 150),  # what each of four sends
        (True, 100, 8 * WHOLE, WHOLE / 4),  # at most one model, which is sent on
        (False, 100, 8 * WHOLE, 8 * WHOLE / 4),
        (False, 100, 300, 100),
    ],
)
def test_the_busiest_link_sets_the_time(forwarding: bool, worst: int, total: int, elements: float) -> None:
    move = Reallocation(TINY, 2, NODES, LINKS, forwarding=forwarding)
    within = move.seconds((worst, total), DeviceMesh(0, 4), crosses_nodes=False)
    assert within == pytest.approx(0.5 + 2 * elements / 1000)
    across = move.seconds((worst, total), DeviceMesh(0, 4), crosses_nodes=True)
    assert across == pytest.approx(2.0 + 2 * elements / 100)
    assert move.seconds((0, 0), DeviceMesh(0, 4), crosses_nodes=True) == 0.0
    assert Reallocation(TINY, 2, NODES, LINKS).forwarding


def test_a_table_has_a_row_for_each_source() -> None:
    """Moves within a node are by its links, those from one to another, or over several, by the others."""
    move = Reallocation(TINY, 4, NODES, LINKS)
    sources = [Placement(layout(2, 2, 1)), Placement(layout(8, 1, 1), "fsdp")]
    targets = [layout(2, 1, 1), layout(4, 1, 1, first=4), layout(1, 1, 1)]
    expected = []
    for source in sources:
        for target in targets:
            crosses = source.layout.mesh.size == 8 or target.mesh.first == 4
            moved = moved_elements(TINY, source, target)
            expected.append(move.seconds(moved, source.layout.mesh, crosses_nodes=crosses))
    assert move.table(sources, targets) == expected
    assert expected[0] < expected[3] < expected[1]


def test_tensor_peers_within_a_node_may_be_grouped() -> None:
    found = grouped(layout(8, 4, 1), layout(8, 2, 1), TINY.num_layers, NODES)
    assert found is not None
    assert found.strategy.micro_dp == (2, 1)
    assert grouped(layout(8, 8, 1), layout(8, 2, 1), TINY.num_layers, NODES) is None
    assert grouped(layout(8, 4, 1), layout(8, 2, 1, chunks=1, first=8), TINY.num_layers, NODES) is None


def calls_of(graph: DataflowGraph, **actor: Any) -> dict[str, CallPlan]:
    calls = {name: CallPlan(devices=(0, 4), dp=4) for name in graph.calls}
    calls["actor_train_step"] = CallPlan(devices=(0, 4), tp=4)
    return calls | {name: CallPlan(**fields) for name, fields in actor.items()}


HOMES = {
    "actor_generate": "actor_train_step", "actor_train_step": "actor_train_step", "ref_inference": "ref_inference",
    "reward_inference": "reward_inference", "critic_inference": "critic_train_step",
    "critic_train_step": "critic_train_step",
}  # fmt: skip


def groups_of(calls: dict[str, CallPlan], graph: DataflowGraph) -> dict[str, tuple[int, int]]:
    return {name: call.micro_dp for name, call in with_groups(calls, HOMES, graph, NODES).items()}


def test_calls_with_groups() -> None:
    """Of a copy that does not contain its home otherwise, on the same devices."""
    graph = ppo(mini_batches=1)
    none = dict.fromkeys(HOMES, (1, 1))
    assert groups_of(calls_of(graph), graph) == none  # of four ranks each has the whole model
    tp2 = {"devices": (0, 4), "dp": 2, "tp": 2}
    assert groups_of(calls_of(graph, actor_generate=tp2), graph) == {**none, "actor_generate": (2, 1)}
    away = {"devices": (4, 4), "dp": 2, "tp": 2}
    assert groups_of(calls_of(graph, actor_generate=away), graph) == none
    critic = {"actor_generate": tp2, "critic_train_step": {"devices": (0, 4), "tp": 4}, "critic_inference": tp2}
    both = {**none, "actor_generate": (2, 1), "critic_inference": (2, 1)}
    assert groups_of(calls_of(graph, **critic), graph) == both
    unchanged = calls_of(graph, actor_generate=tp2)
    with_groups(unchanged, HOMES, graph, NODES)
    assert unchanged == calls_of(graph, actor_generate=tp2), "the plan that was given stays as it is"


def test_calls_of_other_protocols_have_no_groups() -> None:
    """The others have theirs nevertheless."""
    graph = ppo(mini_batches=1)
    tp2 = {"devices": (0, 4), "dp": 2, "tp": 2}
    calls = calls_of(graph, actor_generate=tp2, critic_train_step={"devices": (0, 4), "tp": 4}, critic_inference=tp2)
    first = graph.model_calls["actor_generate"]
    assert first.protocol is THREE_D_PROTO
    object.__setattr__(first, "protocol", DP_PROTO)
    found = groups_of(calls, graph)
    assert (found["actor_generate"], found["critic_inference"]) == ((1, 1), (2, 1))


def test_copies_that_contain_their_home() -> None:
    home, copy = layout(4, 4, 1), layout(4, 2, 1)
    arranged = grouped_like(home, copy, TINY.num_layers)
    assert arranged is not None
    assert contains_home(TINY.num_layers, home, arranged)
    assert not contains_home(TINY.num_layers, home, copy)
    assert contains_home(TINY.num_layers, home, layout(4, 1, 1))
    assert not contains_home(TINY.num_layers, home, home)
    assert not contains_home(TINY.num_layers, home, layout(4, 1, 1, first=4))
    # Groups of another home: they contain this one here, or not.
    others = Layout(copy.mesh, structs.replace(copy.strategy, micro_dp=(1, 2)))
    assert not contains_home(TINY.num_layers, home, others)
    assert contains_home(
        TINY.num_layers, layout(4, 2, 2), Layout(home.mesh, ParallelStrategy(2, 2, 1, micro_dp=(1, 2)))
    )


@pytest.mark.parametrize(
    ("home", "target", "expected"),
    [
        # 40960 of a layer are divided over tp, 128 whole; 2048 of embedding and head each, and 64 of the norm.
        ((1, 4, 1), (2, 2, 1), ((4 * 40960 + 2 * 2048) // 4, 4 * ((4 * 40960 + 2 * 2048) // 4))),
        ((2, 2, 1), (4, 1, 1), ((4 * 40960 + 2 * 2048) // 2, 4 * ((4 * 40960 + 2 * 2048) // 2))),
        # From stages of two layers to all: the first lacks the head's part, too, the last the embedding's.
        ((2, 1, 2), (4, 1, 1), (2 * 41088 + 2112, 2 * (4 * 41088 + 2112 + 2048))),
    ],
)
def test_elements_that_move_to_groups(
    home: tuple[int, int, int], target: tuple[int, int, int], expected: tuple[int, int]
) -> None:
    assert moved_to_groups(TINY, ParallelStrategy(*home), ParallelStrategy(*target)) == expected


def test_grouped_pairs_of_a_table() -> None:
    """All pairs of a home and a copy on the same devices that has groups for it, wherever they lie."""
    move = Reallocation(TINY, 4, NODES, LINKS)
    homes = [
        Placement(layout(4, 4, 1)),
        Placement(layout(4, 4, 1), "fsdp"),  # dp 1: nothing is divided
        Placement(layout(4, 2, 1), "fsdp"),
        Placement(layout(4, 2, 2)),
        Placement(layout(4, 4, 1, first=4)),
        Placement(layout(8, 4, 2)),
        Placement(layout(4, 2, 1)),
    ]
    targets = [
        layout(4, 2, 1), layout(4, 4, 1), layout(4, 2, 1, first=4), layout(8, 2, 1), layout(4, 1, 2), layout(8, 4, 1),
        layout(8, 2, 2), layout(4, 1, 1, first=4), layout(2, 2, 1),
        layout(4, 1, 1),
    ]  # fmt: skip
    expected = {}
    for row, home in enumerate(homes):
        for column, target in enumerate(targets):
            arranged = grouped_like(home.layout, target, TINY.num_layers)
            if arranged is None or home.divided > 1 or target == home.layout:
                continue
            moved = moved_elements(TINY, Placement(home.layout), arranged)
            place, crosses = row * len(targets) + column, target.mesh.size == 8
            expected[place] = move.seconds(moved, target.mesh, crosses_nodes=crosses)
    found = list(grouped_reallocations(move, homes, targets))
    assert dict(found) == pytest.approx(expected)
    assert len(found) == len(expected) > 9
    assert not {2 * len(targets) + column for column in range(len(targets))} & set(expected)
    assert 6 * len(targets) + len(targets) - 1 in expected, "but where its parameters are not divided"
    assert len(set(expected.values())) >= 4


def test_homes_over_nodes_have_no_groups() -> None:
    move = Reallocation(TINY, 4, cpu_cluster(2, num_nodes=4), LINKS)
    assert not list(grouped_reallocations(move, [Placement(layout(4, 4, 1))], [layout(4, 2, 1)]))
    [(place, seconds)] = grouped_reallocations(move, [Placement(layout(4, 2, 2))], [layout(2, 2, 1), layout(4, 2, 1)])
    moved = moved_to_groups(TINY, ParallelStrategy(1, 2, 2), ParallelStrategy(2, 2, 1))
    assert (place, seconds) == (1, move.seconds(moved, DeviceMesh(0, 4), crosses_nodes=True))
    assert replace(move, forwarding=False).seconds(moved, DeviceMesh(0, 4), crosses_nodes=True) >= seconds
