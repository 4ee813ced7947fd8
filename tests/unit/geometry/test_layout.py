"""Rank order, groups and stages of a layout; what a model cannot be divided by."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realhf.architecture.transformers_config import TransformersConfig
from realhf.base.errors import UserError
from realhf.geometry.layout import (
    DeviceMesh,
    Layout,
    ParallelStrategy,
    check_strategy,
    chunk_layers,
    held_layers,
    stage_layers,
)
from tests.unit.api.calls import TINY

_SIZES = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "vocab_size")


def with_micro_groups(first: int, dp: int, tp: int, pp: int, micro_dp: tuple[int, int]) -> Layout:
    strategy = ParallelStrategy(dp * micro_dp[0] * micro_dp[1], tp, pp, micro_dp=micro_dp)
    return Layout(DeviceMesh(first, strategy.size), strategy)


layouts = st.builds(
    with_micro_groups, st.integers(0, 9), *[st.integers(1, 5)] * 3, st.tuples(st.integers(1, 3), st.integers(1, 3))
)


def test_tensor_peers_are_neighbours_and_stages_are_farthest_apart() -> None:
    layout = Layout(DeviceMesh(8, 8), ParallelStrategy(dp=2, tp=2, pp=2))
    assert [layout.coordinates(d) for d in layout.mesh.devices] == [
        (0, 0, 0),
        (0, 1, 0),
        (1, 0, 0),
        (1, 1, 0),
        (0, 0, 1),
        (0, 1, 1),
        (1, 0, 1),
        (1, 1, 1),
    ]
    assert layout.tensor_group(dp=1, pp=0) == [10, 11]
    assert layout.data_group(tp=1, pp=1) == [13, 15]
    assert layout.pipeline_group(dp=1, tp=0) == [10, 14]
    assert [layout.output_device(dp) for dp in (0, 1)] == [12, 14]
    assert str(layout) == "dp2 tp2 pp2 on devices 8-15"


def test_a_strategy_divides_nothing_unless_it_says_so() -> None:
    assert ParallelStrategy() == ParallelStrategy(1, 1, 1, 1, (1, 1))
    assert (str(ParallelStrategy()), ParallelStrategy().size) == ("dp1 tp1 pp1", 1)
    assert str(ParallelStrategy(8, 3, 2, 1, (2, 4))) == "dp8 tp3 pp2 micro-dp2x4"
    assert str(ParallelStrategy(8, 3, 2, micro_dp=(1, 2))) == "dp8 tp3 pp2 micro-dp1x2"
    assert ParallelStrategy(5, 3, 2).size == 30
    assert list(DeviceMesh(3, 2).devices) == [3, 4]


@given(layouts)
def test_coordinates_and_devices_are_inverse(layout: Layout) -> None:
    for device in layout.mesh.devices:
        assert layout.device(*layout.coordinates(device)) == device


@given(layouts)
def test_each_kind_of_group_divides_the_mesh(layout: Layout) -> None:
    s = layout.strategy
    kinds = [
        [layout.tensor_group(dp, pp) for dp in range(s.dp) for pp in range(s.pp)],
        [layout.data_group(tp, pp) for tp in range(s.tp) for pp in range(s.pp)],
        [layout.pipeline_group(dp, tp) for dp in range(s.dp) for tp in range(s.tp)],
    ]
    for groups in kinds:
        assert sorted(device for group in groups for device in group) == list(layout.mesh.devices)


def test_a_device_outside_the_mesh_has_no_coordinates() -> None:
    layout = Layout(DeviceMesh(2, 2), ParallelStrategy(dp=2))
    for device in (1, 4):
        with pytest.raises(ValueError, match=f"device {device} is not in"):
            layout.coordinates(device)


@pytest.mark.parametrize(
    ("first", "second", "overlap"),
    [((0, 2), (2, 2), False), ((0, 3), (2, 2), True), ((4, 1), (0, 8), True), ((3, 1), (0, 3), False)],
)
def test_overlap(first: tuple[int, int], second: tuple[int, int], overlap: bool) -> None:
    a, b = DeviceMesh(*first), DeviceMesh(*second)
    assert a.overlaps(b) is b.overlaps(a) is overlap


def test_early_stages_take_the_remainder() -> None:
    assert [stage_layers(10, 4, stage) for stage in range(4)] == [range(0, 3), range(3, 6), range(6, 8), range(8, 10)]


@given(st.integers(1, 100), st.integers(1, 20))
def test_stages_cover_all_layers_evenly(num_layers: int, pp: int) -> None:
    stages = [stage_layers(num_layers, pp, stage) for stage in range(pp)]
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    sizes = [len(stage) for stage in stages]
    assert max(sizes) - min(sizes) <= 1


def test_chunks_are_pp_runs_of_layers_apart() -> None:
    strategy = ParallelStrategy(pp=2, chunks=2)
    assert [chunk_layers(5, strategy, stage) for stage in range(2)] == [
        (range(0, 2), range(3, 4)),
        (range(2, 3), range(4, 5)),
    ]
    assert held_layers(5, strategy, 0) == {0, 1, 3}
    assert str(strategy) == "dp1 tp1 pp2 chunks2"


@given(st.integers(1, 60), st.integers(1, 6), st.integers(1, 5))
def test_chunks_cover_all_layers_and_leave_stages_as_long(num_layers: int, pp: int, chunks: int) -> None:
    strategy = ParallelStrategy(pp=pp, chunks=chunks)
    stages = [chunk_layers(num_layers, strategy, stage) for stage in range(pp)]
    in_order = [layer for chunk in range(chunks) for stage in stages for layer in stage[chunk]]
    assert in_order == list(range(num_layers))
    plain = [len(stage_layers(num_layers, pp, stage)) for stage in range(pp)]
    assert [len(held_layers(num_layers, strategy, stage)) for stage in range(pp)] == plain


BAD = {
    "tp": (ParallelStrategy(tp=3), "c: tp=3 does not divide num_heads=8; choose tp from 1, 2, 4"),
    "kv heads": (ParallelStrategy(tp=8), "c: tp=8 does not divide num_kv_heads=4; choose tp from 1, 2, 4"),
    "pp": (
        ParallelStrategy(pp=5),
        "c: pp=5 needs at least one layer a stage but the model has num_layers=4; choose pp of at most 4",
    ),
    "more chunks than layers": (
        ParallelStrategy(pp=2, chunks=3),
        "c: chunks=3 needs more than one stage and a layer for each chunk, but pp=2 and num_layers=4; "
        "choose chunks from 1, 2",
    ),
    "chunks of one stage": (ParallelStrategy(chunks=2), "but pp=1 and num_layers=4; choose chunks from 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_a_model_cannot_be_divided_by(name: str) -> None:
    strategy, message = BAD[name]
    with pytest.raises(UserError, match=re.escape(message)):
        check_strategy("c", TINY, strategy)


@pytest.mark.parametrize(("size", "tp"), [("num_kv_heads", 4), ("intermediate_size", 4), ("vocab_size", 4)])
def test_tensor_parallelism_divides_every_size(size: str, tp: int) -> None:
    """Two more heads, columns or words than a multiple of four."""
    model = replace(TINY, **{"num_heads": 12, "attention_head_dim": 4, size: getattr(TINY, size) + 2})
    check_strategy("c", model, ParallelStrategy(tp=tp // 2))
    with pytest.raises(UserError, match=f"c: tp={tp} does not divide {size}={getattr(model, size)}; choose tp from 1"):
        check_strategy("c", model, ParallelStrategy(tp=tp))


@pytest.mark.parametrize(
    "strategy",
    [
        ParallelStrategy(pp=4),  # as many stages as layers
        ParallelStrategy(pp=2, chunks=2),  # a layer for each chunk
        ParallelStrategy(dp=4, micro_dp=(2, 2)),
        ParallelStrategy(dp=4, micro_dp=(1, 2)),
        ParallelStrategy(dp=3, tp=4, pp=4),
    ],
    ids=str,
)
def test_what_a_model_can_just_be_divided_by(strategy: ParallelStrategy) -> None:
    check_strategy("c", TINY, strategy)


@pytest.mark.parametrize(
    "strategy",
    [
        ParallelStrategy(dp=4, micro_dp=(3, 1)),
        ParallelStrategy(dp=4, micro_dp=(4, 2)),
        ParallelStrategy(dp=4, micro_dp=(-1, -1)),
        ParallelStrategy(dp=2, pp=2, chunks=2, micro_dp=(2, 1)),
    ],
    ids=str,
)
def test_micro_groups_that_cannot_be(strategy: ParallelStrategy) -> None:
    micro_dp = re.escape(str(list(strategy.micro_dp)))
    with pytest.raises(UserError, match=f"c: micro_dp={micro_dp} must be two numbers from 1 on .*dp={strategy.dp}"):
        check_strategy("c", TINY, strategy)


def test_transformers_divides_over_data_parallelism_alone() -> None:
    sizes = {name: getattr(TINY, name) for name in _SIZES}
    model = TransformersConfig(config="{}", parameters=(("a", (1,)),), **sizes)
    check_strategy("c", model, ParallelStrategy(dp=2))
    for strategy in (ParallelStrategy(tp=2), ParallelStrategy(pp=2), ParallelStrategy(tp=2, pp=2)):
        with pytest.raises(UserError, match=f"c: tp={strategy.tp} pp={strategy.pp}, but transformers .* tp=1 and pp=1"):
            check_strategy("c", model, strategy)


def test_every_tp_that_an_error_offers_is_legal() -> None:
    with pytest.raises(UserError) as error:
        check_strategy("c", TINY, ParallelStrategy(tp=5))
    for tp in str(error.value).partition("choose tp from ")[2].split(", "):
        check_strategy("c", TINY, ParallelStrategy(tp=int(tp)))
