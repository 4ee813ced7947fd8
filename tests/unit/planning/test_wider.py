"""On clusters too large to search everything on every mesh: a second search, of all breadth, on few meshes."""

from dataclasses import replace
from typing import Any

import pytest

from realhf.api.computation import FIELDS
from realhf.base.errors import UserError
from realhf.dataflow.graph import TRAIN_STEP, DataflowGraph
from realhf.dataflow.plan import CallCompute, CallPlan
from realhf.planning.model.cluster import Cluster
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.model.timings import load_costs
from realhf.planning.model.workload import Workload
from realhf.planning.request import SearchBudget
from realhf.planning.search import SearchResult, _is_wide, search_plan
from realhf.planning.task import PlanningTask
from tests.unit.planning.graphs import call, with_memory

BUDGET = SearchBudget(evaluations=1000)


def training(memory_gib: int) -> PlanningTask:
    """Of a 70B model on 128 GPUs."""
    graph, hardware = DataflowGraph([call("sft", "llama70b", TRAIN_STEP, "prompts", "", 8)], ["prompts"]), "h100"
    cluster = Cluster(num_nodes=16, devices_per_node=8, hardware=load_hardware(hardware))
    return PlanningTask(
        graph=graph,
        batch_size=512,
        workload=Workload(prompt_tokens=512, new_tokens=512),
        cluster=with_memory(cluster, memory_gib << 30),
        costs=load_costs(graph.models, dtype="bfloat16", hardware=cluster.hardware),
        max_steps_in_flight=1,
        dtype="bfloat16",
        open_choices=dict.fromkeys(graph.models, FIELDS),
    )


def narrow(task: PlanningTask) -> SearchResult:
    return search_plan(replace(task, breadth="computation", seed=1), BUDGET)


@pytest.mark.parametrize(("memory_gib", "states"), [(80, None), (16, True)])
def test_above_64_devices_chunks_and_moved_states_are_found(memory_gib: int, states: bool | None) -> None:
    """States wait in host memory where it lets a faster layout fit. What is proven is said to be about other plans."""
    task = training(memory_gib)
    without, found = narrow(task), search_plan(replace(task, seed=1), BUDGET)
    [chosen], [plain] = found.plan.calls.values(), without.plan.calls.values()
    assert (plain.chunks, plain.compute.offload_states) == (1, None)
    assert chosen.chunks > 1
    assert chosen.compute.offload_states is states
    assert found.prediction.step_s < 0.9 * without.prediction.step_s
    assert found.certificate.lower_bound_s == pytest.approx(without.certificate.lower_bound_s)
    assert str(found.certificate).endswith(f"this plan is not one of them and takes {found.prediction.step_s:.4g} s")
    assert "proven_optimal" not in found.plan.notes
    assert found.evaluations <= (BUDGET.evaluations or 0)


def test_above_64_devices_they_are_found_where_nothing_fits_without_them() -> None:
    """The proof is about the cluster and its halves."""
    task = training(12)
    with pytest.raises(UserError, match="no plan fits into memory"):
        narrow(task)
    found = search_plan(replace(task, seed=1), BUDGET)
    assert found.prediction.fits
    assert (found.certificate.breadth, found.certificate.num_meshes) == ("all", 3)
    assert str(found.certificate).startswith("optimal: no plan on 3 of the meshes takes less than")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, False),
        ({"chunks": 2}, True),
        ({"compute": CallCompute(offload_states=True)}, True),
        ({"compute": CallCompute(data_parallel=(("*", "sharded"),))}, True),
        ({"compute": CallCompute(data_parallel="fsdp")}, False),
    ],
)
def test_what_only_a_search_of_all_breadth_looks_at(changes: dict[str, Any], expected: bool) -> None:
    assert _is_wide(CallPlan(devices=(0, 4), pp=4, **changes)) is expected


def test_without_time_the_answer_is_the_one_of_the_first_search() -> None:
    task = training(80)
    assert search_plan(replace(task, seed=1), SearchBudget(seconds=0.05)).certificate.wider_s is None
