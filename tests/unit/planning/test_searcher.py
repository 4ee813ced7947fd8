"""The C++ search against the plain reference and against enumeration; plans from end to end."""

import itertools
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from msgspec import structs

from realhf.base.errors import UserError
from realhf.dataflow.plan import OrderEntry, load_plan, save_plan
from realhf.dataflow.plan_checks import check_plan
from realhf.planning.model.cluster import Cluster
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.model.workload import Workload
from realhf.planning.predict import possible_orders, predict
from realhf.planning.presets import heuristic
from realhf.planning.problem.builder import build_problem
from realhf.planning.problem.native import SearchRequest, native_problem, search_problem
from realhf.planning.problem.native import device_needs as found_needs
from realhf.planning.problem.native import simulate as simulated
from realhf.planning.problem.tables import KeptCopy, Problem
from realhf.planning.request import SearchBudget
from realhf.planning.search import search_plan
from tests.unit.planning.graphs import call_options, cpu_cluster, ppo, random_problem, settings, task_of
from tests.unit.planning.simulation import Simulation, device_needs, makespan_s, simulate


def reference_cost(problem: Problem, choice: Sequence[int]) -> float:
    step_s = makespan_s(simulate(problem, choice, problem.steps)) / problem.steps
    peak = max(need.peak_bytes for need in device_needs(problem, choice))
    return step_s if peak <= problem.device_memory_bytes else 1000 * step_s * peak / problem.device_memory_bytes


def fits(problem: Problem, choice: Sequence[int]) -> bool:
    return max(need.peak_bytes for need in device_needs(problem, choice)) <= problem.device_memory_bytes


def random_choice(problem: Problem, rng: random.Random) -> list[int]:
    return [rng.randrange(len(call.options)) for call in problem.calls]


@given(st.integers(0, 10**9))
@hypothesis_settings(max_examples=200, deadline=None)
def test_a_given_order_is_simulated_as_the_reference_does(seed: int) -> None:
    """And every event names those that it waits for: it starts when the last of them ends."""
    rng = random.Random(seed)
    problem = random_problem(seed, num_calls=rng.randint(1, 5))
    native, choice, steps = native_problem(problem), random_choice(problem, rng), problem.steps
    named = rng.sample(range(len(problem.nodes)), rng.randint(0, len(problem.nodes)))
    other = [(event.node, event.step) for event in simulate(problem, random_choice(problem, rng), steps)]
    order = [(node, step) for node, step in other if node in named]
    found = simulated(native, choice, steps, order)
    assert [event[:4] for event in found] == [
        (event.node, event.step, event.start_s, event.end_s) for event in simulate(problem, choice, steps, order)
    ]
    for event in found:
        assert event.start_s == max((found[number].end_s for number in event.waits_for), default=0.0)
    devices, waits = Simulation(problem, choice).devices, [event.waits_for for event in found]
    for number, event in enumerate(found):
        before = [n for n in range(number) if devices[found[n].node] & devices[event.node]]
        assert not before or before[-1] in waits[number]


@given(st.integers(0, 10**9))
@hypothesis_settings(max_examples=200, deadline=None)
def test_needs_of_devices_equal_the_reference(seed: int) -> None:
    """To the last bit, with copies that are kept for other calls."""
    rng = random.Random(seed)
    problem = random_problem(seed, num_calls=rng.randint(1, 5))
    names = [call.name for call in problem.calls]
    takers = rng.sample(names, rng.randint(0, len(names)))
    kept = [
        KeptCopy(
            source=rng.choice(names),
            takers=part,
            beside=rng.sample(names, rng.randint(0, len(names))),
            size_bytes=rng.random(),
        )
        for part in (takers[::2], takers[1::2])
    ]
    problem = structs.replace(
        problem, kept=kept, communicator_bytes=rng.random(), sending_bytes=rng.choice([0.0, rng.random()])
    )
    for choice in (random_choice(problem, rng) for _ in range(5)):
        assert found_needs(native_problem(problem), choice) == device_needs(problem, choice)


@given(st.integers(0, 10**9))
@hypothesis_settings(max_examples=200, deadline=None)
def test_simulator_equals_the_reference(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(seed, num_calls=rng.randint(1, 5))
    native = native_problem(problem)
    for _ in range(5):
        choice = random_choice(problem, rng)
        evaluation = native.evaluate(choice)
        assert evaluation["cost"] == pytest.approx(reference_cost(problem, choice))
        assert evaluation["peak_bytes"] == max(need.peak_bytes for need in device_needs(problem, choice))
        steps = problem.steps + 2
        expected = [(e.node, e.step, e.start_s, e.end_s) for e in simulate(problem, choice, steps)]
        assert [event[:4] for event in simulated(native, choice, steps)] == expected


@given(st.integers(0, 10**9))
@hypothesis_settings(max_examples=40, deadline=None)
def test_search_finds_the_optimum_of_random_problems(seed: int) -> None:
    problem = random_problem(seed)
    native = native_problem(problem)
    choices = itertools.product(*(range(len(call.options)) for call in problem.calls))
    # A plan that fits comes before any that does not.
    (unfit, optimum) = min((not fits(problem, choice), reference_cost(problem, choice)) for choice in choices)
    found = search_problem(native, SearchRequest(budget=SearchBudget(evaluations=3000), seed=seed))
    assert found.feasible == (not unfit)
    assert found.cost == pytest.approx(optimum)
    assert unfit or found.lower_bound_s <= optimum * (1 + 1e-9)
    assert unfit or not found.proven or found.lower_bound_s == pytest.approx(optimum)
    assert reference_cost(problem, found.choice) == pytest.approx(optimum)
    assert found.evaluations <= 3000


def test_search_finds_the_optimum_of_a_small_ppo_graph() -> None:
    graph = ppo(mini_batches=1)
    cluster = cpu_cluster(2)
    shared = settings(graph, cluster, batch_size=2)
    all_options = {c.name: call_options(c, 2, cluster) for c in graph.calls.values()}
    options = {name: [o for o in rows if o.micro_batches == 1] for name, rows in all_options.items()}
    problem = build_problem(task_of(graph, **shared), options)
    counts = [len(call.options) for call in problem.calls]
    assert counts == [5] * 6  # either device alone; both as dp2, tp2 or pp2
    native = native_problem(problem)
    choices = list(itertools.product(*map(range, counts)))
    optimum = min(native.evaluate(choice)["cost"] for choice in choices)
    for choice in random.Random(0).sample(choices, 20):
        assert native.evaluate(choice)["cost"] == pytest.approx(reference_cost(problem, choice))
    for seed in range(5):
        request = SearchRequest(budget=SearchBudget(evaluations=10_000), seed=seed)
        assert search_problem(native, request).cost == pytest.approx(optimum)


def test_search_plan_returns_the_optimum_of_all_plans() -> None:
    graph = ppo(mini_batches=1)
    cluster = cpu_cluster(2)
    shared = settings(graph, cluster, batch_size=1)
    options = {c.name: call_options(c, 1, cluster) for c in graph.calls.values()}
    native = native_problem(build_problem(task_of(graph, **shared), options))
    choices = itertools.product(*(range(len(rows)) for rows in options.values()))
    optimum = min(native.evaluate(choice)["cost"] for choice in choices)
    for seed in range(3):
        result = search_plan(task_of(graph, seed=seed, **shared), SearchBudget(evaluations=10_000))
        assert result.certificate.cost_s == pytest.approx(optimum)
        assert result.plan.predicted_step_s == pytest.approx(optimum)


def test_the_same_seed_gives_the_same_plan() -> None:
    graph = ppo()
    cluster = cpu_cluster(4, num_nodes=2)
    task = task_of(graph, seed=3, **settings(graph, cluster))
    runs = [search_plan(task, SearchBudget(evaluations=3000)) for _ in range(2)]
    assert runs[0].plan == runs[1].plan
    assert runs[0].evaluations == 3000
    assert runs[0].evaluations_per_s > 0


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_the_plan_carries_an_order_that_runs_and_takes_what_was_predicted(in_flight: int, tmp_path: object) -> None:
    graph = ppo()
    cluster = cpu_cluster(4)
    shared = settings(graph, cluster)
    result = search_plan(task_of(graph, max_steps_in_flight=in_flight, **shared), SearchBudget(evaluations=5000))
    check_plan(result.plan, graph, 16)
    assert {entry.call for entry in result.plan.order} == set(graph.calls)
    prediction = predict(task_of(graph, **shared), result.plan)
    assert prediction.step_s == pytest.approx(result.plan.predicted_step_s)
    assert prediction.step_s == pytest.approx(result.certificate.cost_s, rel=0.05)
    assert prediction.peak_bytes == pytest.approx(result.prediction.peak_bytes)
    assert prediction.call_s == {name: call.predicted_s for name, call in result.plan.calls.items()}
    save_plan(result.plan, f"{tmp_path}/plan.json")
    assert load_plan(f"{tmp_path}/plan.json") == result.plan


def test_search_beats_the_heuristic() -> None:
    graph = ppo()
    shared = settings(graph, cpu_cluster(4))
    rule = predict(task_of(graph, **shared), heuristic(task_of(graph, **shared))).plan
    check_plan(rule, graph, 16)
    assert {(c.devices, c.dp, c.tp, c.pp) for c in rule.calls.values()} == {((0, 4), 1, 4, 1)}
    result = search_plan(task_of(graph, **shared), SearchBudget(evaluations=5000))
    assert rule.predicted_step_s is not None
    assert result.certificate.cost_s < rule.predicted_step_s


def test_heuristic_takes_data_parallelism_across_nodes() -> None:
    graph = ppo("llama7b", "llama7b-critic", mini_batches=8)
    cluster = Cluster(num_nodes=2, devices_per_node=8, hardware=load_hardware("h100"))
    shared = settings(graph, cluster, 512, Workload(prompt_tokens=1024, new_tokens=1024))
    plan = heuristic(task_of(graph, max_steps_in_flight=1, **shared))
    assert {(c.dp, c.tp, c.pp) for c in plan.calls.values()} == {(2, 8, 1)}


def test_nothing_fits() -> None:
    graph = ppo()
    shared = settings(graph, cpu_cluster(2, memory=200_000))
    with pytest.raises(UserError, match="smallest one found needs") as error:
        search_plan(task_of(graph, **shared), SearchBudget(evaluations=1000))
    assert "use more devices" in str(error.value)


def test_memory_can_force_a_slower_plan() -> None:
    graph = ppo()
    shared = settings(graph, cpu_cluster(4))
    free = search_plan(task_of(graph, **shared), SearchBudget(evaluations=5000))
    limit = int(free.prediction.peak_bytes * 0.8)
    tight = search_plan(task_of(graph, **settings(graph, cpu_cluster(4, memory=limit))), SearchBudget(evaluations=5000))
    assert tight.prediction.peak_bytes <= limit
    assert tight.certificate.cost_s > free.certificate.cost_s


def test_order_across_steps() -> None:
    """A trains on devices of its own while the next step's generation runs: one period spans two steps."""
    graph = ppo()
    shared = settings(graph, cpu_cluster(2))
    plan = heuristic(task_of(graph, **shared))
    names = list(graph.calls)
    # Six calls, one a second; critic training is so late that the next step's generation is ahead of it.
    delays = dict(zip(names, [0.0, 1.0, 2.0, 3.0, 4.0, 6.5], strict=True))
    starts = [(name, step, 6.0 * step + delay) for step in range(12) for name, delay in delays.items()]
    first, *_, sequential = possible_orders(starts, plan, graph)
    assert [(entry.call, entry.steps_back) for entry in first] == [
        ("actor_generate", 0),
        ("critic_train_step", 1),
        *((name, 0) for name in names[1:5]),
    ]
    assert sequential == tuple(OrderEntry(call=name) for name in names)


def test_order_falls_back_to_step_after_step() -> None:
    graph = ppo()
    plan = heuristic(task_of(graph, **settings(graph, cpu_cluster(2))))
    names = list(graph.calls)
    starts = [
        (name, step, 6.0 * step + (i if i < 5 else 6.5 - (step % 2)))
        for step in range(12)
        for i, name in enumerate(names)
    ]
    assert possible_orders(starts, plan, graph) == [tuple(OrderEntry(call=name) for name in names)]


@pytest.mark.parametrize(("argument", "value"), [("evaluations", 0), ("max_steps_in_flight", 0), ("seed", -1)])
def test_bad_arguments(argument: str, value: int) -> None:
    graph = ppo()
    given = {"evaluations": 1000, "max_steps_in_flight": 2, "seed": 0, argument: value}
    task = task_of(graph, max_steps_in_flight=given["max_steps_in_flight"], **settings(graph, cpu_cluster(2)))
    with pytest.raises(UserError, match=f"{argument} {value} is not from"):
        search_plan(replace(task, seed=given["seed"]), SearchBudget(evaluations=given["evaluations"]))


def test_tables_that_do_not_fit_are_refused() -> None:
    problem = random_problem(0)
    problem.calls[0].parents.append(("call0", 0))
    with pytest.raises(ValueError, match="cycle"):
        native_problem(problem)


def test_what_takes_long_to_import_is_not_imported() -> None:
    modules = "realhf.planning.search, realhf.planning.presets"
    code = f"import sys, {modules}; print(sys.modules.keys() & {{'torch', 'numpy', 'rich'}})"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"
