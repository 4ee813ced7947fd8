"""Proofs: bounds are never above the optimum, and what is called optimal is, against enumeration."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realhf.dataflow.graph import TRAIN_STEP, DataflowGraph
from realhf.planning.certificate import Certificate
from realhf.planning.model.cluster import Cluster, has_all_meshes, node_runs
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.model.timings import load_costs
from realhf.planning.model.workload import Workload
from realhf.planning.request import SearchBudget
from realhf.planning.search import search_plan
from tests.unit.planning.evaluate_plan import evaluate
from tests.unit.planning.graphs import call, task_of
from tests.unit.planning.graphs import settings as of_task
from tests.unit.planning.problem_files import (
    NAMES,
    OPTIMA,
    brute_force,
    named,
    native,
    random_problem,
    reference_problem,
    solve,
    symmetric_problem,
)


@given(st.integers(0, 10**9))
@settings(max_examples=400, deadline=None)
def test_no_bound_is_above_the_optimum(seed: int) -> None:
    problem = random_problem(seed)
    optimum = brute_force(problem)
    engine = native(problem)
    # The bound without branching; a proof cut short; a whole one. The search alone would find most optima by itself:
    # with single moves and few evaluations the proof has something left to do.
    for proves, evaluations in ((False, 100), (True, 100), (True, 5000)):
        found = solve(engine, seed=seed, evaluations=evaluations, single_moves=evaluations == 100, proves=proves)
        if optimum is None:
            assert not found["feasible"]
            continue
        assert found["lower_bound_s"] <= optimum
        if found["feasible"]:
            assert found["step_s"] >= optimum
            assert found["lower_bound_s"] <= found["step_s"]
        if found["proven"]:
            assert found["feasible"]
            assert found["lower_bound_s"] == found["step_s"] == optimum
    assert found["proven"]
    assert found["feasible"] == (optimum is not None)


@given(st.integers(0, 10**9))
@settings(max_examples=200, deadline=None)
def test_exchangeable_devices_lose_no_optimum(seed: int) -> None:
    problem = symmetric_problem(seed)
    engine = native(problem)
    plans = itertools.product(*(range(len(call["options"])) for call in problem["calls"]))
    results = [engine.evaluate(plan) for plan in plans]
    optimum = min((result["step_time"] for result in results if result["feasible"]), default=None)
    found = solve(engine, seed=seed, evaluations=300, single_moves=True, proves=True)
    assert optimum is None or found["lower_bound_s"] <= optimum
    if found["proven"]:
        assert (found["step_s"] if found["feasible"] else None) == optimum


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_reference_problems_are_solved_and_proven(name: str, seed: int) -> None:
    problem = reference_problem(name)
    found = solve(
        native(problem), seed=seed, evaluations=400_000, threads=2, single_moves=False, proves=True
    )  # fmt: skip
    best = OPTIMA[name]["best_us_per_step"]
    assert evaluate(problem, named(problem, found["choice"]))["us_per_step"] == best
    assert found["proven"]
    assert found["lower_bound_s"] == best


@pytest.mark.measures
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(20))
def test_reference_problems_are_solved_in_a_second(name: str, seed: int) -> None:
    found = solve(
        native(reference_problem(name)), seed=seed, evaluations=0, seconds=5, threads=2, single_moves=False, proves=True
    )
    assert found["proven"]
    assert found["trace"][-1][0] < 1
    assert found["step_s"] == OPTIMA[name]["best_us_per_step"]


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_nothing_but_the_time(threads: int) -> None:
    engine = native(reference_problem("s2_steps3"))
    keys = ("choice", "lower_bound_s", "proven", "all_evaluations", "full_evaluations", "early_rejections")
    one, several = (
        solve(engine, seed=7, evaluations=200_000, threads=t, single_moves=False, proves=True) for t in (1, threads)
    )
    assert [one[key] for key in keys] == [several[key] for key in keys]


def test_a_proof_finds_what_a_poor_search_missed() -> None:
    """The search gets 100 evaluations of single moves and stays above the optimum; branch and bound closes the gap."""
    problem = reference_problem("n1_steps3")
    engine = native(problem)
    poor = solve(engine, seed=0, evaluations=100, single_moves=True, proves=False)
    assert poor["step_s"] > OPTIMA["n1_steps3"]["best_us_per_step"]
    assert 0 < poor["lower_bound_s"] < OPTIMA["n1_steps3"]["best_us_per_step"]
    assert not poor["proven"]


def test_what_a_certificate_says() -> None:
    optimal = Certificate(cost_s=2.0, lower_bound_s=2.0, proven=True)
    assert (optimal.gap, str(optimal)) == (0.0, "optimal: no plan takes less than 2 s a step")
    open_ = Certificate(cost_s=2.0, lower_bound_s=1.6, proven=False)
    assert open_.gap == pytest.approx(0.25)
    assert str(open_) == "no plan takes less than 1.6 s a step; this one is within 25.0% of that"
    assert Certificate(cost_s=2.0, lower_bound_s=0.5, proven=False).gap == pytest.approx(3.0)
    assert Certificate(cost_s=2.0, lower_bound_s=1.9, proven=True).gap == 0.0
    assert str(Certificate(cost_s=2.0, lower_bound_s=0.5, proven=False)) == (
        "no plan takes less than 0.5 s a step; this one is within 300.0% of that"
    )
    assert Certificate(cost_s=2.0, lower_bound_s=0.0, proven=False).gap == float("inf")
    assert str(Certificate(cost_s=2.0, lower_bound_s=0.0, proven=False)) == "no lower bound was proven"
    nothing = Certificate(cost_s=2.0, lower_bound_s=float("inf"), feasible=False, proven=True)
    assert str(nothing) == "no plan fits into memory (proven)"
    unknown = Certificate(cost_s=2.0, lower_bound_s=0.0, feasible=False, proven=False)
    assert str(unknown) == "no plan that fits into memory was found"


@pytest.mark.parametrize(
    ("limits", "plans"),
    [
        ({"has_all_meshes": False}, "plan on runs of blocks of nodes"),
        ({"num_meshes": 3}, "plan on 3 of the meshes"),
        (
            {"breadth": "computation"},
            "plan without chunks, moved optimizer states, modes of operators or smaller KV caches",
        ),
        ({"breadth": "plain"}, "plan without chunks, with calls computed as they are set up"),
        ({"offload": ("ref", "reward")}, "plan with ref, reward in host memory"),
        ({"offload": ()}, "plan with no model in host memory"),
        ({"has_all_meshes": False, "offload": ()}, "plan on runs of blocks of nodes and with no model in host memory"),
    ],
)
def test_a_certificate_says_what_its_plans_leave_out(limits: dict[str, Any], plans: str) -> None:
    found = Certificate(cost_s=2.0, lower_bound_s=1.6, proven=False, **limits)
    assert str(found) == f"no {plans} takes less than 1.6 s a step; this one is within 25.0% of that"
    assert str(replace(found, proven=True)) == f"optimal: no {plans} takes less than 2 s a step"
    wider = replace(found, wider_s=1.5)
    assert str(wider) == f"no {plans} takes less than 1.6 s a step; this plan is not one of them and takes 1.5 s"


@pytest.mark.parametrize(("nodes", "has_all"), [(1, True), (16, True), (17, False), (128, False)])
def test_above_16_nodes_not_all_meshes_are_searched(nodes: int, has_all: bool) -> None:
    cluster = Cluster(num_nodes=nodes, devices_per_node=8, hardware=load_hardware("h100"))
    assert has_all_meshes(cluster) is has_all
    assert (len(node_runs(cluster)) == nodes * (nodes + 1) // 2) is has_all


@pytest.mark.parametrize(("nodes", "seconds"), [(17, None), (16, None), (17, 0.01)])
def test_the_certificate_of_a_search_says_so(nodes: int, seconds: float | None) -> None:
    """With a search of one evaluation, and without time for any, when the best rule is the answer."""
    graph = DataflowGraph([call("sft", "llama7b", TRAIN_STEP, "prompts")], ["prompts"])
    cluster = Cluster(num_nodes=nodes, devices_per_node=1, hardware=load_hardware("h100"))
    shared = of_task(graph, cluster, batch_size=nodes * 8, workload=Workload(prompt_tokens=64, new_tokens=0))
    costs = load_costs(graph.models, dtype="bfloat16", hardware=cluster.hardware)
    task = task_of(graph, **{**shared, "costs": costs, "dtype": "bfloat16"})
    found = search_plan(task, SearchBudget(evaluations=1, seconds=seconds))
    assert found.certificate.has_all_meshes is (nodes == 16)
    if seconds is None:
        assert ("on runs of blocks of nodes" in str(found.certificate)) is (nodes == 17)
