"""HybridFlow's mapping: its counts, its choice against an enumeration, its plans' legality."""

import itertools
import math
from dataclasses import replace

import pytest
from msgspec import structs

from realhf.base.errors import UserError
from realhf.dataflow.plan_checks import check_plan
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.planning.mapping import Colocated, Mapper, allocations, placed, placements
from realhf.planning.model.memory import PlacedModel
from realhf.planning.model.rank_work import WORKER_BYTES
from realhf.planning.options import Option
from realhf.planning.predict import predict
from realhf.planning.task import PlanningTask
from tests.unit.planning.graphs import cpu_cluster, ppo, settings, with_memory

BELL = [1, 1, 2, 5, 15, 52, 203]


def task(devices: int, num_nodes: int = 1, memory: int = 2**32) -> PlanningTask:
    graph = ppo()
    return PlanningTask(graph=graph, max_steps_in_flight=2, **settings(graph, cpu_cluster(devices, num_nodes, memory)))


@pytest.mark.parametrize(("count", "bell"), list(enumerate(BELL)))
def test_placements_are_the_set_partitions(count: int, bell: int) -> None:
    models = "abcdef"[:count]
    found = {frozenset(map(frozenset, placement)) for placement in placements(models)}
    assert len(found) == len(list(placements(models))) == bell
    for partition in found:
        assert sorted(itertools.chain(*partition)) == sorted(models)


def test_four_models_have_fifteen_placements() -> None:
    assert len(list(placements(["actor", "critic", "reference", "reward"]))) == 15


@pytest.mark.parametrize("devices", [1, 5, 8, 16])
@pytest.mark.parametrize("groups", [1, 2, 3, 4])
def test_allocations_are_the_compositions(devices: int, groups: int) -> None:
    found = list(allocations(devices, [1] * groups))
    assert len(found) == len(set(found)) == math.comb(devices - 1, groups - 1)
    assert all(sum(sizes) == devices and min(sizes) >= 1 for sizes in found)


def test_allocations_keep_to_minima_and_sizes() -> None:
    expected = {
        sizes
        for sizes in itertools.product([1, 2, 4, 8, 16], repeat=3)
        if sum(sizes) == 16 and all(size >= least for size, least in zip(sizes, (4, 1, 2), strict=True))
    }
    assert set(allocations(16, [4, 1, 2], [1, 2, 4, 8, 16])) == expected
    assert list(allocations(4, [3, 2])) == []


def test_the_best_mapping_is_the_cheapest_of_all() -> None:
    """Stage by stage: the slowest group counts, and within a group the models add up."""
    mapper = Mapper(task(4))
    best = mapper.ranked()[0]
    costs = []
    for placement in placements(list(mapper.task.graph.models)):
        for sizes in itertools.product([1, 2, 4], repeat=len(placement)):
            groups = [mapper.colocated(group, size) for group, size in zip(placement, sizes, strict=True)]
            if sum(sizes) == 4 and all(groups):
                costs.append(sum(max(g.stage_s[stage] for g in groups if g) for stage in range(3)))
    assert best.cost_s == min(costs)
    assert len(costs) > 10


def test_stage_seconds_are_sums_of_calls() -> None:
    mapper = Mapper(task(2))
    group = mapper.colocated(("actor", "ref"), 2)
    assert group is not None
    seconds = {name: mapper.task.call_models[name].seconds(*option.shape) for name, option in group.options.items()}
    assert group.stage_s == (seconds["actor_generate"], seconds["ref_inference"], seconds["actor_train_step"])
    alone = mapper.colocated(("actor",), 2)
    assert alone is not None
    assert alone.stage_s == (group.stage_s[0], 0.0, group.stage_s[2])


@pytest.mark.parametrize(("devices", "nodes"), [(4, 1), (8, 1), (4, 3)])
def test_groups_get_devices_of_their_own(devices: int, nodes: int) -> None:
    mapper = Mapper(task(devices, nodes))
    for placement in placements(list(mapper.task.graph.models)):
        mapping = mapper.ranked([placement])[0]
        meshes = []
        for group in placement:
            [mesh] = {mapping.calls[call.name].mesh for m in group for call in mapper.task.graph.calls_of(m)}
            meshes.append(mesh)
            inside = mesh.first // devices == (mesh.first + mesh.size - 1) // devices
            assert inside or mesh.first % devices == mesh.size % devices == 0
        assert sorted(device for mesh in meshes for device in mesh.devices) == list(range(devices * nodes))
        plan = mapper.task.plan(mapping.calls, preset="test")
        check_plan(plan, mapper.task.graph, mapper.task.batch_size)
        assert predict(mapper.task, plan).fits


@pytest.mark.parametrize("sizes", [(1, 2, 4, 1), (1, 8, 1, 2), (2, 4, 2, 4)])
def test_groups_are_placed_on_aligned_devices(sizes: tuple[int, ...]) -> None:
    """On nodes of 4: parts of a node lie in one, aligned to their size; whole nodes begin at one."""
    option = Option(Layout(DeviceMesh(0, 1), ParallelStrategy()), 1)
    groups = [
        Colocated(
            size,
            {f"call{i}": structs.replace(option, layout=Layout(DeviceMesh(0, size), ParallelStrategy(dp=size)))},
            (0.0, 0.0, 0.0),
        )
        for i, size in enumerate(sizes)
    ]
    meshes = [call.mesh for call in placed(groups).values()]
    assert sorted(device for mesh in meshes for device in mesh.devices) == list(range(sum(sizes)))
    for mesh in meshes:
        assert mesh.first % min(mesh.size, 4) == 0


@pytest.mark.parametrize("share", [0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99])
def test_a_mapping_fits_whatever_the_memory(share: float) -> None:
    """Between what all models on all devices take at their fastest, and what a worker takes anyway: what is found
    fits."""
    free = task(4)
    peak = max(predict(free, free.plan(Mapper(free).ranked()[0].calls, preset="")).device_bytes)
    memory = int(WORKER_BYTES + (peak - WORKER_BYTES) * share)
    tight = replace(free, cluster=with_memory(free.cluster, memory))
    mapper = Mapper(tight)
    fitting = 0
    for placement in placements(list(tight.graph.models)):
        try:
            mapping = mapper.ranked([placement])[0]
        except UserError:
            continue
        fitting += 1
        assert predict(tight, tight.plan(mapping.calls, preset="")).fits
    assert fitting > 0 or share <= 0.5


def test_less_memory_needs_more_devices() -> None:
    large = task(8)
    everything = tuple(large.graph.models)
    assert Mapper(large).least_devices(everything) == 1
    kept = sum(
        PlacedModel(config, ParallelStrategy(), "float32").static_bytes(trained=name in ("actor", "critic"))
        for name, config in large.graph.models.items()
    )
    # One device can keep the states and no more.
    small = replace(large, cluster=with_memory(large.cluster, kept + WORKER_BYTES))
    least = Mapper(small).least_devices(everything)
    assert least is not None
    assert least > 1


def test_nothing_fits() -> None:
    with pytest.raises(UserError, match="none of 15 placements fits into the memory of 2 devices"):
        Mapper(task(2, memory=1000)).ranked()
