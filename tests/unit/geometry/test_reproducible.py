"""The trees of sums, and which layouts cut them."""

from dataclasses import replace

import pytest

from realhf.geometry.layout import ParallelStrategy
from realhf.geometry.reproducible import gradient_parts, tensor_leaves, unordered, unordered_training
from tests.unit.engine.losses import tiny


@pytest.mark.parametrize(("kv_heads", "leaves"), [(1, 1), (2, 2), (3, 3), (4, 4), (6, 2), (8, 4), (5, 1)])
def test_a_model_has_as_many_leaves_as_divide_all_that_tensor_parallelism_divides(kv_heads: int, leaves: int) -> None:
    model = replace(
        tiny(), hidden_size=240, num_heads=kv_heads, num_kv_heads=kv_heads, intermediate_size=120, vocab_size=120
    )
    assert tensor_leaves(model) == leaves
    assert tensor_leaves(replace(model, vocab_size=121)) == 1


def test_layouts_that_cannot_cut_the_trees_are_named() -> None:
    model = replace(tiny(), num_heads=8, num_kv_heads=8, intermediate_size=64, vocab_size=64)
    assert unordered(model, ParallelStrategy(2, 4, 2)) is None
    assert unordered(model, ParallelStrategy(1, 8, 1)) == (
        "tp=8 does not divide the 4 parts that the model's sums have; choose tp from 1, 2, 4"
    )
    assert "leave chunks out" in (unordered(model, ParallelStrategy(1, 1, 2, chunks=2)) or "")


def test_trainings_compute_each_part_of_the_gradient() -> None:
    assert [gradient_parts(samples) for samples in (1, 6, 12, 64)] == [1, 2, 4, 4]
    assert unordered_training(2, 2, 4) is None
    assert unordered_training(1, 2, 2) is None
    assert "choose dp x micro_batches from 1 x 2, 2 x 1" in (unordered_training(4, 1, 2) or "")
