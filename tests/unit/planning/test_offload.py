"""What a plan that offloads takes: seconds of the copies and bytes of the devices, by hand."""

from dataclasses import replace

import msgspec
import pytest

from realhf.base.errors import UserError
from realhf.dataflow.follow import Follow
from realhf.dataflow.graph import DataflowGraph
from realhf.dataflow.plan import CallPlan, ExecutionPlan
from realhf.geometry.parameters import parameter_count
from realhf.planning.explain.analysis import OFFLOAD, analyse
from realhf.planning.explain.remedies import find_remedies
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.options import Option
from realhf.planning.predict import predict, predict_in_best_order
from realhf.planning.problem.builder import build_problem
from realhf.planning.problem.native import native_problem
from realhf.planning.request import SearchBudget
from realhf.planning.search import search_plan
from realhf.planning.task import PlanningTask
from tests.unit.planning.graphs import TINY, cpu_cluster, ppo, settings, task_of
from tests.unit.planning.simulation import makespan_s, simulate

HOST = load_hardware("cpu").host_bandwidth
COUNT = parameter_count(TINY)
ON_ONE = ExecutionPlan(num_devices=1, calls=dict.fromkeys(ppo().calls, CallPlan(devices=(0, 1))))


def offloading(plan: ExecutionPlan, *models: str) -> ExecutionPlan:
    return msgspec.structs.replace(plan, offload=models)


def test_seconds_of_the_copies() -> None:
    """A model that nobody changes is only copied back; to train, the actor comes with its states and goes with them."""
    graph, shared = ppo(), settings(ppo(), cpu_cluster(1))
    stays = predict(task_of(graph, **shared), ON_ONE)
    reference = predict(task_of(graph, **shared), offloading(ON_ONE, "ref"))
    assert reference.transfer_s["load ref for ref_inference"] == 4 * COUNT / HOST
    assert reference.transfer_s["offload ref after ref_inference"] == 0
    assert reference.step_s == pytest.approx(stays.step_s + 4 * COUNT / HOST)
    actor = predict(task_of(graph, **shared), offloading(ON_ONE, "actor"))
    moved_s = 12 * COUNT / HOST  # all but the gradients
    assert actor.transfer_s["load actor for actor_generate"] == 4 * COUNT / HOST
    assert actor.transfer_s["offload actor after actor_generate"] == 0
    assert actor.transfer_s["offload actor after actor_train_step"] == moved_s
    assert actor.step_s == pytest.approx(stays.step_s + 2 * moved_s + 4 * COUNT / HOST)


def test_a_copy_hides_behind_the_work_of_other_devices() -> None:
    """The reference comes back to its device while others generate; sending it away takes no time."""
    graph, shared = ppo(), settings(ppo(), cpu_cluster(2))
    calls = {**ON_ONE.calls, "ref_inference": CallPlan(devices=(1, 1))}
    apart = ExecutionPlan(num_devices=2, calls=calls)
    task = task_of(graph, **shared)
    assert predict(task, offloading(apart, "ref")).step_s == predict(task, apart).step_s


def test_memory_counts_in_the_models_own_calls() -> None:
    graph, shared = ppo(), settings(ppo(), cpu_cluster(1))

    def need(name: str) -> float:
        return task_of(graph, **shared).call_models[name].work(ON_ONE.layout(name).strategy, 1).dynamic_bytes()

    values = parameter_count(TINY.with_head("scalar"))
    home = {"actor": 16 * COUNT, "critic": 16 * values, "ref": 4 * COUNT, "reward": 4 * values}
    models = {name: c.model_name for name, c in graph.calls.items()}
    assert predict(task_of(graph, **shared), ON_ONE).device_bytes == [sum(home.values()) + max(map(need, models))]
    for offloaded in (("ref",), ("ref", "reward"), tuple(home)):
        staying = sum(size for model, size in home.items() if model not in offloaded)
        loaded = {  # parameters alone for those who read them
            name: home[model] // (1 if graph.calls[name].trains or model in ("ref", "reward") else 4)
            for name, model in models.items()
        }
        peak = max(need(name) + (loaded[name] if model in offloaded else 0) for name, model in models.items())
        assert predict(task_of(graph, **shared), offloading(ON_ONE, *offloaded)).device_bytes == [staying + peak]


@pytest.mark.parametrize("every", [1, 2])
def test_the_search_engine_simulates_the_same(every: int) -> None:
    calls = list(ppo().calls.values())
    graph = DataflowGraph(calls, ["prompts"], {"ref": Follow("actor", eta=0.5, every_steps=every)})
    cluster = cpu_cluster(2)
    task = PlanningTask(graph=graph, max_steps_in_flight=2, **settings(graph, cluster))
    whole, halves = CallPlan(devices=(0, 2), tp=2), [CallPlan(devices=(device, 1)) for device in (0, 1)]
    places = dict(zip(graph.calls, [whole, halves[0], whole, halves[1], whole, halves[1]], strict=True))
    places["actor_train_step"] = places["actor_generate"]
    plan = offloading(ExecutionPlan(num_devices=2, calls=places), "critic", "actor")
    options = {name: [Option(call.layout, 1)] for name, call in places.items()}
    problem = build_problem(replace(task, offload=plan.offload), options)
    evaluation = native_problem(problem).evaluate([0] * len(places))
    expected = makespan_s(simulate(problem, [0] * len(places), problem.steps))
    assert evaluation["step_time"] * problem.steps == pytest.approx(expected)
    prediction = predict_in_best_order(task, plan)
    assert evaluation["peak_bytes"] == max(prediction.device_bytes)
    assert prediction.plan.offload == plan.offload
    spans = [span for span in analyse(task, prediction).spans if span.kind == OFFLOAD]
    loads = [span for span in spans if span.name.startswith("load")]
    assert len(loads) == 5 * problem.steps, "actor: two calls and the one that follows it, critic: two calls"


def test_a_search_finds_plans_that_fit_only_with_models_in_host_memory() -> None:
    """On one device all models do not fit together; each of them does alone."""
    graph = ppo()
    roomy = task_of(graph, **settings(graph, cpu_cluster(1)))
    [together] = predict(roomy, ON_ONE).device_bytes
    everything = ("actor", "reward", "ref", "critic")
    [one_by_one] = predict(roomy, offloading(ON_ONE, *everything)).device_bytes
    tight = cpu_cluster(1, memory=int(one_by_one) + 1)
    assert one_by_one < together
    task, budget = task_of(graph, **settings(graph, tight)), SearchBudget(evaluations=3000)
    with pytest.raises(UserError, match="no plan fits into memory"):
        search_plan(task, budget)
    found = search_plan(replace(task, offload=everything), budget)
    assert found.plan.offload == everything
    assert found.prediction.peak_bytes <= tight.device_memory_bytes
    assert find_remedies(task).offload == everything, "reward and reference alone are not enough"
