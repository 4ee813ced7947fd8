"""The ways to run a call that a search looks at: each choice where it makes a difference, and nowhere else."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from realhf.api import Generate
from realhf.base.errors import UserError
from realhf.dataflow.graph import GENERATE, INFERENCE, TRAIN_STEP, DataflowGraph
from realhf.dataflow.plan import AS_SET_UP, CallCompute, CallPlan, ExecutionPlan
from realhf.dataflow.pools import Pool
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.planning import options
from realhf.planning import ways as ways_module
from realhf.planning.model.cluster import Cluster
from realhf.planning.model.descriptions import load_hardware
from realhf.planning.model.features import EngineFeatures
from realhf.planning.model.mode_choice import sharded_text
from realhf.planning.model.timings import load_costs
from realhf.planning.options import (
    Option,
    call_strategies,
    interleaved,
    micro_batch_counts,
    num_layouts,
    num_ways,
    options_on,
    options_to_search,
    pool_meshes,
    ways_to_compute,
)
from realhf.planning.task import PlanningTask
from realhf.planning.ways import has_modes, partly_recomputed
from tests.unit.planning.graphs import TINY, Stub, call, call_options, cpu_cluster, ppo, settings, task_of

FIELDS = ("recomputation", "sequence_parallel", "data_parallel", "prefetch", "offload_states")
ROLLOUT = Generate(max_new_tokens=8, eos_token=-1, decode_graphs=None)


def on_h100(graph: DataflowGraph, devices: int = 4, **features: Any) -> PlanningTask:
    """With all choices open; features: of the setup."""
    cluster = Cluster(num_nodes=1, devices_per_node=devices, hardware=load_hardware("h100"))
    costs = load_costs(graph.models, dtype="bfloat16", hardware=cluster.hardware, features=EngineFeatures(**features))
    task = task_of(graph, **{**settings(graph, cluster), "costs": costs, "dtype": "bfloat16"})
    return replace(task, open_choices=dict.fromkeys(graph.models, FIELDS))


GRAPH = DataflowGraph(
    [
        replace(call("actor", TINY, GENERATE, "prompts", "seq"), interface_impl=ROLLOUT),
        call("actor", TINY, INFERENCE, "seq", "logp"),
        call("ref", TINY, INFERENCE, "seq", "ref_logp"),
        call("actor", TINY, TRAIN_STEP, "seq logp ref_logp"),
        replace(call("teacher", TINY, GENERATE, "prompts", "seq2"), interface_impl=ROLLOUT, name="teach"),
    ],
    ["prompts"],
)
SPLIT = ParallelStrategy(dp=2, tp=2)
TRAINING = {
    "recomputation": (None, "selective", "full"), "sequence_parallel": (None, True), "data_parallel": (None, "fsdp"),
    "offload_states": (None, True),
}  # fmt: skip


def computations(**values: Sequence[Any]) -> list[CallCompute]:
    return [CallCompute(**dict(zip(values, each, strict=True))) for each in product(*values.values())]


def ways(task: PlanningTask, name: str, strategy: ParallelStrategy = SPLIT) -> list[CallCompute]:
    return ways_to_compute(task, task.graph.model_calls[name], strategy)


@pytest.mark.parametrize(
    ("strategy", "lacking"),
    [
        (SPLIT, []),
        (ParallelStrategy(dp=4), ["sequence_parallel"]),
        (ParallelStrategy(tp=4), ["data_parallel"]),
        (ParallelStrategy(pp=4), ["data_parallel", "sequence_parallel"]),
    ],
)
def test_what_makes_a_difference_to_a_training_in_a_strategy(strategy: ParallelStrategy, lacking: list[str]) -> None:
    values = {field: value for field, value in TRAINING.items() if field not in lacking}
    found = ways(on_h100(GRAPH), "actor_train_step", strategy)
    assert found == computations(**values)
    assert found[0] == AS_SET_UP


@pytest.mark.parametrize(
    ("features", "values"),
    [
        ({"recomputation": "full"}, {"recomputation": (None, "off", "selective")}),
        ({"recomputation": "selective"}, {"recomputation": (None, "off", "full")}),
        ({"sequence_parallel": True}, {"sequence_parallel": (None, False)}),
        ({"fully_sharded": True}, {"data_parallel": (None, "zero1")}),
        ({"offloads_states": True}, {"offload_states": (None, False)}),
    ],
)
def test_nothing_is_said_of_what_the_setup_has(features: dict[str, Any], values: dict[str, Any]) -> None:
    assert ways(on_h100(GRAPH, **features), "actor_train_step") == computations(**TRAINING | values)


def test_narrower_searches_look_at_fewer_ways() -> None:
    task = on_h100(GRAPH)
    no_states = {field: value for field, value in TRAINING.items() if field != "offload_states"}
    assert ways(replace(task, breadth="computation"), "actor_train_step") == computations(**no_states)
    assert ways(replace(task, breadth="plain"), "actor_train_step") == [AS_SET_UP]
    closed = replace(task, open_choices={"actor": ("data_parallel",)})
    assert ways(closed, "actor_train_step") == computations(data_parallel=(None, "fsdp"))


def test_calls_that_train_nothing_choose_how_the_home_is_divided() -> None:
    """One that reads at home; one that generates there gathers all anyway; none away from it."""
    task = on_h100(GRAPH)
    assert ways(task, "ref_inference") == computations(data_parallel=(None, "fsdp"))
    assert ways(task, "ref_inference", ParallelStrategy(tp=4)) == [AS_SET_UP]
    assert ways(task, "actor_inference") == [AS_SET_UP]


@pytest.mark.parametrize(
    ("decode_graphs", "features", "values"),
    [
        (None, {}, (None, "call")),
        ("kept", {}, (None,)),
        (None, {"cuda_graphs": False}, (None,)),
    ],
)
def test_graphs_of_decode_steps_live_as_long_as_a_plan_says(
    decode_graphs: Any, features: dict[str, Any], values: tuple[Any, ...]
) -> None:
    """Where the experiment leaves it open and there are graphs, whatever is open of the model."""
    calls = [
        replace(each, interface_impl=replace(ROLLOUT, decode_graphs=decode_graphs)) if each.generates else each
        for each in GRAPH.calls.values()
    ]
    task = replace(on_h100(DataflowGraph(calls, ["prompts"]), **features), open_choices={})
    for name in ("actor_generate", "teach"):
        assert ways(task, name) == computations(decode_graphs=values)
    graph = DataflowGraph([call("actor", TINY, GENERATE, "prompts", "seq")], ["prompts"])
    assert ways(on_h100(graph), "actor_generate") == [AS_SET_UP], "its interface knows nothing of graphs"


def test_in_a_hosts_memory_states_have_no_other_place() -> None:
    graph = DataflowGraph([call("actor", TINY, TRAIN_STEP, "seq")], ["seq"])
    task = task_of(graph, **settings(graph, cpu_cluster(4)))
    task = replace(task, open_choices={"actor": FIELDS})
    no_states = {field: value for field, value in TRAINING.items() if field != "offload_states"}
    assert ways(task, "actor_train_step") == computations(**no_states)


def test_several_trainings_of_a_model_choose_nothing() -> None:
    again = replace(call("actor", TINY, TRAIN_STEP, "seq"), name="again")
    graph = DataflowGraph([call("actor", TINY, TRAIN_STEP, "seq"), again], ["seq"])
    task = on_h100(graph)
    assert ways(task, "again") == ways(task, "actor_train_step") == [AS_SET_UP]


# --- strategies and meshes


@pytest.mark.parametrize(
    ("kind", "pp", "chunks"),
    [
        (TRAIN_STEP, 2, [2, 4]),
        (INFERENCE, 2, [2, 4]),
        (TRAIN_STEP, 4, [2]),
        (TRAIN_STEP, 8, []),
        (TRAIN_STEP, 1, []),
        (GENERATE, 2, []),
    ],
)
def test_pipelines_in_chunks_of_a_layer_at_least(kind: Any, pp: int, chunks: list[int]) -> None:
    """Of eight layers."""
    definition = call("actor", replace(TINY, num_layers=8), kind, "seq", "out" if kind != TRAIN_STEP else "")
    found = interleaved(definition, ParallelStrategy(pp=pp))
    assert found == [ParallelStrategy(pp=pp, chunks=each) for each in chunks]


class Rule(Stub):
    uses_model = False  # type: ignore[misc]


def test_a_rule_has_no_pipeline() -> None:
    rule = replace(call("judge", TINY, INFERENCE, "seq", "score"), interface_impl=Rule())
    assert interleaved(rule, ParallelStrategy(pp=2)) == []


@pytest.mark.parametrize(
    ("strategy", "mini_batch", "counts"),
    [
        (ParallelStrategy(), 12, [1, 2, 4]),
        (ParallelStrategy(pp=3), 12, [1, 2, 3, 4, 6, 12]),
        (ParallelStrategy(dp=2, pp=3), 12, [1, 2, 3, 6]),
        (ParallelStrategy(dp=5), 12, []),
        (ParallelStrategy(), 1, [1]),
        (ParallelStrategy(pp=5), 5, [1, 5]),
    ],
)
def test_numbers_of_micro_batches(strategy: ParallelStrategy, mini_batch: int, counts: list[int]) -> None:
    assert micro_batch_counts(strategy, mini_batch) == counts


def test_a_protocol_is_asked_for_every_strategy_on_devices_from_0_on() -> None:
    asked: list[Layout] = []

    def check(layout: Layout) -> None:
        asked.append(layout)
        if layout.strategy.tp > 1:
            raise UserError("whole models alone")

    definition: Any = SimpleNamespace(
        config=TINY,
        check_protocol=check,
        uses_model=False,
        trains=False,
        reproducible=False,
        parts=lambda layout: layout.strategy.dp,
    )
    found = call_strategies(definition, 4, 6)
    assert {layout.mesh for layout in asked} == {DeviceMesh(0, 4)}
    assert dict(found) == {ParallelStrategy(dp=2, pp=2): [1], ParallelStrategy(pp=4): [1]}, "dp=4 does not divide 6"


def test_the_options_of_a_call_on_meshes_of_one_size_are_alike() -> None:
    definition = call("actor", TINY, INFERENCE, "seq", "out")
    meshes = [DeviceMesh(0, 1), DeviceMesh(2, 2), DeviceMesh(0, 2)]
    found = options_on(meshes, definition, 2)
    shapes = [(ParallelStrategy(dp=2), 1), (ParallelStrategy(tp=2), 1), (ParallelStrategy(tp=2), 2),
              (ParallelStrategy(pp=2), 1), (ParallelStrategy(pp=2), 2)]  # fmt: skip
    expected = [Option(Layout(meshes[0], ParallelStrategy()), count) for count in (1, 2)]
    for mesh in meshes[1:]:
        expected += [Option(Layout(mesh, strategy), count) for strategy, count in shapes]
    assert sorted(found) == sorted(expected)
    assert [option.layout.mesh for option in found] == [option.layout.mesh for option in expected]


def test_the_meshes_of_a_pool_come_by_size() -> None:
    """On nodes of four: its runs of neighbours within a node count as meshes, once."""
    cluster = cpu_cluster(4, num_nodes=2)
    pool = Pool("three", devices=[0, 1, 2, 5, 6])
    assert [(mesh.first, mesh.size) for mesh in pool_meshes(cluster, pool)] == [
        (0, 1), (1, 1), (2, 1), (5, 1), (6, 1), (0, 2), (5, 2), (0, 3),
    ]  # fmt: skip
    over = [(mesh.first, mesh.size) for mesh in pool_meshes(cluster, Pool("over", devices=[3, 4]))]
    assert over == [(3, 1), (4, 1)]


def test_options_within_a_pool() -> None:
    definition = call("actor", TINY, TRAIN_STEP, "seq")
    cluster, pool = cpu_cluster(4), Pool("odd", devices=[1, 2, 3])
    found = call_options(definition, 4, cluster, pool)
    assert {(o.layout.mesh.first, o.layout.mesh.size) for o in found} == {(1, 1), (2, 1), (3, 1), (2, 2), (1, 3)}


def test_a_pool_in_which_a_call_has_no_option_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "call_strategies", lambda *words: [])
    assert options.options_to_search(confined(None), "actor_train_step") == []
    message = (
        r"actor_train_step: no \(dp, tp, pp\) within pool 'none' \(devices 0-2\), to which model 'actor' is confined, "
        "is legal with mini-batches of 8 samples"
    )
    with pytest.raises(UserError, match=message):
        options.options_to_search(confined(Pool("none", devices=range(3))), "actor_train_step")


def confined(pool: Pool | None, **fields: Any) -> PlanningTask:
    plain = ppo()
    pools = {"actor": pool} if pool else {}
    graph = DataflowGraph(list(plain.calls.values()), plain.dataset_keys, pools=pools)
    return replace(task_of(graph, **settings(graph, cpu_cluster(4))), **fields)


def test_options_near_given_meshes() -> None:
    """Of a pool those within it; where none is, all of the pool's."""
    near = (DeviceMesh(2, 2), DeviceMesh(0, 4))

    def meshes(task: PlanningTask) -> set[tuple[int, int]]:
        found = {option.layout.mesh for option in options_to_search(task, "actor_train_step")}
        return {(mesh.first, mesh.size) for mesh in found}

    assert meshes(confined(None, near=near)) == {(2, 2), (0, 4)}
    assert meshes(confined(Pool("p", devices=[1, 2, 3]), near=near)) == {(2, 2)}
    assert meshes(confined(Pool("p", devices=[0, 1]), near=near)) == {(0, 1), (1, 1), (0, 2)}


def test_a_search_within_a_pool_that_allows_nothing_is_refused() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(options, "call_strategies", lambda *words: [])
        assert options_to_search(confined(None), "actor_train_step") == []
        with pytest.raises(UserError, match=r"within pool 'p' .*mini-batches of 8 samples"):
            options_to_search(confined(Pool("p", devices=[0])), "actor_train_step")


def test_of_the_ways_in_one_strategy_those_that_are_kept() -> None:
    asked: list[Any] = []

    def keeps(definition: Any, ways: list[Any]) -> list[Any]:
        asked.append((definition.name, {way[0] for way in ways}))
        return ways[:1]

    task = on_h100(GRAPH)
    found = options_to_search(replace(task, breadth="computation"), "actor_train_step", keeps)
    assert [name for name, _ in asked] == ["actor_train_step"] * len(asked)
    assert all(len(strategies) == 1 for _, strategies in asked), "no chunks"
    assert [(option.micro_batches, option.compute) for option in found] == [(1, AS_SET_UP)] * len(found)
    all_of_it = options_to_search(task, "actor_train_step", keeps)
    assert len(all_of_it) == len(found)
    assert any(len(strategies) > 1 for _, strategies in asked)


def test_numbers_of_layouts_and_of_ways() -> None:
    """Those of trainings that may have modes by operator count twice."""
    task = on_h100(DataflowGraph([call("actor", TINY, TRAIN_STEP, "seq")], ["seq"]), devices=2)
    # On one device one strategy; on two dp, tp and pp, the latter with 1 or 2 chunks. 16 samples: 5 powers of two.
    assert num_layouts(task, "actor_train_step") == 2 * 1 + 4
    assert num_layouts(replace(task, breadth="plain"), "actor_train_step") == 2 * 1 + 3
    assert num_ways(replace(task, breadth="plain")) == 5 + 4 + 5 + 5
    counted = 5 * 6 + 4 * 12 + 5 * 12 + 2 * 5 * 6
    assert num_ways(task) == counted
    assert num_ways(replace(task, mixed=frozenset({"actor"}))) == 2 * counted


# --- modes by operator


def test_which_trainings_may_have_modes_by_operator() -> None:
    task = replace(on_h100(GRAPH), mixed=frozenset({"actor", "ref"}))
    calls = task.graph.model_calls
    assert {name: has_modes(task, each) for name, each in calls.items()} == {
        name: name == "actor_train_step" for name in calls
    }
    training = calls["actor_train_step"]
    assert not has_modes(replace(task, breadth="computation"), training)
    assert not has_modes(replace(task, mixed=frozenset({"ref"})), training)
    assert not has_modes(replace(on_h100(GRAPH, zero1=False), mixed=frozenset({"actor"})), training)


@pytest.mark.parametrize(
    ("opened", "features", "prefetches"),
    [
        (FIELDS, {"prefetch": True}, [None, False]),
        (FIELDS, {"prefetch": False}, [None]),
        ((), {"prefetch": True}, [None]),
    ],
)
def test_memory_for_two_gathers_is_a_choice_where_the_setup_has_it(
    opened: tuple[str, ...], features: dict[str, Any], prefetches: list[bool | None]
) -> None:
    task = replace(on_h100(GRAPH, **features), open_choices={"actor": opened})
    training = task.graph.model_calls["actor_train_step"]
    assert ways_module._prefetches(task, training) == prefetches
    graph = DataflowGraph([call("actor", TINY, TRAIN_STEP, "seq")], ["seq"])
    on_cpu = task_of(graph, **settings(graph, cpu_cluster(4)))
    features_there = replace(on_cpu.costs.features, **features)
    on_cpu = replace(on_cpu, costs=replace(on_cpu.costs, features=features_there), open_choices={"actor": opened})
    expected = [False] if len(prefetches) == 2 else [None]
    assert ways_module._prefetches(on_cpu, graph.model_calls["actor_train_step"]) == expected, "there it gains nothing"


RULES = (("*", "sharded"),)


class Mixed:
    """A training that finds modes in the room that it is given with these choices of early gathers."""

    def __init__(
        self, call_: Any, finds: Sequence[bool | None], room_bytes: int | None, compute: CallCompute = AS_SET_UP
    ) -> None:
        self.call, self.finds, self.room_bytes, self.compute = call_, finds, room_bytes, compute

    def under(self, compute: CallCompute) -> "Mixed":
        return Mixed(self.call, self.finds, self.room_bytes, compute)

    def mix(self, strategy: ParallelStrategy, count: int, room_bytes: int | None) -> Any:
        assert (strategy, count, room_bytes, self.compute.data_parallel) == (SPLIT, 2, self.room_bytes, None)
        return RULES if self.compute.prefetch in self.finds else None


@pytest.mark.parametrize(
    ("finds", "prefetch", "smallest"),
    [([None, False], None, True), ([False], False, True), ([None], None, False), ([], "none", False)],
)
def test_memory_for_two_gathers_is_tried_first_and_saved_at_last(
    finds: list[bool | None], prefetch: Any, smallest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ways_module, "_prefetches", lambda task, definition: [None, False])
    monkeypatch.setattr(ways_module, "has_modes", lambda task, definition: task is not None)
    definition: Any = SimpleNamespace(name="train")
    model: Any = Mixed(definition, finds, 77)
    task: Any = SimpleNamespace(call_models={"train": Mixed(definition, finds, None)})
    full = CallCompute(recomputation="full")
    found = ways_module._mix(task, model, (SPLIT, 2, full), 77)
    expected = CallCompute(recomputation="full", prefetch=None if prefetch == "none" else prefetch, data_parallel=RULES)
    assert found == (None if prefetch == "none" else expected)
    sharded = CallCompute(recomputation="full", data_parallel="fsdp")
    least = ways_module.smallest_mix(task, definition, (SPLIT, 2, sharded))
    small = CallCompute(recomputation="full", prefetch=False, data_parallel=RULES)
    assert least == (small if smallest else None)
    monkeypatch.setattr(ways_module, "has_modes", lambda task, definition: False)
    assert ways_module.smallest_mix(task, definition, (SPLIT, 2, sharded)) is None


def test_an_option_is_what_a_plan_says_of_a_call() -> None:
    strategy = ParallelStrategy(dp=2, tp=3, pp=4, chunks=5, micro_dp=(2, 1))
    option = Option(Layout(DeviceMesh(7, 24), strategy), 6, CallCompute(recomputation="full"))
    plan = option.call_plan(predicted_s=8.0)
    assert plan == CallPlan(
        devices=(7, 24), dp=2, tp=3, pp=4, chunks=5, micro_dp=(2, 1), micro_batches=6,
        compute=CallCompute(recomputation="full"), predicted_s=8.0,
    )  # fmt: skip
    assert option.call_plan().predicted_s is None
    assert options.option_of(plan) == option
    assert option.shape == (strategy, 6)
    other = Option(Layout(DeviceMesh(0, 1), ParallelStrategy()), 1)
    assert options.chosen({"a": [other, option], "b": [other]}, [1, 0]) == {
        "a": option.call_plan(), "b": other.call_plan()
    }  # fmt: skip


# --- some layers recomputed


class Layers:
    """A training of so many layers in a chunk, which needs 100 bytes less 10 for each layer recomputed."""

    def __init__(self, number: int, shares_devices: bool, compute: CallCompute = AS_SET_UP) -> None:
        self.number, self.shares_devices, self.compute = number, shares_devices, compute
        self.call = SimpleNamespace(config=SimpleNamespace(num_layers=number))

    def under(self, compute: CallCompute) -> "Layers":
        return Layers(self.number, self.shares_devices, compute)

    def least_bytes(self, strategy: ParallelStrategy, count: int) -> float:
        layers = self.compute.recomputed_layers
        if self.compute.recomputation is None:
            return 100.0
        return 100.0 - 10 * (self.number if layers is None else layers)


@pytest.mark.parametrize(
    ("shares", "left_bytes", "numbers"),
    [
        (False, 100, []),
        (False, 99, [1]),
        (False, 80, [2]),
        (False, 79, [3]),
        (False, 60, []),  # all of the four
        (False, 61, []),
        (False, 70, [3]),
        (False, 59, []),  # not even all
        (True, 99, [1, 2, 3]),
        (True, 59, [1, 2, 3]),
        (True, 100, []),
    ],
)
def test_the_fewest_layers_that_leave_room(
    shares: bool, left_bytes: int, numbers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four. Where other calls share the devices, a quarter, a half and three quarters are choices, too."""
    monkeypatch.setattr(ways_module, "_others_bytes", lambda task, definition: 1000 - left_bytes)
    task: Any = SimpleNamespace(
        searched="all", open_choices={"a": ("recomputation",)}, call_models={"train": Layers(4, shares)},
        cluster=SimpleNamespace(num_devices=4, device_memory_bytes=1000),
    )  # fmt: skip
    definition: Any = SimpleNamespace(trains=True, model_name="a", name="train")
    full = CallCompute(recomputation="full")
    way = (ParallelStrategy(), 2, full)
    found = list(partly_recomputed(task, definition, [(ParallelStrategy(), 2, AS_SET_UP), way]))
    assert found == [
        (ParallelStrategy(), 2, CallCompute(recomputation="full", recomputed_layers=number)) for number in numbers
    ]
    nothing: list[Any] = []
    for name, value in (("searched", "computation"), ("open_choices", {"a": ("prefetch",)}), ("open_choices", {})):
        other = SimpleNamespace(**vars(task) | {name: value})
        assert list(partly_recomputed(other, definition, [way])) == nothing  # type: ignore[arg-type]
    reading: Any = SimpleNamespace(trains=False, model_name="a", name="train")
    assert list(partly_recomputed(task, reading, [way])) == nothing
    task.cluster.num_devices = 5
    assert len(list(partly_recomputed(task, definition, [way]))) == (0 if shares else len(numbers))


@pytest.mark.parametrize(
    ("strategy", "changes", "is_alone"),
    [
        (ParallelStrategy(pp=2, chunks=2), {}, True),
        (ParallelStrategy(dp=2), {"data_parallel": "fsdp"}, True),
        (ParallelStrategy(), {"offload_states": True}, True),
        (ParallelStrategy(), {"offload_states": False}, False),
    ],
)
def test_beside_other_calls_layers_are_not_recomputed_together_with_other_savings(
    strategy: ParallelStrategy, changes: dict[str, Any], is_alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ways_module, "_others_bytes", lambda task, definition: 0)
    definition: Any = SimpleNamespace(trains=True, model_name="a", name="train")
    way = (strategy, 1, CallCompute(recomputation="full", **changes))
    for shares in (False, True):
        task: Any = SimpleNamespace(
            searched="all", open_choices={"a": ("recomputation",)}, call_models={"train": Layers(8, shares)},
            cluster=SimpleNamespace(num_devices=4, device_memory_bytes=99),
        )  # fmt: skip
        assert bool(list(partly_recomputed(task, definition, [way]))) == (not shares or not is_alone)


def test_what_the_other_models_keep_if_all_devices_have_a_part() -> None:
    """Each once, in its home; none of those that wait in host memory."""
    task = task_of(ppo(), **settings(ppo(), cpu_cluster(4)))
    whole = {
        name: task.call_models[name].static_bytes(ParallelStrategy())
        for name in ("reward_inference", "ref_inference", "critic_train_step", "actor_train_step")
    }
    critic, actor = (task.graph.model_calls[f"{name}_train_step"] for name in ("critic", "actor"))
    others = whole["reward_inference"] + whole["ref_inference"] + whole["actor_train_step"]
    assert ways_module._others_bytes(task, critic) == others / 4
    waiting = replace(task, offload=("ref", "critic"))
    assert ways_module._others_bytes(waiting, actor) == whole["reward_inference"] / 4


# --- tasks


def test_a_task_in_another_variation() -> None:
    stale = replace(on_h100(GRAPH), staleness=1)
    task = replace(
        on_h100(GRAPH), offload=("ref",), breadth="computation", near=(DeviceMesh(0, 1),), more_stale=(stale,)
    )
    assert task.varied() == replace(task, more_stale=())
    changed = task.varied(offload=(), max_steps_in_flight=7, breadth="plain", near=())
    assert changed == replace(task, offload=(), max_steps_in_flight=7, breadth="plain", near=(), more_stale=())
    for name in ("call_models", "known"):
        assert getattr(changed, name) is getattr(task, name)
    plan = ExecutionPlan(num_devices=1, calls={}, staleness=1)
    assert task.of(plan) == stale
    assert task.of(ExecutionPlan(num_devices=1, calls={})) == replace(task, more_stale=())


@pytest.mark.parametrize(("nodes", "searched"), [(16, "all"), (17, "computation")])
def test_up_to_64_devices_all_is_searched(nodes: int, searched: str) -> None:
    task = replace(on_h100(GRAPH), cluster=cpu_cluster(4, num_nodes=nodes))
    assert task.searched == searched
    assert replace(task, breadth="plain").searched == "plain"


def test_the_homes_of_a_task_and_its_tokens() -> None:
    task = on_h100(GRAPH)
    trained = "actor_train_step"
    assert task.homes == {
        "actor_generate": trained, "actor_inference": trained, "ref_inference": "ref_inference", trained: trained,
        "teach": "teach",
    }  # fmt: skip
    assert task.tokens_per_step == 16 * (8 + 8)


def test_what_knows_the_seconds_of_a_call() -> None:
    """Factors, runs and errors are those of the call and its model; whether others share the devices is the graph's."""
    task = on_h100(GRAPH)
    costs = replace(task.costs, call_factors={"teach": 3.0}, seen={TINY: ("run",)})  # type: ignore[dict-item]
    models = replace(task, costs=costs).call_models
    assert [models[name].factor for name in ("teach", "actor_generate")] == [3.0, 1.0]
    for model in models.values():
        assert model.shares_devices
        assert (model.samples, model.dtype, model.cluster, model.hardware, model.seen) == (
            16, "bfloat16", task.cluster, task.costs.hardware, ("run",),
        )  # fmt: skip
        assert model.error == costs.call_error(TINY)
        assert model.versions == 1
    alone = DataflowGraph([call("actor", TINY, TRAIN_STEP, "seq", "", 2)], ["seq"])
    [model] = on_h100(alone).call_models.values()
    assert (model.shares_devices, model.samples) == (False, 8)


def test_a_plan_of_a_task() -> None:
    task = replace(on_h100(GRAPH), offload=("ref",), staleness=2, max_steps_in_flight=5)
    names = list(task.graph.model_calls)
    calls = {name: CallPlan(devices=(0, 4), dp=4) for name in reversed(names)}
    plan = task.plan(calls, preset="mine", seed=3)
    assert list(plan.calls) == names
    assert plan == ExecutionPlan(
        num_devices=4, devices_per_node=4, calls=calls, max_steps_in_flight=5, offload=("ref",), staleness=2,
        models=task.graph.models, notes={"hardware": "h100", "preset": "mine", "seed": 3},
    )  # fmt: skip
    mixed = CallPlan(devices=(0, 4), dp=4, compute=CallCompute(data_parallel=(("*", "sharded"),)))
    sharded = CallPlan(devices=(0, 4), dp=4, compute=CallCompute(data_parallel="fsdp"))
    found = task.modes(task.plan(calls | {"actor_train_step": mixed, "ref_inference": sharded}))
    assert found == {"actor_train_step": sharded_text((("*", "sharded"),), TINY, ParallelStrategy(dp=4))}
