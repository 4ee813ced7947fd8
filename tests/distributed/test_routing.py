"""Under `reproducible="layout"` a token takes the experts in training that it took in generation."""

import pytest

from benchmarks.lib.routing import GENERATIONS, MODEL, RANKS, SAMPLES, TRAININGS, Choices, choices, differing, sequences
from tests.distributed.pool import run_distributed

pytestmark = [
    pytest.mark.distributed,
]


def with_and_without(rank: int, dtype: str) -> tuple[list[Choices], list[Choices]]:
    return choices(rank, dtype, "layout"), choices(rank, dtype, "plan")


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_experts_of_training_are_those_of_generation(dtype: str) -> None:
    ordered, plain = run_distributed(with_and_without, RANKS, dtype)[0]
    tokens = sum(map(len, sequences().data["seq"])) - SAMPLES  # generation computes nothing behind the last token
    pairs = len(GENERATIONS) * len(TRAININGS)
    assert differing(ordered) == (0, pairs * tokens * MODEL.num_layers)
    if dtype == "bfloat16":
        assert differing(plain)[0] > 0, "the same sequences part where sums are rounded in other orders"
