"""Architectures: what is refused, and the published sizes of the named ones."""

import math
import re
from dataclasses import replace

import pytest

from realhf.architecture.model import RopeScaling
from realhf.architecture.named import LLAMA, model_type
from realhf.base.errors import UserError
from realhf.geometry.parameters import parameter_count
from tests.unit.api.calls import TINY

BAD = {
    "a size of zero": ({"num_layers": 0}, "num_layers 0 is not from 1 to 1,000; give"),
    "more layers than can be listed": ({"num_layers": 10**8}, "num_layers 100000000 is not from 1 to 1,000; give"),
    "a width beyond all": ({"hidden_size": 10**12}, "hidden_size 1000000000000 is not from 1 to 100,000; give"),
    "a base that is no number": ({"rope_theta": math.nan}, "rope_theta nan is not from 1 to 1e+12; give"),
    "an epsilon that is no number": ({"rms_norm_eps": math.inf}, "rms_norm_eps inf is not from 0 to 1; give"),
    "a window of zero": ({"sliding_window": 0}, "sliding_window 0 is not from 1 to 1,000,000,000; give"),
    "too wide a head": ({"attention_head_dim": 10**6}, "attention_head_dim 1000000 is not from 2 to 10,000; give"),
    "a hidden size that heads do not divide": (
        {"hidden_size": 33},
        "hidden_size=33 must be num_heads=8 times an even head dimension; choose hidden_size as a multiple of 16",
    ),
    "an odd head dimension": ({"hidden_size": 24}, "hidden_size=24 must be num_heads=8 times an even head dimension"),
    "kv heads that do not divide": ({"num_kv_heads": 3}, "num_kv_heads=3 must divide num_heads=8"),
    "a tied scalar head": (
        {"head": "scalar", "tied_embeddings": True},
        "a scalar head has no output embedding to tie; set tied_embeddings=False",
    ),
}


@pytest.mark.parametrize("field", ["factor", "original_positions", "low_frequency_factor", "high_frequency_factor"])
def test_a_rope_scaling_that_is_no_number(field: str) -> None:
    with pytest.raises(UserError, match=f"rope scaling: {field} nan is not from [01] to "):
        RopeScaling(**{"kind": "llama3", field: math.nan})


@pytest.mark.parametrize("name", BAD)
def test_bad_architectures(name: str) -> None:
    changes, message = BAD[name]
    with pytest.raises(UserError, match=re.escape(message)):
        replace(TINY, **changes)


def test_with_head_unties_what_a_scalar_head_cannot_tie() -> None:
    tied = replace(TINY, tied_embeddings=True)
    assert tied.with_head("scalar") == replace(TINY, head="scalar")
    assert tied.with_head("lm") == tied
    assert TINY.with_head("scalar").with_head("lm") == TINY


@pytest.mark.parametrize(
    ("name", "all_parameters", "without_output_embedding"),
    [
        ("llama7b", 8_030_261_248, 7_504_924_672),
        ("llama13b", 14_001_525_760, 13_344_855_040),
        ("llama34b", 35_321_028_608, 34_270_355_456),
        ("llama70b", 70_553_706_496, 69_503_033_344),
    ],
)
def test_published_parameter_counts(name: str, all_parameters: int, without_output_embedding: int) -> None:
    """ReaL, table 1; a critic has a vector of hidden_size in place of the output embedding."""
    assert parameter_count(LLAMA[name]) == all_parameters
    assert parameter_count(model_type(f"{name}-critic")) == without_output_embedding + LLAMA[name].hidden_size
