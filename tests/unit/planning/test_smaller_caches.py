"""Rooms for keys and values that a search looks at."""

import math
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from realhf.dataflow.graph import GENERATE, INFERENCE, TRAIN_STEP, DataflowGraph
from realhf.dataflow.plan import AS_SET_UP, CallCompute
from realhf.geometry.layout import ParallelStrategy
from realhf.planning.model.workload import Workload
from realhf.planning.options import (
    options_to_search,
)
from realhf.planning.task import PlanningTask
from realhf.planning.ways import smaller_caches
from tests.unit.planning.graphs import TINY, Stub, call, cpu_cluster, settings, task_of
from tests.unit.planning.test_ways import ROLLOUT


def generating(memory_bytes: float, **changes: Any) -> PlanningTask:
    """The actor of four devices, whose responses are of up to 56 tokens, and a reference."""
    rollout = replace(ROLLOUT, max_new_tokens=56, **changes)
    graph = DataflowGraph(
        [
            replace(call("actor", TINY, GENERATE, "prompts", "seq"), interface_impl=rollout),
            call("ref", TINY, INFERENCE, "seq", "ref_logp"),
            call("actor", TINY, TRAIN_STEP, "seq ref_logp"),
        ],
        ["prompts"],
    )
    cluster = cpu_cluster(4)
    hardware = structs.replace(cluster.hardware, device_memory_bytes=int(memory_bytes))
    words = {**settings(graph, cluster), "workload": Workload(prompt_tokens=8, new_tokens=56)}
    task = task_of(graph, **words)
    return replace(task, cluster=replace(cluster, hardware=hardware), mixed=frozenset({"actor"}))


def rooms(task: PlanningTask, strategy: ParallelStrategy, count: int = 1) -> list[int | None]:
    definition = task.graph.model_calls["actor_generate"]
    found = list(smaller_caches(task, definition, [(strategy, count, AS_SET_UP)]))
    assert all(each[:2] == (strategy, count) for each in found)
    assert all(each[2] == CallCompute(kv_cache_tokens=each[2].kv_cache_tokens) for each in found)
    return [compute.kv_cache_tokens for _, _, compute in found]


@pytest.mark.parametrize(
    ("strategy", "count", "found"),
    [
        # Of 16 samples of 64 tokens; at least one of them.
        (ParallelStrategy(tp=4), 1, [544, 304, 176, 112, 64]),
        (ParallelStrategy(dp=2), 1, [288, 176, 112, 80, 64]),
        (ParallelStrategy(dp=16), 1, []),
        (ParallelStrategy(pp=2), 1, [576, 352, 224, 160, 128]),  # one in each of two parts
        (ParallelStrategy(tp=4), 2, []),
    ],
)
def test_rooms_that_are_searched_where_memory_is_short(
    strategy: ParallelStrategy, count: int, found: list[int]
) -> None:
    assert rooms(generating(1), strategy, count) == found


def test_all_keys_and_values_have_room_beside_the_homes_of_all_models() -> None:
    """Each on all devices, with data parallelism alone; another layout than that has a copy, too."""
    task = generating(1)
    everywhere, other = ParallelStrategy(dp=4), ParallelStrategy(tp=4)
    homes = sum(task.call_models[name].static_bytes(everywhere) for name in ("ref_inference", "actor_train_step"))
    for strategy in (everywhere, other):
        work = task.call_models["actor_generate"].work(strategy, 1)
        need = homes + work.dynamic_bytes() + (0 if strategy == everywhere else work.placed.parameter_bytes())
        assert rooms(generating(math.ceil(need)), strategy) == []
        assert rooms(generating(math.floor(need) - 1), strategy) != []
    dynamic = task.call_models["actor_generate"].work(everywhere, 1).dynamic_bytes()
    for waiting, is_beside in ((("actor", "ref"), False), (("ref",), True)):
        found = rooms(replace(generating(math.ceil(dynamic)), offload=waiting), everywhere)
        assert bool(found) == is_beside, "models that wait in host memory are not beside it"


def test_rooms_that_are_not_the_plan_s_to_choose() -> None:
    """Of what the experiment gives, of other engines, where little is searched, and of calls that do not generate."""
    task, alone = generating(1), ParallelStrategy()
    assert rooms(task, alone)
    assert not rooms(generating(1, kv_cache_tokens=64), alone)
    assert not rooms(replace(task, mixed=frozenset()), alone)
    assert not rooms(task.varied(breadth="computation"), alone)
    way = (alone, 1, AS_SET_UP)
    assert not list(smaller_caches(task, task.graph.model_calls["actor_train_step"], [way]))
    stub = replace(task.graph.model_calls["actor_generate"], interface_impl=Stub())
    assert not list(smaller_caches(task, stub, [way])), "its interface knows nothing of room"


def test_a_search_has_the_rooms_among_its_options() -> None:
    alone = [each for each in options_to_search(generating(1), "actor_generate") if each.layout.mesh.size == 1]
    assert {option.compute.kv_cache_tokens for option in alone} == {None, 544, 304, 176, 112, 64}


def test_what_is_left_beside_the_homes_is_a_choice() -> None:
    """As many pages as fit, beside a copy of the parameters, where they are not among the others anyway."""
    task, alone = generating(1), ParallelStrategy()
    names = ("ref_inference", "actor_train_step")
    homes = sum(task.call_models[name].static_bytes(ParallelStrategy(dp=4)) for name in names)
    model = task.call_models["actor_generate"].under(CallCompute(kv_cache_tokens=144))
    work = model.work(alone, 1)
    need = math.ceil(homes + work.placed.parameter_bytes() + work.dynamic_bytes())
    assert rooms(generating(need), alone) == [544, 304, 176, 144, 112, 64]
    assert rooms(generating(need - 1), alone) == [544, 304, 176, 128, 112, 64]
