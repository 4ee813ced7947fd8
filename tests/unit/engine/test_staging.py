"""Optimizer states that pass through a GPU: their values in every order of streams, and the time of the copies."""

import itertools
import random
from typing import Any

import pytest
import torch

from realhf.api.experiment import OptimizerConfig
from realhf.architecture.chunks import STAGED_CHUNKS
from realhf.engine.train import optimizer as optimizer_module
from realhf.engine.train.optimizer import FlatAdamW
from realhf.engine.train.staging import Staging
from tests.unit.engine.streams import Order, Streams

CONFIG = OptimizerConfig(lr=1e-2, weight_decay=0.1, offload_states=True)


def first_of(numbers: tuple[int, ...]) -> Order:
    """Goes on with the first of these streams that can."""
    return lambda able: min(able, key=lambda stream: numbers.index(stream.number))


def drawn(seed: int) -> Order:
    return random.Random(seed).choice


ORDERS = {
    **{f"priorities {numbers}": first_of(numbers) for numbers in itertools.permutations(range(3))},
    **{f"drawn {seed}": drawn(seed) for seed in range(10)},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_in_every_order_of_the_streams_the_steps_are_the_same(
    monkeypatch: pytest.MonkeyPatch, order: Order, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(optimizer_module, "_CPU_CHUNK", 16)
    generator = torch.Generator().manual_seed(2)
    start, gradients = torch.randn(100, generator=generator).to(dtype), torch.randn(3, 100, generator=generator)
    cuts = (41, 1, 58)  # chunks of 16 and less
    here, there = (FlatAdamW(list(start.clone().split(cuts)), CONFIG, total_steps=3) for _ in range(2))
    there._staging = Staging(torch.device("cuda"))
    streams = Streams(order)
    streams.install(monkeypatch)
    for gradient in gradients:
        here.step(gradient.split(cuts), 0.5)
        with streams:
            there.step(gradient.split(cuts), 0.5)
            for kind, vector in here.state.items():
                assert torch.equal(vector, there.state[kind]), "the host may read them as soon as the step has ended"
    assert all(map(torch.equal, here.parameters, there.parameters))
    assert not torch.equal(torch.cat(here.parameters), start)


@pytest.mark.parametrize("number", [1, 2, 3, 8, 9])
def test_copies_of_both_directions_hide_one_another(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """A chunk comes in 10 s, is updated in 1 and goes in 10. The second begins when the first has come."""
    monkeypatch.setattr(optimizer_module, "_CPU_CHUNK", 8)

    def seconds(operator: Any, args: tuple[Any, ...]) -> float:
        return {"copy_": 5.0, "_fused_adamw_": 1.0}.get(operator._opname, 0.0)  # two states

    streams = Streams(first_of((0, 1, 2)), seconds)
    streams.install(monkeypatch)
    optimizer = FlatAdamW([torch.zeros(8 * number)], CONFIG, total_steps=1)
    optimizer._staging = Staging(torch.device("cuda"))
    with streams:
        optimizer.step([torch.ones(8 * number)])
    assert max(stream.clock for stream in streams.all) == number // 2 * 21 + (21 if number % 2 else 10)


def test_buffers_are_as_large_as_what_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(first_of((0, 1, 2)))
    streams.install(monkeypatch)
    staging, sizes = Staging(torch.device("cuda")), []
    for lengths in ((5,), (5, 3), (2, 3, 4, 1, 1)):
        chunks = [{"exp_avg": torch.zeros(length)} for length in lengths]
        sizes.append([len(buffer["exp_avg"]) for buffer in staging._buffers(chunks)])
    assert sizes == [[5], [5, 3], [4, 3]]
    assert STAGED_CHUNKS == 2
