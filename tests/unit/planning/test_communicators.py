"""Communicators in the memory model: which there are is read off the ranks of the layouts, group by group."""

import random
from dataclasses import replace
from itertools import product

import msgspec
import pytest

from realhf.dataflow.graph import GENERATE, TRAIN_STEP, DataflowGraph, ModelFunctionCallDef
from realhf.dataflow.plan import CallPlan, ExecutionPlan
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.parallel.groups import _collective_groups
from realhf.planning.model.cluster import Cluster, device_meshes
from realhf.planning.model.communicators import CommunicatorLabels, axes_used, group_key
from realhf.planning.model.memory import PlacedModel
from realhf.planning.options import Option, legal_strategies
from realhf.planning.predict import Prediction, predict
from realhf.planning.problem.builder import build_problem
from realhf.planning.problem.native import native_problem
from realhf.realloc.plan.planner import DEFAULT_BUCKET_BYTES
from tests.unit.planning.graphs import TINY, call, call_options, cpu_cluster, ppo, settings, task_of

EACH = 10_000_000.0  # bytes of a communicator
TIED = replace(TINY, tied_embeddings=True)


def ranks(layout: Layout, axis: str, device: int) -> tuple[int, ...]:
    """The group of a device along an axis; empty where it has none."""
    dp, tp, pp = layout.coordinates(device)
    stages = layout.pipeline_group(dp, tp)
    match axis:
        case "tensor":
            found = layout.tensor_group(dp, pp)
        case "data":
            found = layout.data_group(tp, pp)
        case "next":
            found = sorted([device, stages[(pp + 1) % len(stages)]])
        case "previous":
            found = sorted([device, stages[pp - 1]])
        case "tied":
            found = [stages[0], stages[-1]]
        case _:
            found = list(layout.mesh.devices)
    return tuple(found) if device in found else ()


def layouts_of(cluster: Cluster) -> list[Layout]:
    plain = [Layout(mesh, s) for mesh in device_meshes(cluster) for s in legal_strategies(TINY, mesh.size)]
    grouped = [ParallelStrategy(dp=4, tp=2, micro_dp=(2, 1)), ParallelStrategy(dp=4, tp=2, micro_dp=(2, 2))]
    return plain + [Layout(DeviceMesh(0, 8), s) for s in grouped]


def test_equal_keys_are_equal_groups() -> None:
    """On three nodes of four devices, for any two layouts, axes and devices that both have."""
    axes = ("tensor", "data", "next", "previous", "tied", "model")
    seen: dict[tuple[object, int], tuple[int, ...]] = {}
    keys: dict[tuple[int, tuple[int, ...]], set[object]] = {}
    for layout, axis in product(layouts_of(cpu_cluster(4, num_nodes=3)), axes):
        found = {device: ranks(layout, axis, device) for device in layout.mesh.devices}
        if max(map(len, found.values())) < 2 or (layout.strategy.pp == 1 and axis in ("tied", "next", "previous")):
            continue
        key = group_key(layout, axis)  # type: ignore[arg-type]
        for device, group in found.items():
            if group:
                assert seen.setdefault((key, device), group) == group
                # `tied` may count twice, where the number of nodes is no power of two; pairs in rings of two lengths.
                if axis in ("tensor", "data", "model"):
                    keys.setdefault((device, group), set()).add(key)
    assert not [(of, found) for of, found in keys.items() if len(found) > 1]  # and equal groups have equal keys


@pytest.mark.parametrize("kind", [GENERATE, TRAIN_STEP])
@pytest.mark.parametrize("strategy", [ParallelStrategy(2, 2, 2), ParallelStrategy(4, 2, 1, micro_dp=(2, 1))])
def test_only_groups_that_a_run_makes_are_counted(kind: str, strategy: ParallelStrategy) -> None:
    layout = Layout(DeviceMesh(8, 8), strategy)
    definition = call("actor", TIED, kind, "prompts", "seq")  # type: ignore[arg-type]
    axes = set(axes_used(definition, strategy, gathers_parameters=False))
    trains = {"data", "model"} | ({"tied"} if strategy.pp > 1 else set())
    assert axes == {"tensor"} | ({"next"} if strategy.pp > 1 else set()) | (trains if kind == TRAIN_STEP else set())
    made = set(_collective_groups(layout))
    assert {ranks(layout, axis, device) for axis in axes - {"next"} for device in layout.mesh.devices} <= made | {()}
    # Tensor and data of two stages, all devices, and the stages; with two stages, first and last are those of `tied`.
    labels = CommunicatorLabels([0]).of([group_key(layout, axis) for axis in axes])
    assert len(labels) == 1 + len(axes)
    assert labels == tuple(sorted(labels))


def predicted(plan: ExecutionPlan, graph: DataflowGraph, cluster: Cluster, each: float) -> Prediction:
    shared = settings(graph, cluster)
    hardware = msgspec.structs.replace(shared["costs"].hardware, communicator_bytes=each)
    return predict(task_of(graph, **{**shared, "costs": replace(shared["costs"], hardware=hardware)}), plan)


def counted(plan: ExecutionPlan, graph: DataflowGraph, device: int) -> int:
    """Groups of a device, one by one: what its calls need, that of all devices, and that of copies."""

    def needed(definition: ModelFunctionCallDef, s: ParallelStrategy) -> dict[str, bool]:
        trains = definition.trains
        return {
            "tensor": s.tp > 1,
            "next": s.pp > 1,
            "previous": s.pp > 2,
            "data": trains and s.dp > 1,
            "model": trains and s.size > 1,
            "tied": trains and s.pp > 1 and definition.config.tied_embeddings,
        }

    found: set[object] = set()
    for name, definition in graph.calls.items():
        layout = plan.layout(name)
        if device in layout.mesh.devices:
            found |= {"world", "data between calls"}
            for axis, is_needed in needed(definition, layout.strategy).items():
                if is_needed:
                    # Between the ends of a pipeline `tied` is counted, though such a device has none. Pairs of two
                    # layouts are one where these have the same stages.
                    dp, tp, _ = layout.coordinates(device)
                    group = ranks(layout, axis, device) or ("tied", layout)
                    is_pair = axis in ("next", "previous")
                    found.add((axis, tuple(layout.pipeline_group(dp, tp))) if is_pair else group)
    if found and any(plan.layout(n) != plan.layout(plan.home(graph, c.model_name)) for n, c in graph.calls.items()):
        found.add("moves")
    return len(found)


@pytest.mark.parametrize("seed", range(12))
def test_memory_of_communicators_is_that_of_the_groups_of_a_plan(seed: int) -> None:
    rng = random.Random(seed)
    graph, cluster = ppo(TIED), cpu_cluster(4, num_nodes=2)
    options = {c.name: [o for o in call_options(c, 16, cluster) if o.micro_batches < 4] for c in graph.calls.values()}
    chosen = {name: rng.choice(rows) for name, rows in options.items()}
    if seed % 3 == 0:  # everything in one layout: nothing moves
        [one] = rng.sample(options["actor_train_step"], 1)
        chosen = dict.fromkeys(chosen, Option(one.layout, 1))
    if seed % 3 == 1:  # on one mesh, so that groups are shared
        chosen = {name: rng.choice([o for o in rows if o.layout.mesh.size == 4]) for name, rows in options.items()}
    plan = ExecutionPlan(
        num_devices=8, devices_per_node=4, calls={name: option.call_plan() for name, option in chosen.items()}
    )
    without, with_them = (predicted(plan, graph, cluster, each).device_bytes for each in (0.0, EACH))
    taken = [round((more - less) / EACH, 6) for less, more in zip(without, with_them, strict=True)]
    assert taken == [counted(plan, graph, device) for device in range(8)]


def test_the_search_counts_them_as_the_prediction_does() -> None:
    graph, cluster = ppo(TIED), cpu_cluster(4, num_nodes=2)
    shared = settings(graph, cluster)
    hardware = msgspec.structs.replace(shared["costs"].hardware, communicator_bytes=EACH)
    shared["costs"] = replace(shared["costs"], hardware=hardware)
    options = {c.name: call_options(c, 16, cluster) for c in graph.calls.values()}
    native = native_problem(build_problem(task_of(graph, **shared), options))
    rng = random.Random(0)
    for _ in range(10):
        choice = [rng.randrange(len(rows)) for rows in options.values()]
        chosen = {name: rows[index] for (name, rows), index in zip(options.items(), choice, strict=True)}
        if chosen["actor_train_step"].layout.mesh == chosen["actor_generate"].layout.mesh:
            continue  # where the prediction, which knows the home, may spare a part of the copy
        calls = {name: option.call_plan() for name, option in chosen.items()}
        plan = ExecutionPlan(num_devices=8, devices_per_node=4, calls=calls, max_steps_in_flight=2)
        found = native.evaluate(choice)["peak_bytes"]
        assert found >= max(predict(task_of(graph, **shared), plan).device_bytes)
        assert found == pytest.approx(max(predict(task_of(graph, **shared), plan).device_bytes), rel=1e-6) or any(
            chosen[name].layout.mesh == chosen[plan.home(graph, c.model_name)].layout.mesh
            for name, c in graph.calls.items()
        )


def test_who_only_sends_a_copy_has_its_buckets_beside_what_runs() -> None:
    """Inference of the actor's reference on device 1, its home's rollouts on device 0: of two hosts, or of one."""
    graph = DataflowGraph(
        [call("actor", TINY, GENERATE, "prompts", "seq"), call("actor", TINY, TRAIN_STEP, "seq", "")], ["prompts"]
    )
    apart = ExecutionPlan(
        num_devices=2,
        devices_per_node=1,
        calls={"actor_generate": CallPlan(devices=(1, 1)), "actor_train_step": CallPlan(devices=(0, 1))},
    )
    together = ExecutionPlan(num_devices=2, calls=dict.fromkeys(apart.calls, CallPlan(devices=(0, 1))))
    on_two, on_one = cpu_cluster(1, num_nodes=2), cpu_cluster(2)
    sender, receiver = predict(task_of(graph, **settings(graph, on_two)), apart).device_bytes
    unpacked, _ = predict(task_of(graph, **settings(graph, on_one)), apart).device_bytes
    at_home, nothing = predict(task_of(graph, **settings(graph, on_two)), together).device_bytes
    assert sender - unpacked == 2 * DEFAULT_BUCKET_BYTES
    assert receiver > PlacedModel(TINY, ParallelStrategy(), "float32").copy_bytes()
    assert unpacked == at_home  # training, which needs more than rollouts
    assert nothing == 0
