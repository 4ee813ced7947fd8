"""Generation layouts that contain the training layout: HybridFlow's Figure 8, and every legal pair of small degrees."""

from collections import defaultdict
from fractions import Fraction
from itertools import product

import pytest

from realhf.geometry.boxes import device_boxes
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy, held_layers
from realhf.geometry.micro_dp import contains, grouped_like
from tests.unit.api.calls import TINY


def layout(size: int, tp: int, pp: int, micro_dp: tuple[int, int] = (1, 1), first: int = 0, chunks: int = 1) -> Layout:
    return Layout(DeviceMesh(first, size), ParallelStrategy(size // (tp * pp), tp, pp, chunks, micro_dp))


def numbered_from_one(groups: list[list[int]]) -> list[list[int]]:
    return [[device + 1 for device in group] for group in groups]


def micro_dp_of(generation: Layout, training: Layout, num_layers: int) -> tuple[int, int] | None:
    found = grouped_like(training, generation, num_layers)
    return found and found.strategy.micro_dp


def micro_groups(training: Layout, generation: Layout) -> list[list[int]]:
    """Replicas in generation of one replica in training: who has the same part there, from one training replica."""
    groups = defaultdict(list)
    for device in generation.mesh.devices:
        replica = training.coordinates(device)[0]
        groups[replica, *generation.coordinates(device)[1:]].append(device)
    return sorted(groups.values())


def test_the_groups_of_hybridflows_figure_8() -> None:
    """Training 1-4-2 (p-t-d), generation 1-2-2-2 (p_g-t_g-d_g-d), devices counted from 1."""
    training, generation = layout(8, tp=4, pp=1), layout(8, tp=2, pp=1, micro_dp=(2, 1))
    tensor = [training.tensor_group(dp, 0) for dp in range(2)]
    data = [training.data_group(tp, 0) for tp in range(4)]
    assert numbered_from_one(tensor) == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert numbered_from_one(data) == [[1, 5], [2, 6], [3, 7], [4, 8]]
    tensor = [generation.tensor_group(dp, 0) for dp in range(4)]
    assert numbered_from_one(tensor) == [[1, 3], [2, 4], [5, 7], [6, 8]]
    assert numbered_from_one(micro_groups(training, generation)) == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert micro_dp_of(layout(8, tp=2, pp=1), training, TINY.num_layers) == (2, 1)
    assert str(generation.strategy) == "dp4 tp2 pp1 micro-dp2x1"


def test_micro_groups_over_stages_too() -> None:
    """Training tp2 pp2 on 8 devices, whose stages are devices 1-4 and 5-8."""
    training, generation = layout(8, tp=2, pp=2), layout(8, tp=1, pp=1, micro_dp=(2, 2))
    assert numbered_from_one(micro_groups(training, generation)) == [[1, 2, 5, 6], [3, 4, 7, 8]]
    halves = layout(8, tp=2, pp=1, micro_dp=(1, 2))
    assert numbered_from_one([halves.tensor_group(dp, 0) for dp in range(4)]) == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert numbered_from_one(micro_groups(training, halves)) == [[1, 5], [2, 6], [3, 7], [4, 8]]


DEGREES = [(t, p, t_g, p_g) for t, p in product((1, 2, 4), repeat=2) for t_g, p_g in product((1, 2, 4), repeat=2)]


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("replicas", [1, 3])
def test_every_device_keeps_its_part_of_the_training_layout(replicas: int, chunks: int) -> None:
    """Of all pairs of tp and pp: there are groups where the degrees divide, and then every box lies in a box."""
    found = 0
    for t, p, t_g, p_g in DEGREES:
        if chunks > 1 and not 1 < p <= TINY.num_layers // chunks:
            continue
        size = replicas * t * p
        training = layout(size, t, p, first=5, chunks=chunks)
        if size % (t_g * p_g):
            continue
        plain = layout(size, t_g, p_g, first=5)
        micro_dp = micro_dp_of(plain, training, TINY.num_layers)
        divides = t % t_g == 0 and p % p_g == 0
        assert (micro_dp is not None) == (divides and (chunks == 1 or p_g == 1)), (t, p, t_g, p_g)
        if micro_dp is None:
            assert not contains(plain, training, TINY.num_layers)
            continue
        found += 1
        generation = layout(size, t_g, p_g, micro_dp, first=5)
        check_groups(generation)
        for device in training.mesh.devices:
            wanted = {box.name: box for box in device_boxes(TINY, generation, device)}
            for box in device_boxes(TINY, training, device):
                assert wanted[box.name].intersect(box) == box, (training, generation, device)
        is_contained_anyway = all(
            wanted.intersect(box) == box
            for device in training.mesh.devices
            for box in device_boxes(TINY, training, device)
            for wanted in device_boxes(TINY, plain, device)
            if wanted.name == box.name
        ) and all(
            {box.name for box in device_boxes(TINY, training, device)}
            <= {box.name for box in device_boxes(TINY, plain, device)}
            for device in training.mesh.devices
        )
        assert contains(plain, training, TINY.num_layers) == is_contained_anyway, (training, plain)
    assert found > 5


def check_groups(generation: Layout) -> None:
    """Coordinates are one to one; each kind of group divides the mesh and ascends, as torch orders its ranks."""
    s = generation.strategy
    for device in generation.mesh.devices:
        assert generation.device(*generation.coordinates(device)) == device
    for groups in (
        [generation.tensor_group(dp, pp) for dp in range(s.dp) for pp in range(s.pp)],
        [generation.data_group(tp, pp) for tp in range(s.tp) for pp in range(s.pp)],
        [generation.pipeline_group(dp, tp) for dp in range(s.dp) for tp in range(s.tp)],
    ):
        assert sorted(device for group in groups for device in group) == list(generation.mesh.devices)
        assert all(group == sorted(group) for group in groups)


def test_uneven_stages_are_not_contained() -> None:
    """Five layers lie 2, 1, 1, 1 on four stages and 3, 2 on two, which fits; six lie 2, 2, 1, 1 and 3, 3."""
    training, generation = layout(4, tp=1, pp=4), layout(4, tp=1, pp=2)
    assert micro_dp_of(generation, training, 5) == (1, 2)
    assert micro_dp_of(generation, training, 6) is None
    assert micro_dp_of(layout(4, tp=1, pp=1), training, 6) == (1, 4)


def test_other_devices_and_chunks_have_no_groups() -> None:
    training = layout(4, tp=2, pp=2)
    assert micro_dp_of(layout(4, tp=2, pp=1, first=4), training, 4) is None
    assert micro_dp_of(layout(2, tp=2, pp=1), training, 4) is None
    assert micro_dp_of(layout(4, tp=1, pp=2, chunks=2), training, 4) is None
    assert not contains(layout(2, tp=1, pp=1), training, 4)
    assert contains(layout(4, tp=1, pp=1), layout(2, tp=2, pp=1), 4)  # a home on some of the devices


def test_what_contains_what_on_other_devices_too() -> None:
    """Of all pairs of small layouts: a device's part begins and ends at fractions of every parameter."""
    everywhere = [
        layout(size, tp, pp, micro_dp, first)
        for first, size, tp, pp, micro_dp in product(range(3), (1, 2, 3, 4), (1, 2, 3), (1, 2), ((1, 1), (2, 1)))
        if size % (tp * pp * micro_dp[0]) == 0
    ]

    def lies_in(device: int, inner: Layout, outer: Layout) -> bool:
        parts = [layout.coordinates(device)[1:] for layout in (inner, outer)]
        (begin, end), (outer_begin, outer_end) = (
            (Fraction(tp, of.strategy.tp), Fraction(tp + 1, of.strategy.tp))
            for (tp, _), of in zip(parts, (inner, outer), strict=True)
        )
        layers, outer_layers = (
            held_layers(4, of.strategy, stage) for (_, stage), of in zip(parts, (inner, outer), strict=True)
        )
        return outer_begin <= begin and end <= outer_end and layers <= outer_layers

    found = []
    for outer, inner in product(everywhere, repeat=2):
        if set(inner.mesh.devices) <= set(outer.mesh.devices):
            expected = all(lies_in(device, inner, outer) for device in inner.mesh.devices)
            found.append(expected)
            assert contains(outer, inner, 4) == expected, (outer, inner)
        else:
            assert not contains(outer, inner, 4)
    assert 100 < sum(found) < len(found) - 100
