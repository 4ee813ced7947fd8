"""A model that follows another one costs a reallocation a step, and has its place in the plan's order."""

import pytest

from realhf.dataflow.follow import Follow
from realhf.dataflow.graph import DataflowGraph
from realhf.dataflow.plan import CallPlan, ExecutionPlan
from realhf.geometry.parameters import parameter_count
from realhf.geometry.shards import Placement
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.options import Option
from realhf.planning.predict import predict
from realhf.planning.problem.builder import build_problem
from realhf.planning.problem.native import native_problem, reallocation_table
from realhf.planning.request import SearchBudget
from realhf.planning.search import search_plan
from realhf.realloc.plan.planner import plan_between
from tests.unit.planning.graphs import TINY, call_options, cpu_cluster, ppo, settings, task_of
from tests.unit.planning.simulation import makespan_s, simulate

NAME = "ref_follows_actor"
CPU = load_hardware("cpu")


def following(every_steps: int = 1) -> DataflowGraph:
    return DataflowGraph(
        list(ppo().calls.values()), ["prompts"], {"ref": Follow("actor", eta=0.1, every_steps=every_steps)}
    )


def placed(reference: CallPlan, training: CallPlan) -> ExecutionPlan:
    """Everything is on device 0 but the two in question."""
    calls = dict.fromkeys(ppo().calls, CallPlan(devices=(0, 1)))
    return ExecutionPlan(num_devices=4, calls={**calls, "ref_inference": reference, "actor_train_step": training})


@pytest.mark.parametrize("every_steps", [1, 4])
def test_it_takes_what_the_reallocation_planner_moves(every_steps: int) -> None:
    graph = following(every_steps)
    reference, training = CallPlan(devices=(1, 1)), CallPlan(devices=(2, 2), tp=2)
    prediction = predict(task_of(graph, **settings(graph, cpu_cluster(4))), placed(reference, training))
    moved = plan_between(TINY, Placement(training.layout), Placement(reference.layout), None, by="messages")
    assert sum(moved.lacking_bytes.values()) == sum(moved.sent_bytes.values()) == 4 * parameter_count(TINY)
    seconds = CPU.send_s(sum(moved.lacking_bytes.values()), crosses_nodes=False)
    assert prediction.transfer_s[NAME] == pytest.approx(seconds / every_steps)


@pytest.mark.parametrize("searched", [True, False])
def test_who_has_the_parameters_sends_them_to_all_that_follow(searched: bool) -> None:
    """To two replicas of the reference, device 0 sends all twice: a replica that sent on would send its average."""
    graph, cluster = following(), cpu_cluster(4)
    reference, training = CallPlan(devices=(2, 2), dp=2), CallPlan(devices=(0, 1))
    shared = settings(graph, cluster)
    plan = placed(reference, training)
    if searched:
        options = {name: [Option(call.layout, call.micro_batches)] for name, call in plan.calls.items()}
        problem = build_problem(
            task_of(graph, max_steps_in_flight=1, **shared), options, reallocations=reallocation_table
        )
        [found] = next(transfer.seconds for transfer in problem.transfers if transfer.name == NAME)
    else:
        found = predict(task_of(graph, **shared), plan).transfer_s[NAME]
    moved = plan_between(TINY, Placement(training.layout), Placement(reference.layout), None, by="messages")
    assert moved.sent_bytes == {0: 2 * 4 * parameter_count(TINY)}
    assert found == pytest.approx(CPU.send_s(moved.sent_bytes[0], crosses_nodes=False))


@pytest.mark.parametrize("delays", [True, False])
def test_it_delays_the_next_step_where_the_reference_shares_a_device(delays: bool) -> None:
    """With the reference and all other calls on device 0, to which the actor's parameters come from device 1, what
    comes next waits for it. With all others on device 0 and the reference on device 1 it hides behind generation, since
    device 0, which only sends, computes meanwhile."""
    graph, cluster = following(), cpu_cluster(4)
    reference, training = (0, 1) if delays else (1, 0)
    plan = placed(CallPlan(devices=(reference, 1)), CallPlan(devices=(training, 1)))
    with_it = predict(task_of(graph, **settings(graph, cluster)), plan)
    without = predict(task_of(ppo(), **settings(graph, cluster)), plan)
    assert with_it.transfer_s[NAME] > 0
    assert with_it.step_s > without.step_s if delays else with_it.step_s == without.step_s
    assert with_it.device_bytes == without.device_bytes


def test_a_searched_plan_has_it_in_its_order() -> None:
    graph, cluster = following(), cpu_cluster(2)
    shared = settings(graph, cluster)
    result = search_plan(task_of(graph, **shared), SearchBudget(evaluations=3000))
    assert sorted(entry.call for entry in result.plan.order) == sorted(graph.nodes)
    options = {call.name: call_options(call, shared["batch_size"], cluster) for call in graph.calls.values()}
    problem = build_problem(task_of(graph, **shared), options)
    native, choice = native_problem(problem), [3] * len(graph.calls)
    expected = simulate(problem, choice, problem.steps)
    assert native.evaluate(choice)["step_time"] * problem.steps == pytest.approx(makespan_s(expected))
    assert sum(node == len(graph.calls) for node, *_ in native.trace(choice, 10, ())) == 10, "once a step"
