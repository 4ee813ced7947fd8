"""Rotary positions and their scaling against numbers by hand."""

import math

import pytest
import torch

from realhf.architecture.model import RopeScaling
from realhf.models.rotary import rotary_tables, rotate
from tests.unit.engine.losses import tiny

# Four pairs of coordinates turn once in 2 pi times 1, 10, 100 and 1,000 tokens.
PERIODS = tiny(attention_head_dim=8, rope_theta=10_000.0)
LLAMA3 = RopeScaling(
    kind="llama3", factor=8.0, original_positions=1000, low_frequency_factor=1.0, high_frequency_factor=4.0
)


def angles_a_token(scaling: RopeScaling, position: int = 1) -> list[float]:
    """By pair of coordinates, in radians."""
    config = PERIODS.__class__(**{**PERIODS.__dict__, "rope_scaling": scaling})
    cos, sin = rotary_tables(torch.tensor([position]), config, torch.float64)
    assert cos.shape == sin.shape == (1, 1, 8)
    assert torch.equal(sin[..., :4], sin[..., 4:])
    assert torch.equal(cos[..., :4], cos[..., 4:])
    return [math.atan2(s, c) / position for s, c in zip(sin[0, 0, :4].tolist(), cos[0, 0, :4].tolist(), strict=True)]


def test_llama3_keeps_high_frequencies_divides_low_ones_and_mixes_those_between() -> None:
    # In 1,000 tokens they turn 159, 15.9, 1.59 and 0.159 times. More than 4 turns are kept, fewer than 1 divided by 8;
    # of the third (1000 / (200 pi) - 1) / (4 - 1) = 0.197183 is kept and 0.802817 divided.
    assert angles_a_token(LLAMA3) == pytest.approx([1.0, 0.1, 0.01 * (0.197183 + 0.802817 / 8), 0.001 / 8], rel=1e-6)


@pytest.mark.parametrize(("low", "high", "third"), [(1.6, 4.0, 0.01 / 8), (1.0, 1.59, 0.01), (1.0, 2.183099, 0.005625)])
def test_llama3_has_its_borders_at_the_two_factors(low: float, high: float, third: float) -> None:
    # The third turns 1.5915494 times: below the low border, above the high one, in the middle of both.
    scaling = RopeScaling(
        kind="llama3", factor=8.0, original_positions=1000, low_frequency_factor=low, high_frequency_factor=high
    )
    assert angles_a_token(scaling)[2] == pytest.approx(third, rel=1e-6)


def test_other_scalings_by_hand() -> None:
    assert angles_a_token(RopeScaling()) == pytest.approx([1.0, 0.1, 0.01, 0.001])
    assert angles_a_token(RopeScaling(kind="linear", factor=4.0)) == pytest.approx([0.25, 0.025, 0.0025, 0.00025])
    dynamic = RopeScaling(kind="dynamic", factor=2.0, original_positions=10)
    # Within the original length nothing changes; a sequence of 20 has growth 2 * 20 / 10 - 1 = 3, and theta grows by
    # 3 ^ (8 / 6).
    assert angles_a_token(dynamic) == pytest.approx([1.0, 0.1, 0.01, 0.001])
    assert angles_a_token(dynamic, 19)[2] == pytest.approx((10_000 * 3 ** (8 / 6)) ** -0.5)


def test_a_rotation_turns_the_two_halves_of_a_head() -> None:
    cos, sin = rotary_tables(torch.tensor([1]), PERIODS, torch.float64)
    x = torch.zeros(1, 1, 8, dtype=torch.float64)
    x[..., 0], x[..., 5] = 1.0, 1.0  # the first of pair 0, the second of pair 1
    expected = [math.cos(1), -math.sin(0.1), 0, 0, math.sin(1), math.cos(0.1), 0, 0]
    torch.testing.assert_close(rotate(x, cos, sin)[0, 0], torch.tensor(expected, dtype=torch.float64))
