"""Recomputation: the same gradients to the last bit, from less memory."""

import pytest
import torch

from benchmarks.lib.peak_memory import PeakMemory
from realhf.api.experiment import OptimizerConfig
from realhf.architecture.compute import Computation
from realhf.base.errors import UserError
from realhf.engine.backend import ModelSpec
from realhf.engine.batch import Batch
from realhf.engine.interface import Stats
from realhf.engine.model import ShardedModel
from realhf.parallel.vocabulary import Logits
from tests.unit.engine.losses import ONE_RANK, next_token_loss, random_batch, tiny, trained_tokens

CONFIG = tiny(num_layers=6, num_kv_heads=2)


def made(recomputation: str, dtype: torch.dtype, layers: int | None = None) -> ShardedModel:
    compute = Computation(recomputation=recomputation, recomputed_layers=layers)
    model = ShardedModel(ModelSpec(CONFIG, ONE_RANK, dtype, optimizer=OptimizerConfig(), compute=compute))
    model.initialise(seed=0)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_gradients_are_the_same_bits(dtype: torch.dtype) -> None:
    batch, gradients = random_batch(CONFIG, 6), {}
    for recomputation in ("off", "selective", "full"):
        model = made(recomputation, dtype)
        model.train_step(batch, "tokens", next_token_loss, trained_tokens, micro_batches=2)
        gradients[recomputation] = model.parameters.gradient
    assert gradients["off"].norm() > 0
    assert torch.equal(gradients["selective"], gradients["off"])
    assert torch.equal(gradients["full"], gradients["off"])


@pytest.mark.parametrize("recomputation", ["selective", "full"])
def test_gradients_are_the_same_bits_whatever_the_number_of_layers(recomputation: str) -> None:
    batch, gradients, runs = random_batch(CONFIG, 6), [], []
    for layers in (None, 0, 1, 5, 6):
        model, forwards = made(recomputation, torch.float32, layers), []
        for number, layer in model.decoder.model.layers.items():
            layer.register_forward_pre_hook(lambda *_, number=number, forwards=forwards: forwards.append(int(number)))
        model.train_step(batch, "tokens", next_token_loss, trained_tokens, micro_batches=1)
        gradients.append(model.parameters.gradient)
        runs.append({number: forwards.count(number) for number in range(6)})
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)
    assert runs[0] == runs[4] == dict.fromkeys(range(6), 2)
    assert runs[1] == dict.fromkeys(range(6), 1)
    assert runs[2] == {0: 2} | dict.fromkeys(range(1, 6), 1)
    assert runs[3] == dict.fromkeys(range(5), 2) | {5: 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_less_is_kept_for_the_backward_pass(dtype: torch.dtype) -> None:
    batch = random_batch(CONFIG, 4, lengths=(60, 70))
    tokens = sum(map(len, batch.data["tokens"]))
    kept = {}
    for recomputation in ("off", "selective", "full"):
        model, memory, live = made(recomputation, dtype), PeakMemory(), []

        def loss(output: Logits, part: Batch, memory=memory, live=live) -> tuple[torch.Tensor, Stats]:
            live.append(memory.live_bytes)
            return next_token_loss(output, part)

        with memory:
            model.train_step(batch, "tokens", loss, trained_tokens, micro_batches=1)
        kept[recomputation] = live[0] / (dtype.itemsize * tokens * CONFIG.num_layers)  # elements a token and layer
    # A layer's input has 32; all layers share the rotary tables and what the head has.
    assert 32 <= kept["full"] < 32 + 30
    # Of norms and MLPs in one kernel each it lacks the outputs alone: two of 32, and one of 48.
    assert kept["full"] + 100 < kept["selective"] <= kept["off"] - (2 * 32 + 48), kept


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(UserError, match="recomputation='some' is not known; choose one of off, selective, full"):
        Computation(recomputation="some")


def test_a_number_of_layers_that_says_nothing_is_refused() -> None:
    with pytest.raises(UserError, match=r"recomputed_layers=2 with recomputation='off': .* leave it out"):
        Computation(recomputed_layers=2)
    with pytest.raises(UserError, match="recomputed_layers=-1 with recomputation='full'"):
        Computation(recomputation="full", recomputed_layers=-1)
