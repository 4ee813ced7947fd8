"""The real dispatcher over workers in virtual time: the planner's order and times, overlap, and 1,024 of them."""

import asyncio
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from realhf.dataflow.graph import DataflowGraph
from realhf.dataflow.plan import CallPlan, ExecutionPlan, OrderEntry
from realhf.master.state import Node
from realhf.planning.problem.native import native_problem, simulate
from realhf.planning.problem.tables import CallTable, OptionRow, Problem, TransferTable
from tests.unit.master.cluster import VirtualCluster, planned_graph
from tests.unit.master.test_state import random_copies, random_graph, random_plan
from tests.unit.master.workers import GRAPH

STEPS = 4


def planned_spans(
    graph: DataflowGraph, plan: ExecutionPlan, seconds: dict[str, float], move_seconds: dict[str, float]
) -> dict[Node, tuple[float, float]]:
    """When the planner's simulator says that each call runs; `move_seconds` of the calls that need a reallocation."""
    names = [*graph.nodes, *(f"copy for {name}" for name in move_seconds)]

    def parents(name: str) -> list[tuple[str, int]]:
        return [(edge.parent, edge.steps_back) for edge in graph.parents(name)]

    def move(name: str, source: str, target: str, seconds: float, parents: list[tuple[str, int]]) -> TransferTable:
        return TransferTable(
            name=name,
            source=source,
            target=target,
            parents=parents,
            rows=[0],
            columns=[0],
            num_columns=1,
            seconds=[seconds],
            on=[target],
        )

    tables = [
        CallTable(
            name=name,
            model=graph.calls[name].model_name,
            trains=graph.calls[name].trains,
            home=plan.home(graph, graph.calls[name].model_name),
            parents=[*parents(name), *([(f"copy for {name}", 0)] if name in move_seconds else [])],
            options=[
                OptionRow(
                    devices=plan.calls[name].devices,
                    strategy="",
                    micro_batches=1,
                    time_s=seconds[name],
                    static_bytes=0.0,
                    dynamic_bytes=0.0,
                    copy_bytes=0.0,
                )
            ],
        )
        for name in graph.calls
    ]
    follows = [
        move(name, plan.home(graph, follow.source), plan.home(graph, follow.target), seconds[name], parents(name))
        for name, follow in graph.follows.items()
    ]
    copies = [
        move(f"copy for {name}", plan.home(graph, graph.calls[name].model_name), name, move_s, parents(name))
        for name, move_s in move_seconds.items()
    ]
    problem = Problem(
        num_devices=plan.num_devices,
        devices_per_node=plan.num_devices,
        device_memory_bytes=1.0,
        steps=STEPS,
        max_steps_in_flight=plan.max_steps_in_flight,
        calls=tables,
        transfers=[*follows, *copies],
    )
    order = [
        (names.index(each), step)
        for name, step in plan.unrolled(graph, STEPS)
        for each in ([f"copy for {name}", name] if name in move_seconds else [name])
    ]
    events = simulate(native_problem(problem), [0] * len(tables), STEPS, order)
    return {
        Node(event.step, names[event.node]): (event.start_s, event.end_s)
        for event in events
        if event.node < len(graph.nodes)
    }


def workers_of(graph: DataflowGraph, plan: ExecutionPlan, name: str) -> frozenset[int]:
    """Who computes a call, or takes part when a model follows another."""
    if name in graph.calls:
        return frozenset(plan.layout(name).mesh.devices)
    return planned_graph(graph, plan, 4).devices[name]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**62))
def test_the_master_runs_what_the_planner_simulates(seed: int) -> None:
    random = Random(seed)
    graph = random_graph(random)
    plan = random_plan(graph, random)
    if random.random() < 0.5:
        graph, plan = random_copies(random)
    plan = replace(plan, offload=())
    seconds = {name: float(random.randint(1, 5)) for name in graph.nodes}  # whole numbers: many ends at one time
    planned = planned_graph(graph, plan, 4)
    move_seconds = {name: float(random.randint(0, 3)) for name in graph.calls if planned.movers[name]}
    cluster = VirtualCluster(
        planned,
        plan.num_devices,
        lambda node: seconds[node.call],
        move_seconds=lambda node: move_seconds[node.call],
        wide_lanes=True,
    )
    assert asyncio.run(cluster.run(plan.unrolled(graph, STEPS), plan.max_steps_in_flight)), "deadlock"
    assert cluster.spans == planned_spans(graph, plan, seconds, move_seconds)
    for worker, done in enumerate(cluster.order):
        expected = [Node(step, name) for name, step in plan.unrolled(graph, STEPS)]
        assert done == [node for node in expected if worker in workers_of(graph, plan, node.call)]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**62))
def test_with_one_move_at_a_time_the_order_on_every_worker_is_the_plans(seed: int) -> None:
    random = Random(seed)
    graph = random_graph(random)
    plan = random_plan(graph, random)
    if random.random() < 0.5:
        graph, plan = random_copies(random)

    def seconds(_: Node) -> float:
        return random.expovariate(1.0)

    cluster = VirtualCluster(planned_graph(graph, plan, 4), plan.num_devices, seconds, move_seconds=seconds)
    assert asyncio.run(cluster.run(plan.unrolled(graph, STEPS), plan.max_steps_in_flight)), "deadlock"
    for worker, done in enumerate(cluster.order):
        expected = [Node(step, name) for name, step in plan.unrolled(graph, STEPS)]
        assert done == [node for node in expected if worker in workers_of(graph, plan, node.call)]


ACTOR, CRITIC = CallPlan(devices=(0, 512), dp=512), CallPlan(devices=(512, 512), dp=512)
HALVES = {name: ACTOR if name.startswith("actor") else CRITIC for name in GRAPH.calls}
SECONDS = {
    "actor_generate": 4.0,
    "actor_train_step": 2.0,
    "reward_inference": 1.0,
    "critic_inference": 1.0,
    "critic_train_step": 3.0,
}
STEP = ("actor_generate", "reward_inference", "critic_inference", "actor_train_step", "critic_train_step")


def two_halves(max_steps_in_flight: int, dead: frozenset[int] = frozenset()) -> tuple[VirtualCluster, bool]:
    """PPO on 1,024 workers: the actor on the first half, critic and reward model on the other."""
    order = tuple(OrderEntry(call=name) for name in STEP)
    plan = ExecutionPlan(num_devices=1024, calls=HALVES, order=order, max_steps_in_flight=max_steps_in_flight)
    cluster = VirtualCluster(planned_graph(GRAPH, plan, 512), 1024, lambda node: SECONDS[node.call], dead)
    return cluster, asyncio.run(cluster.run(plan.unrolled(GRAPH, 3), max_steps_in_flight))


def test_steps_overlap_on_a_thousand_workers() -> None:
    """The same times as on two devices, by hand in test_state.py: 8 s a step, 9 s without overlap."""
    cluster, ended = two_halves(max_steps_in_flight=2)
    assert ended
    assert [cluster.spans[Node(step, "actor_generate")][0] for step in range(3)] == [0.0, 8.0, 16.0]
    assert cluster.spans[Node(0, "critic_train_step")] == (6.0, 9.0)
    assert cluster.num_messages < 3 * 1024 * 10, "its calls, the end of the step, transfers to or from a few others"
    cluster, ended = two_halves(max_steps_in_flight=1)
    assert ended
    assert [cluster.spans[Node(step, "actor_generate")][0] for step in range(3)] == [0.0, 9.0, 18.0]


def test_a_worker_that_answers_nothing_holds_up_those_that_need_it() -> None:
    """Worker 700 dies in the first reward call: the second half is late, the first half has done what it could."""
    cluster, ended = two_halves(max_steps_in_flight=2, dead=frozenset({700}))
    assert not ended
    assert cluster.spans == {Node(0, "actor_generate"): (0.0, 4.0)}
    cluster.now_s = 700.0
    assert list(cluster.dispatcher.late()) == list(range(512, 1024))
    assert cluster.dispatcher.describe(700) == "reward_inference of step 1"
    assert cluster.dispatcher.describe(0) == "no request"
