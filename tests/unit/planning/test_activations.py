"""Bytes of a token in the layers of a model, by hand, where every dimension is another number.

WIDE has 100 hidden numbers, an MLP of 70, 6 heads and 2 of keys, of 10 numbers: 60 queries, 20 keys and as many values.
"""

from dataclasses import replace

import pytest

from realhf.architecture.model import DecoderConfig, DType, Experts
from realhf.planning.model.activations import (
    InFlight,
    activation_elements,
    backward_bytes,
    beyond_kept_bytes,
    kept_bytes,
    kept_layer_bytes,
    kept_selective_bytes,
)
from realhf.planning.model.features import ENGINE, EngineFeatures

WIDE = DecoderConfig(
    hidden_size=100, intermediate_size=70, num_layers=4, num_heads=6, num_kv_heads=2, vocab_size=32,
    attention_head_dim=10,
)  # fmt: skip
PLAIN = replace(WIDE, mlp="plain")
MIXED = replace(WIDE, experts=Experts(count=4, per_token=3))
HOST = EngineFeatures(in_host_memory=True)
FUSED = EngineFeatures(in_host_memory=True, fuses_training=True)
DIVIDED = EngineFeatures(sequence_parallel=True)
SELECTIVE = EngineFeatures(recomputation="selective")
FULL = EngineFeatures(recomputation="full")


@pytest.mark.parametrize(
    ("model", "tp", "expected"),
    [
        (WIDE, 1, 400 + (3 * 60 + 3 * 20 + 4 * 70)),
        (WIDE, 2, 400 + (3 * 60 + 3 * 20 + 4 * 70) / 2),
        (PLAIN, 2, 400 + (3 * 60 + 3 * 20 + 2 * 70) / 2),
        # The inputs and outputs of three experts, each with an MLP of its own.
        (MIXED, 2, 400 + 2 * 3 * 100 + (3 * 60 + 3 * 20 + 4 * 3 * 70) / 2),
    ],
    ids=["whole", "divided", "plain", "experts"],
)
def test_elements_of_a_pass_without_gradients(model: DecoderConfig, tp: int, expected: float) -> None:
    assert activation_elements(model, tp) == expected


# In bfloat16: rotated q and attention's output (2 bytes each), that output again, k and v, a number of 4 bytes a head.
ATTENTION = 60 * (2 * 2 + 2) + 20 * 2 * 2 + 6 * 4
ATTENTION_IN_FLOAT32 = 60 * (2 * 4 + 2) + 20 * 2 * 4 + 6 * 4
# Two norms: the input in float32, two arrays in bfloat16, and the root.
NORMS = 2 * (100 * (4 + 2 * 2) + 4)


@pytest.mark.parametrize(
    ("model", "dtype", "tp", "features", "expected"),
    [
        (WIDE, "bfloat16", 1, ENGINE, NORMS + ATTENTION + 4 * 70 * 2),
        (WIDE, "bfloat16", 2, ENGINE, NORMS + (ATTENTION + 4 * 70 * 2) / 2),
        (WIDE, "bfloat16", 2, DIVIDED, (NORMS + ATTENTION + 4 * 70 * 2) / 2),
        (WIDE, "float32", 2, ENGINE, 2 * (100 * 12 + 4) + (60 * 12 + 20 * 8 + 6 * 4 + 4 * 70 * 4) / 2),
        (WIDE, "float64", 1, ENGINE, 2 * (100 * 24 + 8) + 60 * 24 + 20 * 16 + 6 * 8 + 4 * 70 * 8),
        (WIDE, "bfloat16", 1, HOST, NORMS + ATTENTION_IN_FLOAT32 + 4 * 70 * 2),
        # One kernel: of a norm two arrays, of the MLP three.
        (WIDE, "bfloat16", 1, FUSED, 2 * 100 * 2 * 2 + ATTENTION_IN_FLOAT32 + 3 * 70 * 2),
        (WIDE, "float64", 1, FUSED, 2 * (100 * 24 + 8) + 60 * 24 + 20 * 16 + 6 * 8 + 4 * 70 * 8),
        # The kernels are those of RMS norms and of gated SiLUs.
        (replace(WIDE, activation="gelu"), "bfloat16", 1, FUSED, 2 * 100 * 4 + ATTENTION_IN_FLOAT32 + 4 * 70 * 2),
        (PLAIN, "bfloat16", 1, FUSED, 2 * 100 * 4 + ATTENTION_IN_FLOAT32 + 2 * 70 * 2),
        (PLAIN, "bfloat16", 1, ENGINE, NORMS + ATTENTION + 2 * 70 * 2),
        (replace(WIDE, norm="rms_plus_one"), "bfloat16", 1, ENGINE, 2 * (100 * 10 + 4) + ATTENTION + 4 * 70 * 2),
        (replace(WIDE, norm="layer"), "bfloat16", 1, ENGINE, 2 * (100 * 4 + 4) + ATTENTION + 4 * 70 * 2),
        (replace(WIDE, norm="layer"), "bfloat16", 1, FUSED, 2 * (100 * 4 + 4) + ATTENTION_IN_FLOAT32 + 3 * 70 * 2),
        (MIXED, "bfloat16", 2, ENGINE, NORMS + 2 * 3 * 100 * 2 + (ATTENTION + 4 * 3 * 70 * 2) / 2),
        # A norm of each of 8 heads: its input in float32, its output, and the root; fused the output alone.
        (replace(WIDE, qk_norm=True), "bfloat16", 2, ENGINE, NORMS + (ATTENTION + 80 * 6 + 8 * 4 + 4 * 70 * 2) / 2),
        (replace(WIDE, qk_norm=True), "bfloat16", 1, FUSED, 800 + ATTENTION_IN_FLOAT32 + 80 * 2 + 3 * 70 * 2),
    ],
)  # fmt: skip
def test_bytes_that_a_layer_keeps(
    model: DecoderConfig, dtype: DType, tp: int, features: EngineFeatures, expected: float
) -> None:
    assert kept_layer_bytes(model, dtype, tp, features) == expected
    assert kept_bytes(model, dtype, tp, InFlight(whole=2, recomputed=3), features) == 5 * expected


@pytest.mark.parametrize(
    ("model", "dtype", "tp", "features", "expected"),
    [
        # q and attention's output, k and v, a number a head, gate and up; the input and two outputs.
        (WIDE, "bfloat16", 2, ENGINE, 3 * 100 * 2 + (60 * 4 + 20 * 4 + 6 * 4 + 2 * 70 * 2) / 2),
        (WIDE, "float32", 1, ENGINE, 3 * 100 * 4 + 60 * 8 + 20 * 8 + 6 * 4 + 2 * 70 * 4),
        (WIDE, "bfloat16", 2, DIVIDED, (50 + 2 * 100) * 2 + (60 * 4 + 20 * 4 + 6 * 4 + 2 * 70 * 2) / 2),
        (WIDE, "bfloat16", 1, HOST, 3 * 100 * 2 + 60 * 6 + 20 * 4 + 6 * 4 + 2 * 70 * 2),
        (PLAIN, "bfloat16", 1, ENGINE, 3 * 100 * 2 + 60 * 4 + 20 * 4 + 6 * 4 + 70 * 2),
        # The outputs of attention and of three experts.
        (MIXED, "bfloat16", 1, ENGINE, 5 * 100 * 2 + 60 * 4 + 20 * 4 + 6 * 4 + 2 * 3 * 70 * 2),
    ],
    ids=["divided", "float32", "sequence-parallel", "host", "plain", "experts"],
)
def test_bytes_that_a_layer_keeps_with_selective_recomputation(
    model: DecoderConfig, dtype: DType, tp: int, features: EngineFeatures, expected: float
) -> None:
    assert kept_selective_bytes(model, dtype, tp, features) == expected
    features = replace(features, recomputation="selective")
    assert kept_bytes(model, dtype, tp, InFlight(whole=0, recomputed=3), features) == 3 * expected


def test_with_full_recomputation_a_layer_keeps_its_input() -> None:
    assert kept_bytes(WIDE, "bfloat16", 2, InFlight(whole=0, recomputed=3), FULL) == 3 * 100 * 2
    divided = replace(FULL, sequence_parallel=True)
    assert kept_bytes(WIDE, "bfloat16", 2, InFlight(whole=0, recomputed=3), divided) == 3 * 50 * 2
    whole = NORMS + (ATTENTION + 4 * 70 * 2) / 2
    assert kept_bytes(WIDE, "bfloat16", 2, InFlight(whole=1, recomputed=3), FULL) == whole + 3 * 100 * 2


BROAD = replace(WIDE, intermediate_size=700)  # whose MLP has the most
HEADS = replace(WIDE, attention_head_dim=200)  # 1,200 queries, 400 keys: attention has the most


@pytest.mark.parametrize(
    ("model", "dtype", "tp", "features", "expected"),
    [
        # Six arrays of the final norm in float32 at least, and of the rotary tables a row.
        (WIDE, "bfloat16", 1, ENGINE, 6 * 100 * 4 + 2 * 10 * 2),
        (WIDE, "float64", 2, ENGINE, 6 * 100 * 8 + 2 * 10 * 8),
        # Gradients of both factors of the product, and of the hidden states.
        (BROAD, "bfloat16", 1, ENGINE, 2 * 700 * 2 + 2 * 100 * 2 + 20 * 2),
        (replace(BROAD, intermediate_size=1400), "bfloat16", 2, ENGINE, 2 * 700 * 2 + 2 * 100 * 2 + 20 * 2),
        # Of attention, less what the MLP and its norm had kept.
        (HEADS, "bfloat16", 1, ENGINE, 2 * 1600 * 2 - (4 * 70 * 2 + 804) + 400 * 2),
        (HEADS, "bfloat16", 2, HOST, (2 * 1600 * 4 - 4 * 70 * 2) / 2 - 804 + 400 * 2),
        (HEADS, "bfloat16", 1, FUSED, 2 * 1600 * 4 - (3 * 70 * 2 + 400) + 400 * 2),
        # Where a layer is run again, nothing of it is freed before.
        (WIDE, "bfloat16", 1, FULL, 6 * 100 * 4 + 2 * 10 * 2),
        (HEADS, "bfloat16", 2, SELECTIVE, (2 * 70 * 2 + 2 * 1600 * 2) / 2 + 2 * 100 * 2 + 400 * 2),
        (HEADS, "bfloat16", 1, FULL, 2 * 70 * 2 + 2 * 1600 * 2 + 2 * 100 * 2 + 400 * 2),
    ],
)
def test_bytes_of_a_backward_pass(
    model: DecoderConfig, dtype: DType, tp: int, features: EngineFeatures, expected: float
) -> None:
    assert backward_bytes(model, dtype, tp, features) == expected
    if features.recomputation == "off":
        assert beyond_kept_bytes(model, dtype, tp, 0, features) == expected
        assert beyond_kept_bytes(model, dtype, tp, 3, features) == expected


def test_a_layer_that_is_run_again_is_there_beside_its_backward_pass() -> None:
    """In bfloat16 a layer of WIDE keeps 2,632 bytes, of which 1,224 stay with selective recomputation."""
    layer, selective = NORMS + ATTENTION + 4 * 70 * 2, 600 + 344 + 280
    assert (layer, selective) == (2632, 1224)
    backward = 6 * 100 * 4 + 2 * 10 * 2
    assert beyond_kept_bytes(WIDE, "bfloat16", 1, 0, FULL) == layer + backward
    assert beyond_kept_bytes(WIDE, "bfloat16", 1, 0, SELECTIVE) == layer - selective + backward


def test_whole_layers_are_freed_before_one_is_run_again() -> None:
    """Of HEADS the backward pass of a whole layer has 5,836 bytes, that of one that is run again 7,880."""
    layer = NORMS + 1200 * 6 + 400 * 4 + 6 * 4 + 4 * 70 * 2
    first, again = 6400 - 1364 + 800, 280 + 6400 + 400 + 800
    assert beyond_kept_bytes(HEADS, "bfloat16", 1, 0, FULL) == layer + again
    assert beyond_kept_bytes(HEADS, "bfloat16", 1, 1, FULL) == again
    assert beyond_kept_bytes(HEADS, "bfloat16", 1, 2, FULL) == first


def test_nothing_is_won_where_selective_recomputation_keeps_more_than_a_layer() -> None:
    """With sequence parallelism over 8 ranks the outputs of products are whole, and all else is divided."""
    features = replace(SELECTIVE, sequence_parallel=True)
    assert kept_selective_bytes(WIDE, "bfloat16", 8, features) > kept_layer_bytes(WIDE, "bfloat16", 8, features)
    assert beyond_kept_bytes(WIDE, "bfloat16", 8, 0, features) == 6 * 100 * 4 + 2 * 10 * 2
