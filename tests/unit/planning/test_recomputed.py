"""Trainings that recompute some of their layers: the fewest that memory allows."""

from dataclasses import replace

import pytest
from msgspec.structs import replace as changed

from realhf.dataflow.graph import TRAIN_STEP, DataflowGraph
from realhf.planning.options import Option, options_to_search
from realhf.planning.search import SearchBudget, search_plan
from realhf.planning.task import PlanningTask
from tests.unit.planning.graphs import TINY, call, cpu_cluster, settings, task_of, with_memory

MODEL = replace(TINY, hidden_size=256, intermediate_size=1024, num_layers=12)
NAME = "actor_train_step"


def training() -> PlanningTask:
    graph = DataflowGraph([call("actor", MODEL, TRAIN_STEP, "seq")], ["seq"])
    task = task_of(graph, **settings(graph, cpu_cluster(1)))
    return replace(task, open_choices={"actor": ("recomputation",)})


def with_limit(task: PlanningTask, limit_bytes: float) -> PlanningTask:
    return replace(task, cluster=with_memory(task.cluster, int(limit_bytes)))


def least(task: PlanningTask, option: Option) -> float:
    return task.call_models[NAME].under(option.compute).least_bytes(*option.shape)


def test_nothing_is_partly_recomputed_where_memory_is_not_short() -> None:
    task = training()
    options = options_to_search(task, NAME)
    assert {option.compute.recomputation for option in options} == {None, "selective", "full"}
    assert all(option.compute.recomputed_layers is None for option in options)


@pytest.mark.parametrize("part", [0.3, 0.6, 0.9])
def test_the_fewest_layers_that_fit(part: float) -> None:
    task = training()
    whole = {o.compute.recomputation: o for o in options_to_search(task, NAME) if o.micro_batches == 1}
    most, fewest = (least(task, whole[kind]) for kind in (None, "full"))
    tight = with_limit(task, fewest + part * (most - fewest))
    limit = tight.cluster.device_memory_bytes
    partly = [o for o in options_to_search(tight, NAME) if o.compute.recomputed_layers and o.micro_batches == 1]
    assert partly
    for option in partly:
        number = option.compute.recomputed_layers
        assert number is not None
        one_fewer = changed(option, compute=changed(option.compute, recomputed_layers=number - 1))
        assert least(tight, option) <= limit < least(tight, one_fewer)
        one_mini_batch = [
            tight.call_models[NAME].under(each.compute).seconds(*each.shape)
            for each in (whole[None], one_fewer, option, whole[option.compute.recomputation])
        ]
        assert one_mini_batch == sorted(one_mini_batch)
        slope = (one_mini_batch[3] - one_mini_batch[0]) / MODEL.num_layers
        assert one_mini_batch[2] == pytest.approx(one_mini_batch[0] + number * slope)
    found = search_plan(tight, SearchBudget(evaluations=2000))
    chosen = found.plan.calls[NAME].compute
    assert found.prediction.fits
    fitting = [o for o in options_to_search(tight, NAME) if least(tight, o) <= limit]
    fastest = min(tight.call_models[NAME].under(o.compute).seconds(*o.shape) for o in fitting)
    assert found.prediction.call_s[NAME] == pytest.approx(fastest)
    assert chosen in {o.compute for o in fitting}


def test_what_is_fixed_stays_fixed() -> None:
    fixed = replace(with_limit(training(), 1), open_choices={"actor": ()})
    assert all(option.compute.recomputed_layers is None for option in options_to_search(fixed, NAME))
