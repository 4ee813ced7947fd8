"""Bytes of a model at home and away, where operators have modes of their own and where they have none: by hand.

TINY has 64 hidden and 128 intermediate numbers: four layers of 41,088 elements, 2,048 in embedding and head each.
"""

from dataclasses import replace
from typing import Any

import pytest

from realhf.architecture.compute import ModeRules
from realhf.architecture.model import DType
from realhf.geometry.layout import ParallelStrategy
from realhf.geometry.parameters import parameter_count
from realhf.planning.model.features import ENGINE
from realhf.planning.model.memory import PlacedModel
from realhf.realloc.plan.planner import DEFAULT_BUCKET_BYTES
from tests.unit.planning.graphs import TINY

COUNT, LAYER, ENDS = parameter_count(TINY), 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64, 32 * 64
ONE, TWO = ParallelStrategy(), ParallelStrategy(dp=2)
PADDED = 4 * LAYER + 2 * ENDS + 128  # where each has modes: the norm of 64 before the head is padded to 128
GATES = 4 * 64 * 128  # of all layers, and as many ups
RULES: ModeRules = (("*", "replicated"), ("layers.*.gate", "sharded"), ("layers.*.up", "zero1"))


def placed(strategy: ParallelStrategy, dtype: DType = "bfloat16", **features: Any) -> PlacedModel:
    return PlacedModel(TINY, strategy, dtype, replace(ENGINE, **features))


def test_the_numbers_above() -> None:
    assert 4 * LAYER + 2 * ENDS + 64 == COUNT


@pytest.mark.parametrize(
    ("strategy", "features", "divided"),
    [
        (TWO, {}, False),
        (TWO, {"fully_sharded": True}, True),
        (ONE, {"fully_sharded": True}, False),
        (TWO, {"modes": (("*", "zero1"),)}, False),
        (TWO, {"modes": (("*", "zero1"),), "fully_sharded": True}, False),
        (TWO, {"modes": RULES}, True),
        (ONE, {"modes": RULES}, False),
        # Of one stage alone.
        (ParallelStrategy(dp=2, pp=2), {"modes": (("layers.0.q", "sharded"),)}, True),
    ],
)
def test_parameters_are_divided(strategy: ParallelStrategy, features: dict[str, Any], divided: bool) -> None:
    assert placed(strategy, **features).is_divided is divided


def test_modes_count_where_there_are_ranks_to_divide_over() -> None:
    assert len(placed(ParallelStrategy(dp=2, pp=2), modes=RULES).stages) == 2
    assert placed(ParallelStrategy(pp=2), modes=RULES).stages == ()
    assert placed(ParallelStrategy(dp=2, pp=2)).stages == ()


def test_a_home_whose_operators_have_modes() -> None:
    """Half of the gates stays; of gates and ups half of the states. In bfloat16 a parameter has 2 bytes, its gradient
    4, its states and its master copy 12."""
    kept, updated = PADDED - GATES // 2, PADDED - GATES
    model = placed(TWO, modes=RULES)
    assert model.static_bytes(trained=False) == 2 * kept
    assert model.static_bytes(trained=False, versions=3) == 3 * 2 * kept
    assert model.static_bytes(trained=True) == model.static_bytes(trained=True, versions=3) == 6 * kept + 12 * updated
    assert model.updated_elements() == updated
    assert model.offloaded_bytes(trained=True) == 2 * kept + 12 * updated
    assert model.offloaded_bytes(trained=False, versions=3) == 3 * 2 * kept
    away = placed(TWO, modes=RULES, offloads_states=True)
    assert away.static_bytes(trained=True) == 6 * kept
    assert away.chunk_bytes() == (12 + 4) * updated
    narrow = placed(TWO, modes=RULES, fp32_gradients=False)
    assert narrow.static_bytes(trained=True) == 4 * kept + 12 * updated
    assert narrow.offloaded_bytes(trained=True) == model.offloaded_bytes(trained=True)


def test_the_stage_that_counts_is_the_one_with_the_most_bytes() -> None:
    """Both stages have two layers. The first replicates them but for their norms, and has all of their states; the
    second has a norm more."""
    rules: ModeRules = (("*", "zero1"), ("layers.0.*", "replicated"), ("layers.1.*", "replicated"))
    model = placed(ParallelStrategy(dp=2, pp=2), "float32", modes=rules)
    first, second = 2 * LAYER + ENDS, 2 * LAYER + ENDS + 128
    assert model.static_bytes(trained=False) == 4 * second
    updated = 2 * (LAYER - 2 * 64) + (ENDS + 4 * 64) // 2
    assert model.updated_elements() == updated
    assert model.static_bytes(trained=True) == 8 * first + 8 * updated
    assert model.offloaded_bytes(trained=True) == 4 * first + 8 * updated
    for replicated in (rules, (("*", "zero1"), ("layers.2.*", "replicated"), ("layers.3.*", "replicated"))):
        away = placed(ParallelStrategy(dp=2, pp=2), "float32", modes=replicated, offloads_states=True)
        assert away.static_bytes(trained=True) == 8 * second


def test_gradients_weigh_where_a_stage_is_chosen() -> None:
    """The first stage shards a gate, 8,192 elements, and keeps a half of it; the second keeps all that it has."""
    rules: ModeRules = (("*", "zero1"), ("layers.0.gate", "sharded"))
    model = placed(ParallelStrategy(dp=2, pp=2), modes=rules)
    second = 2 * LAYER + ENDS + 128
    assert model.static_bytes(trained=True) == 6 * second + 12 * (second // 2)
    assert model.static_bytes(trained=False) == 2 * second


def test_a_part_of_a_group_is_rounded_up() -> None:
    assert COUNT % 3
    assert placed(ParallelStrategy(dp=3), fully_sharded=True).static_bytes(trained=False) == 2 * (COUNT // 3 + 1)
    model = placed(ParallelStrategy(dp=3))
    assert model.elements() == COUNT
    assert model.elements(is_divided=True) == COUNT // 3 + 1
    assert model.updated_elements() == COUNT // 3 + 1
    assert placed(ParallelStrategy(dp=3), zero1=False).updated_elements() == COUNT
    assert placed(ParallelStrategy(dp=3), zero1=False, fully_sharded=True).updated_elements() == COUNT // 3 + 1


def test_a_checkpoint_that_is_copied_is_not_brought_back() -> None:
    """What goes to host memory are parameters and states; a copy of what this device writes is there already."""
    model = placed(TWO, copies_checkpoints=True)
    plain = placed(TWO)
    assert model.static_bytes(trained=True) - plain.static_bytes(trained=True) == COUNT // 2 * 14
    for trained in (True, False):
        assert model.offloaded_bytes(trained=trained) == plain.offloaded_bytes(trained=trained)
    assert plain.offloaded_bytes(trained=True) == 2 * COUNT + 12 * COUNT // 2
    assert plain.offloaded_bytes(trained=False) == 2 * COUNT


@pytest.mark.parametrize(("dtype", "item"), [("bfloat16", 2), ("float32", 4), ("float64", 8)])
def test_a_copy_and_the_second_copy_of_linears(dtype: DType, item: int) -> None:
    model = placed(TWO, dtype, packs_weights=True)
    assert model.item == item
    assert model.parameter_bytes() == item * COUNT
    assert model.copy_bytes() == item * COUNT + 2 * DEFAULT_BUCKET_BYTES
    linears = 4 * (LAYER - 2 * 64) + ENDS
    assert model.packed_bytes() == (0 if dtype == "float64" else item * linears)
    assert placed(TWO, dtype).packed_bytes() == 0
    assert model.chunk_bytes() == 0


def test_the_cache_of_the_stage_with_the_most_layers() -> None:
    """Keys and values of 64 numbers a layer, divided over tp; of five layers the first of two stages has three."""
    five = replace(TINY, num_layers=5)
    for strategy, layers in ((ONE, 5), (ParallelStrategy(tp=2, pp=2), 3 / 2), (ParallelStrategy(pp=5), 1)):
        assert PlacedModel(five, strategy, "bfloat16").cache_bytes(7) == 7 * layers * 2 * 64 * 2
