"""What the planner promises whatever it is asked: no worse than a rule, and no worse for more of anything."""

import multiprocessing
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from msgspec import structs

from realhf.api.computation import FIELDS
from realhf.base.errors import UserError
from realhf.dataflow.graph import GENERATE, INFERENCE, TRAIN_STEP, DataflowGraph, ModelFunctionCallDef
from realhf.planning.dominance import worthwhile
from realhf.planning.explain.comparison import describe, explain
from realhf.planning.model.cluster import Cluster, device_meshes, node_runs
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.model.timings import load_costs
from realhf.planning.model.workload import Workload
from realhf.planning.options import num_layouts, num_ways, options_to_search
from realhf.planning.presets import evaluate_presets, rule_plan
from realhf.planning.problem.builder import build_problem
from realhf.planning.problem.native import SearchRequest, native_problem, search_problem
from realhf.planning.request import SearchBudget
from realhf.planning.search import BREADTHS, PREPARING, SECONDS_A_WAY, breadth_in_time, search_plan
from realhf.planning.task import PlanningTask
from tests.unit.planning.graphs import TINY, all_options, call, call_model, cpu_cluster, ppo, with_memory
from tests.unit.planning.graphs import settings as of_cpu

MODELS = (TINY, "llama7b", "llama13b", "llama34b", "llama70b")
ROUNDING = 1 + 1e-9


def reinforce(actor: Any, reward: Any, mini_batches: int = 1) -> list[ModelFunctionCallDef]:
    return [
        call("actor", actor, GENERATE, "prompts", "seq logp"),
        call("reward", reward, INFERENCE, "seq", "rewards"),
        call("actor", actor, TRAIN_STEP, "seq logp rewards", "", mini_batches),
    ]


def random_calls(draw: random.Random) -> list[ModelFunctionCallDef]:
    """Supervised training, a rollout with rewards, or PPO, of models of any size."""
    actor, critic = draw.choice(MODELS), draw.choice(MODELS)
    mini_batches = draw.choice((1, 2, 4))
    match draw.choice(("sft", "reinforce", "ppo")):
        case "sft":
            return [call("sft", actor, TRAIN_STEP, "prompts", "", mini_batches)]
        case "reinforce":
            return reinforce(actor, critic, mini_batches)
        case _:
            return list(ppo(actor, critic, mini_batches).calls.values())


def random_task(seed: int) -> PlanningTask:
    draw = random.Random(seed)
    graph = DataflowGraph(random_calls(draw), ["prompts"])
    hardware = load_hardware(draw.choice(("h100", "a100-80g")))
    cluster = Cluster(num_nodes=draw.choice((1, 2, 3, 4, 8)), devices_per_node=draw.choice((4, 8)), hardware=hardware)
    lengths = Workload(prompt_tokens=draw.choice((128, 1024)), new_tokens=draw.choice((128, 1024)))
    return PlanningTask(
        graph=graph,
        batch_size=draw.choice((64, 128, 512)),
        workload=lengths,
        cluster=cluster,
        costs=load_costs(graph.models, dtype="bfloat16", hardware=hardware),
        max_steps_in_flight=draw.choice((1, 2, 3)),
        dtype="bfloat16",
        may_offload=draw.choice((False, True)),
        open_choices=dict.fromkeys(graph.models, draw.choice(((), FIELDS))),
    )


def check_no_worse_than_a_rule(seed: int) -> None:
    task, seconds = random_task(seed), random.Random(seed).choice((0.2, 0.5, 1.0))
    try:
        found = search_plan(replace(task, seed=seed), SearchBudget(seconds=seconds))
    except UserError as error:
        assert "fits into memory" in str(error), "then no rule may have a plan that fits"  # noqa: PT017
        assert all(rule.problem for rule in evaluate_presets(task))
        return
    assert found.prediction.fits
    fitting = [rule.prediction.step_s for rule in evaluate_presets(task) if rule.prediction and not rule.problem]
    assert all(found.prediction.step_s <= step_s * ROUNDING for step_s in fitting)
    assert found.certificate.lower_bound_s <= found.certificate.cost_s * ROUNDING


@pytest.mark.parametrize("seed", [pytest.param(i, marks=pytest.mark.slow) if i >= 5 else i for i in range(20)])
def test_a_searched_plan_is_no_worse_than_any_rule(seed: int) -> None:
    check_no_worse_than_a_rule(seed)


def _loop() -> None:
    while True:
        pass


@contextmanager
def busy_cores() -> Iterator[None]:
    loops = [multiprocessing.Process(target=_loop, daemon=True) for _ in range(multiprocessing.cpu_count())]
    for loop in loops:
        loop.start()
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.join()


@pytest.mark.slow
@pytest.mark.parametrize("first", range(20, 80, 20))
def test_searched_plans_are_no_worse_than_any_rule_however_many(first: int) -> None:
    for seed in range(first, first + 20):
        check_no_worse_than_a_rule(seed)


@pytest.mark.slow
def test_searched_plans_are_no_worse_than_any_rule_on_busy_cores() -> None:
    with busy_cores():
        for seed in range(200, 210):
            check_no_worse_than_a_rule(seed)


@pytest.mark.parametrize("seed", [pytest.param(i, marks=pytest.mark.slow) if i >= 5 else i for i in range(20)])
def test_the_best_mapping_is_no_worse_than_those_that_it_contains(seed: int) -> None:
    task = random_task(seed)
    results = {rule.name: rule for rule in evaluate_presets(task)}
    best = results["mapping"]
    for contained in ("colocate", "hybridflow"):
        if rule := results[contained].fitting:
            assert best.fitting is not None
            assert best.fitting.step_s <= rule.step_s * ROUNDING


def test_a_rule_whose_plan_cannot_run_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="--rule split: split: all models belong to the side of generation"):
        rule_plan("split", task_on(cpu_cluster(3)))


def task_on(cluster: Cluster) -> PlanningTask:
    graph = DataflowGraph(reinforce(TINY, TINY), ["prompts"])
    return PlanningTask(graph=graph, max_steps_in_flight=2, **of_cpu(graph, cluster))


def optimum_s(task: PlanningTask) -> float:
    """Seconds of the best plan, proven; infinite if none fits."""
    native = native_problem(build_problem(task, all_options(task)))
    found = search_problem(native, SearchRequest(budget=SearchBudget(evaluations=400_000), seed=1, threads=1))
    assert found.proven
    return found.step_s if found.feasible else float("inf")


MIB = 1 << 20


@examples(max_examples=8, deadline=None)
@given(devices=st.sampled_from((2, 4)), memory=st.integers(17, 40), more=st.integers(1, 40))
def test_more_memory_never_makes_the_optimum_worse(devices: int, memory: int, more: int) -> None:
    one, other = (task_on(cpu_cluster(devices, memory=size * MIB)) for size in (memory, memory + more))
    assert optimum_s(other) <= optimum_s(one) * ROUNDING


@pytest.mark.parametrize(
    ("small", "large"), [((1, 2), (1, 4)), ((1, 1), (1, 2)), ((2, 1), (3, 1)), ((2, 2), (3, 2)), ((3, 1), (4, 1))]
)
def test_more_devices_never_make_it_worse(small: tuple[int, int], large: tuple[int, int]) -> None:
    """All meshes of the smaller cluster are meshes of the larger one."""
    tasks = [task_on(cpu_cluster(per_node, nodes)) for nodes, per_node in (small, large)]
    assert set(device_meshes(tasks[0].cluster)) <= set(device_meshes(tasks[1].cluster))
    assert optimum_s(tasks[1]) <= optimum_s(tasks[0]) * ROUNDING


LINKS = ("intra_node_bandwidth", "inter_node_bandwidth", "memory_bandwidth", "host_bandwidth")


@examples(max_examples=40, deadline=None)
@given(
    link=st.sampled_from(LINKS),
    times=st.floats(1.01, 100),
    kind=st.sampled_from((GENERATE, INFERENCE, TRAIN_STEP)),
    nodes=st.sampled_from((1, 2, 4)),
    model=st.sampled_from(MODELS[1:]),
)
def test_more_bandwidth_never_makes_a_call_slower(link: str, times: float, kind: str, nodes: int, model: str) -> None:
    slow = load_hardware("h100")
    fast = structs.replace(slow, **{link: getattr(slow, link) * times})
    definition = call("actor", model, kind, "seq", "out" if kind != TRAIN_STEP else "")  # type: ignore[arg-type]
    seconds = []
    for hardware in (slow, fast):
        cluster = Cluster(num_nodes=nodes, devices_per_node=8, hardware=hardware)
        graph = DataflowGraph([definition], definition.input_data)
        costs = load_costs(graph.models, dtype="bfloat16", hardware=hardware)
        lengths = Workload(prompt_tokens=512, new_tokens=512)
        of = call_model(
            call=definition, batch_size=64, workload=lengths, cluster=cluster, costs=costs, dtype="bfloat16"
        )
        options = all_options(
            PlanningTask(
                graph=graph, batch_size=64, workload=lengths, cluster=cluster, costs=costs, max_steps_in_flight=1,
                dtype="bfloat16",
            )
        )[definition.name]  # fmt: skip
        seconds.append([of.seconds(*shape) for shape in dict.fromkeys(option.shape for option in options)])
    assert all(after <= before * ROUNDING for before, after in zip(*seconds, strict=True))


@pytest.mark.parametrize("link", LINKS[:3])
def test_more_bandwidth_never_raises_the_optimum(link: str) -> None:
    slow = task_on(cpu_cluster(2, 2))
    hardware = structs.replace(slow.cluster.hardware, **{link: getattr(slow.cluster.hardware, link) * 10})
    fast = replace(slow, cluster=replace(slow.cluster, hardware=hardware))
    fast = replace(fast, costs=load_costs(fast.graph.models, dtype="float32", hardware=hardware))
    assert optimum_s(fast) <= optimum_s(slow) * ROUNDING


def test_runs_of_blocks_of_nodes() -> None:
    def runs(nodes: int) -> set[tuple[int, int]]:
        return set(node_runs(Cluster(num_nodes=nodes, devices_per_node=8, hardware=load_hardware("h100"))))

    assert runs(3) == {(0, 1), (1, 1), (2, 1), (0, 2), (1, 2), (0, 3)}
    assert len(runs(16)) == 16 * 17 // 2
    # Of 20 nodes, blocks of two: every run of them, and single nodes and aligned powers of two.
    assert {(2, 6), (6, 14), (0, 20), (19, 1), (16, 4), (8, 8)} <= runs(20)
    assert not {(1, 2), (3, 3), (5, 15)} & runs(20)
    # Of 128, blocks of sixteen.
    assert {(48, 80), (32, 64), (127, 1), (126, 2)} <= runs(128)
    assert len(runs(128)) == 128 + 64 + 32 + 16 + 36


def on_h100(nodes: int, model: str = "llama7b", memory_gib: int = 80) -> PlanningTask:
    """Training and reading of two models, all choices of how calls compute open."""
    graph, hardware = DataflowGraph(reinforce(model, model), ["prompts"]), load_hardware("h100")
    cluster = Cluster(num_nodes=nodes, devices_per_node=8, hardware=hardware)
    return PlanningTask(
        graph=graph,
        batch_size=128,
        workload=Workload(prompt_tokens=512, new_tokens=512),
        cluster=with_memory(cluster, memory_gib << 30),
        costs=load_costs(graph.models, dtype="bfloat16", hardware=hardware),
        max_steps_in_flight=1,
        dtype="bfloat16",
        open_choices=dict.fromkeys(graph.models, FIELDS),
    )


def test_the_ways_to_run_a_call_that_are_searched_are_those_there_is_time_for() -> None:
    """Each breadth contains the narrower ones; the estimate of their number is exact."""
    task = on_h100(2)
    number = {breadth: num_ways(task.varied(breadth=breadth)) for breadth in BREADTHS}
    for breadth, count in number.items():
        within = task.varied(breadth=breadth)
        options = [options_to_search(within, name) for name in task.graph.model_calls]
        ways = [{(o.layout.mesh.size, o.layout.strategy, o.micro_batches, o.compute) for o in rows} for rows in options]
        assert sum(map(len, ways)) == count
        layouts = [len({option.layout for option in rows}) for rows in options]
        assert layouts == [num_layouts(within, name) for name in task.graph.model_calls]
        assert breadth_in_time(task, SECONDS_A_WAY * count / PREPARING * 1.01) == breadth
    assert number["all"] > number["computation"] > number["plain"]
    assert breadth_in_time(task, 0.01) is None
    assert breadth_in_time(task, float("inf")) == "all"
    assert breadth_in_time(on_h100(16), float("inf")) == "computation"


def test_without_time_for_a_search_the_best_rule_is_the_answer_and_is_explained() -> None:
    task = on_h100(4)
    found = search_plan(replace(task, seed=1), SearchBudget(seconds=0.01))
    rules = [rule.prediction.step_s for rule in evaluate_presets(task) if rule.prediction and not rule.problem]
    assert found.prediction.step_s == min(rules)
    assert (found.evaluations, found.num_options, found.certificate.proven) == (0, {}, False)
    why = explain(describe(task, found)).rationale
    assert why is not None
    assert (why.origin, why.instead) == ("the best plan by rule; no time was left to search", ())


def test_where_nothing_fits_as_it_is_set_up_a_short_search_looks_at_all() -> None:
    """Full sharding fits; the rules, and a search without time, do not have it."""
    task = on_h100(1, "llama13b", 30)
    assert all(rule.problem for rule in evaluate_presets(task))
    assert breadth_in_time(task, 0.05) != "all"
    found = search_plan(replace(task, seed=1), SearchBudget(seconds=0.05))
    assert found.prediction.fits
    assert found.certificate.breadth == "all"
    with pytest.raises(UserError, match="no plan fits"):
        search_plan(replace(task, open_choices={}, seed=1), SearchBudget(seconds=0.05))


def test_a_varied_task_knows_what_the_task_knows_and_answers_alike() -> None:
    """What options take does not depend on the models in host memory, steps in flight or what is searched."""
    task = on_h100(1)
    search_plan(replace(task, seed=1), SearchBudget(evaluations=100))
    varied = task.varied(offload=("reward",), max_steps_in_flight=2)
    assert varied.known is task.known
    afresh = replace(task, offload=("reward",), max_steps_in_flight=2)
    assert afresh.known is not task.known
    name = "reward_inference"
    assert worthwhile(varied, name) == worthwhile(afresh, name)
    problems = [
        build_problem(each, {n: list(worthwhile(each, n)) for n in task.graph.model_calls}) for each in (varied, afresh)
    ]
    assert problems[0].calls == problems[1].calls


def test_memory_that_no_model_fits_into_is_said() -> None:
    small = task_on(cpu_cluster(2))
    with pytest.raises(UserError, match="no plan fits into memory"):
        search_plan(replace(small, cluster=with_memory(small.cluster, MIB), seed=1), SearchBudget(evaluations=100))
