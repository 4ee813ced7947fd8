"""Elements of a model's parts by hand, and against its parameters one by one."""

from dataclasses import replace

import pytest

from realhf.architecture.model import DecoderConfig, Experts
from realhf.geometry.layout import ParallelStrategy, stage_layers
from realhf.geometry.parameters import decoder_parameters, parameter_count
from realhf.planning.model.sizes import (
    ModelSizes,
    largest_units,
    largest_weight,
    linear_elements,
    model_sizes,
    operator_parts,
)
from tests.unit.planning.graphs import TINY

LEARNED = replace(TINY, positions="learned", max_positions=48, tied_embeddings=True, num_layers=5)
GROUPED = replace(TINY, num_kv_heads=2, num_layers=5, qkv_bias=True)
MODELS = [TINY, LEARNED, GROUPED, TINY.with_head("scalar"), replace(TINY, experts=Experts(count=4, per_token=2))]
DIVIDED = 4 * 64 * 64 + 3 * 64 * 128  # of TINY's layers; two norms of 64 are whole


def test_parts_of_a_model() -> None:
    ends = {"embedding_sharded": 32 * 64, "embedding_replicated": 0, "head_sharded": 32 * 64, "head_replicated": 64}
    plain = ModelSizes(num_layers=4, layer_sharded=DIVIDED, layer_replicated=128, tied=False, **ends)
    assert model_sizes(TINY) == plain
    assert plain.total == 4 * (DIVIDED + 128) + 2 * 32 * 64 + 64
    learned = replace(plain, num_layers=5, embedding_replicated=48 * 64, head_sharded=0, tied=True)
    assert model_sizes(LEARNED) == learned
    assert learned.total == 5 * (DIVIDED + 128) + 32 * 64 + 48 * 64 + 64
    critic = model_sizes(TINY.with_head("scalar"))
    assert (critic.head_sharded, critic.head_replicated, critic.tied) == (0, 128, False)


@pytest.mark.parametrize("model", MODELS)
def test_the_total_is_that_of_the_parameters(model: DecoderConfig) -> None:
    assert model_sizes(model).total == parameter_count(model)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 4), (1, 3)])
def test_parts_of_a_stage_are_those_of_its_parameters(model: DecoderConfig, tp: int, pp: int) -> None:
    on_stages = []
    for stage in range(pp):
        layers = stage_layers(model.num_layers, pp, stage)
        here = [spec for spec in decoder_parameters(model) if spec.is_on_stage(layers, stage, pp)]
        on_stages.append(sum(spec.size if spec.shard_dim is None else spec.size // tp for spec in here))
        assert model_sizes(model).on_stage(tp, pp, stage) == on_stages[-1]
    assert model_sizes(model).largest(ParallelStrategy(tp=tp, pp=pp)) == max(on_stages)


def test_the_fuller_of_both_ends_counts() -> None:
    """Of a vocabulary of 4096 the last stage, with a layer less and a head; of learned positions the first one."""
    wide, layer = replace(TINY, vocab_size=4096, num_layers=5), DIVIDED + 128
    assert model_sizes(wide).largest(ParallelStrategy(pp=2)) == 3 * layer + 4096 * 64
    even = replace(wide, num_layers=4)
    assert model_sizes(even).largest(ParallelStrategy(pp=2)) == 2 * layer + 4096 * 64 + 64
    assert model_sizes(LEARNED).largest(ParallelStrategy(pp=2)) == 3 * layer + 32 * 64 + 48 * 64


@pytest.mark.parametrize(
    ("model", "tp", "pp", "expected"),
    [
        (TINY, 1, 1, 4 * DIVIDED + 32 * 64),
        (TINY, 2, 1, (4 * DIVIDED + 32 * 64) // 2),
        (TINY, 1, 2, 2 * DIVIDED + 32 * 64),
        (replace(TINY, num_layers=5), 1, 2, 3 * DIVIDED),
        (LEARNED, 1, 1, 5 * DIVIDED),  # the head is the embedding
        (TINY.with_head("scalar"), 2, 1, 4 * DIVIDED // 2 + 64),  # a value's weights are whole on every rank
    ],
)
def test_weights_of_linears(model: DecoderConfig, tp: int, pp: int, expected: int) -> None:
    assert linear_elements(model, ParallelStrategy(tp=tp, pp=pp)) == expected


@pytest.mark.parametrize(
    ("model", "tp", "expected"),
    [
        (TINY, 1, 64 * 128),
        (TINY, 2, 64 * 64),
        (replace(TINY, vocab_size=4096), 1, 64 * 128),  # of a layer
        (replace(TINY, intermediate_size=8), 2, 64 * 64 // 2),
        (replace(TINY, intermediate_size=4, num_heads=1, num_kv_heads=1, attention_head_dim=2), 4, 64),  # a norm
    ],
)
def test_the_largest_weight_of_a_layer(model: DecoderConfig, tp: int, expected: int) -> None:
    assert largest_weight(model, tp) == expected


def test_parts_of_operators() -> None:
    parts = {"q": 4096, "k": 4096, "v": 4096, "o": 4096, "gate": 8192, "up": 8192, "down": 8192}
    assert operator_parts(TINY) == pytest.approx({kind: size / 40960 for kind, size in parts.items()})
    experts = 2 / 4 * (4 * 3 * 64 * 128 + 4 * 64)
    routed = {"q": 4096, "k": 4096, "v": 4096, "o": 4096, "experts": experts}
    mixture = replace(TINY, experts=Experts(count=4, per_token=2))
    assert operator_parts(mixture) == pytest.approx(
        {kind: size / (4 * 4096 + experts) for kind, size in routed.items()}
    )


@pytest.mark.parametrize(
    ("model", "tp", "expected"),
    [
        (TINY, 1, (DIVIDED + 128, DIVIDED + 128)),
        (TINY, 2, (DIVIDED // 2 + 128, DIVIDED // 2 + 128)),
        (replace(TINY, vocab_size=4096), 1, (4096 * 64 + 64, 4096 * 64)),
        (replace(TINY, vocab_size=4096), 2, (2048 * 64 + 64, 2048 * 64)),
        (replace(TINY, vocab_size=4096).with_head("scalar"), 2, (2048 * 64, DIVIDED // 2 + 128)),
        (replace(LEARNED, max_positions=4096), 2, (4096 * 64 + 16 * 64, DIVIDED // 2 + 128)),
    ],
)
def test_the_largest_units(model: DecoderConfig, tp: int, expected: tuple[int, int]) -> None:
    assert largest_units(model, tp) == expected
