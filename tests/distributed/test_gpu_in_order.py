"""The kernels of GPUs, in Triton's interpreter: the same bits under every layout, in rollouts and in training."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from realhf.api.experiment import OptimizerConfig
from realhf.api.generation import GenerationOptions
from realhf.architecture.compute import Computation
from realhf.architecture.model import DecoderConfig
from realhf.engine.backend import ModelSpec
from realhf.engine.batch import PART
from realhf.engine.interface import GenerationRequest, Stats
from realhf.engine.model import ShardedModel
from realhf.geometry.boxes import Box
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.geometry.reproducible import gradient_parts
from realhf.parallel.groups import GroupTable
from tests.distributed.pool import run_distributed
from tests.unit.engine.losses import boxes_of, next_token_loss, random_batch, trained_tokens
from tests.unit.gpu.in_order import as_on_gpu, in_whole_vectors
from tests.unit.models.flash import IN_INTERPRETER

pytestmark = [pytest.mark.distributed, IN_INTERPRETER]

SAMPLES = 4
PARTS = gradient_parts(SAMPLES)
ONE, TP2, DP2, PP2 = (ParallelStrategy(*degrees) for degrees in ((1, 1, 1), (1, 2, 1), (2, 1, 1), (1, 1, 2)))
MODELS: dict[str, tuple[DecoderConfig, torch.dtype]] = {
    "biases, head norms": (in_whole_vectors(qkv_bias=True, qk_norm=True), torch.float32),
    "tied, two layers": (in_whole_vectors(num_layers=2, tied_embeddings=True), torch.bfloat16),
    "untied, two layers": (in_whole_vectors(num_layers=2, norm="rms_plus_one"), torch.float32),
}


@dataclass(frozen=True)
class Outcome:
    """What a rank made in a layout: tokens and log-probabilities by sample, the statistics and parameters of a
    training."""

    rollouts: dict[int, tuple[list[int], list[float]]]
    stats: Stats
    parameters: list[tuple[Box, np.ndarray]]


def run_in(strategy: ParallelStrategy, table: GroupTable, name: str) -> Outcome:
    """As many samples run at once as a rank has, or half of them."""
    (config, dtype), dp = MODELS[name], strategy.dp
    groups = table.groups(layout_of(strategy))
    compute, optimizer = Computation(reproducible="layout"), OptimizerConfig(lr=1e-2)
    spec = ModelSpec(config, groups, dtype, optimizer=optimizer, total_optimizer_steps=4, compute=compute)
    model = ShardedModel(spec)
    model.initialise(seed=3)
    model.parameters.flat.mul_(6)  # so large that next tokens differ in probability
    batch = random_batch(config, SAMPLES, seed=1, lengths=(2, 6))
    parts = [torch.tensor([i * PARTS // SAMPLES, PARTS]) for i in range(SAMPLES)]
    own = batch.with_data(**{PART: parts}).split(dp)[groups.dp_index]
    options = GenerationOptions(max_new_tokens=2, eos_token=-1, temperature=1.2)
    request = GenerationRequest(options, sample_key=(1, 1), prompt_key="tokens", micro_batches=strategy.size)
    made = model.generate(own, request)
    rollouts = {i: (s.tolist(), p.tolist()) for i, s, p in zip(own.ids, made.sequences, made.logprobs, strict=False)}
    stats = model.train_step(own, "tokens", next_token_loss, trained_tokens, PARTS // dp)
    return Outcome(rollouts, stats, [(box, x.float().numpy().copy()) for box, x in boxes_of(model).values()])


def layout_of(strategy: ParallelStrategy) -> Layout:
    return Layout(DeviceMesh(0, strategy.size), strategy)


def run_all(rank: int, strategies: list[ParallelStrategy], name: str) -> list[Outcome | None]:
    table = GroupTable(list(map(layout_of, strategies)), rank)
    with as_on_gpu():
        return [run_in(strategy, table, name) if rank < strategy.size else None for strategy in strategies]


@pytest.mark.parametrize(
    ("name", "strategies"),
    [
        ("biases, head norms", [ONE, TP2]),
        pytest.param("tied, two layers", [ONE, TP2, DP2, PP2], marks=pytest.mark.slow),
        pytest.param("untied, two layers", [ONE, TP2, DP2, PP2], marks=pytest.mark.slow),
    ],
)
def test_layouts_make_the_same_bits(name: str, strategies: list[ParallelStrategy]) -> None:
    ranks = run_distributed(run_all, 2, strategies, name)
    (one, _), *others = zip(*ranks, strict=True)
    whole = {box.name: values for box, values in one.parameters}
    assert len(one.rollouts) == SAMPLES
    for strategy, outcomes in zip(strategies[1:], others, strict=True):
        rollouts, stats = {}, {}
        for outcome in outcomes:
            rollouts |= outcome.rollouts
            for key, (total, weight) in outcome.stats.items():
                before = stats.get(key, (0.0, 0.0)) if strategy.dp > 1 and key in ("loss", "accuracy") else (0.0, 0.0)
                stats[key] = (before[0] + total, before[1] + weight)
            for box, values in outcome.parameters:
                place = tuple(slice(first, first + size) for first, size in zip(box.offset, box.shape, strict=True))
                assert np.array_equal(values, whole[box.name][place]), (strategy, box)
        assert rollouts == one.rollouts
        assert stats == one.stats
