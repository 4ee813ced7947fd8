"""Recomputation: the same gradients to the last bit, from less memory."""

import pytest
import torch

from realhf.api.experiment import OptimizerConfig
from realhf.architecture.compute import ComputeConfig
from realhf.base.errors import UserError
from realhf.engine.backend import ModelSpec
from realhf.engine.batch import Batch
from realhf.engine.interface import Stats
from realhf.engine.model import ShardedModel
from realhf.engine.tensor_bytes import PeakMemory
from realhf.parallel.vocabulary import Logits
from tests.unit.engine.losses import ONE_RANK, next_token_loss, random_batch, tiny, trained_tokens

CONFIG = tiny(num_layers=6, num_kv_heads=2)


def made(recomputation: str, dtype: torch.dtype) -> ShardedModel:
    compute = ComputeConfig(recomputation=recomputation)
    model = ShardedModel(ModelSpec(CONFIG, ONE_RANK, dtype, optimizer=OptimizerConfig(), compute=compute))
    model.initialise(seed=0)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_gradients_are_the_same_bits(dtype: torch.dtype) -> None:
    batch, gradients = random_batch(CONFIG, 6), {}
    for recomputation in ("off", "selective", "full"):
        model = made(recomputation, dtype)
        model.train_step(batch, "tokens", next_token_loss, trained_tokens, micro_batches=2)
        gradients[recomputation] = model.parameters.gradients.flat
    assert gradients["off"].norm() > 0
    assert torch.equal(gradients["selective"], gradients["off"])
    assert torch.equal(gradients["full"], gradients["off"])


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
        ComputeConfig(recomputation="some")
