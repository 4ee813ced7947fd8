"""What memory a plan leaves goes to its KV cache."""

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from realhf.api import Generate
from realhf.cli.plan_tables import totals
from realhf.dataflow.graph import GENERATE, TRAIN_STEP, DataflowGraph
from realhf.dataflow.plan import CallCompute, CallPlan, ExecutionPlan
from realhf.planning import rooms as rooms_module
from realhf.planning import ways
from realhf.planning.explain.comparison import describe
from realhf.planning.model.workload import Workload
from realhf.planning.predict import Prediction, predict, preemptions
from realhf.planning.request import SearchBudget
from realhf.planning.rooms import with_room_left
from realhf.planning.search import search_plan
from realhf.planning.task import PlanningTask
from tests.unit.planning.graphs import TINY, call, cpu_cluster, settings, task_of

GRAPH = DataflowGraph(
    [
        replace(
            call("actor", TINY, GENERATE, "prompts", "seq"),
            interface_impl=Generate(max_new_tokens=56, eos_token=-1),
        ),
        call("actor", TINY, TRAIN_STEP, "seq", mini_batches=15),
    ],
    ["prompts"],
)


def task_with(memory_bytes: float) -> PlanningTask:
    cluster = cpu_cluster(1)
    hardware = structs.replace(cluster.hardware, device_memory_bytes=int(memory_bytes))
    words = {**settings(GRAPH, cluster), "batch_size": 15, "workload": Workload(prompt_tokens=8, new_tokens=56)}
    task = task_of(GRAPH, **words)
    return replace(task, cluster=replace(cluster, hardware=hardware), mixed=frozenset({"actor"}))


def plan_of(room: int | None, micro_batches: int = 1) -> ExecutionPlan:
    compute = CallCompute(kv_cache_tokens=room)
    generation = CallPlan(devices=(0, 1), compute=compute, micro_batches=micro_batches)
    return ExecutionPlan(
        num_devices=1, calls={"actor_generate": generation, "actor_train_step": CallPlan(devices=(0, 1))}
    )


def room_of(prediction: Prediction) -> int | None:
    return prediction.plan.calls["actor_generate"].compute.kv_cache_tokens


@pytest.mark.parametrize("most", [80, 208, 320, None])
def test_the_largest_cache_that_fits_takes_the_place_of_a_smaller_one(most: int | None) -> None:
    """Of 960 tokens that all sequences need."""
    roomy = task_with(2**40)
    need = predict(roomy, plan_of(most)).peak_bytes
    task = task_with(need)
    small = predict(task, plan_of(64))
    found = with_room_left(task, small)
    assert room_of(found) == most
    assert found.fits
    assert found.step_s < small.step_s
    assert with_room_left(task, found) == found


def test_a_cache_for_all_and_one_that_is_no_faster_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_with(2**40)
    whole = predict(task, plan_of(None))
    assert with_room_left(task, whole) is whole
    small = predict(task, plan_of(64))

    def as_fast(task: PlanningTask, plan: ExecutionPlan) -> Any:
        return replace(predict(task, plan), step_s=small.step_s)

    monkeypatch.setattr(rooms_module, "predict", as_fast)
    assert with_room_left(task, small) is small


def test_a_search_ends_with_the_largest_cache_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fifteen samples have no equal micro-batches. The certificate says that the plan is none of those it is about."""
    monkeypatch.setattr(ways, "_fitting", lambda *about: set())
    need = predict(task_with(2**40), plan_of(240)).peak_bytes
    result = search_plan(task_with(need), SearchBudget(evaluations=200))
    assert room_of(result.prediction) == 240
    assert result.certificate.wider_s == result.prediction.step_s
    assert result.certificate.cost_s > result.certificate.wider_s
    assert "proven_optimal" not in result.plan.notes
    roomy = search_plan(task_with(2**40), SearchBudget(evaluations=200))
    assert (room_of(roomy.prediction), roomy.certificate.wider_s) == (None, None)


def test_preemptions_of_a_plan() -> None:
    task = task_with(2**40)
    assert preemptions(task, plan_of(None)) == {}
    [(name, number)] = preemptions(task, plan_of(256)).items()
    model = task.call_models["actor_generate"].under(CallCompute(kv_cache_tokens=256))
    assert (name, number) == ("actor_generate", model.work(plan_of(256).calls[name].strategy, 1).preemptions)
    assert number > 0


def test_what_is_printed_of_preemptions() -> None:
    task = task_with(2**40)
    for room, number in ((256, 1), (None, 0)):
        lines = [line for line in totals(describe(task, plan_of(room))) if "preemptions" in line]
        assert len(lines) == number
        expected = preemptions(task, plan_of(room))
        assert all(line.startswith(f"actor_generate: {expected['actor_generate']:.0f} preemptions") for line in lines)
