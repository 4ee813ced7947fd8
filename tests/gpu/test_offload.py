"""Offload on a GPU: asynchronous copies to pinned memory lose no bit, and the device's memory is free meanwhile."""

import pytest
import torch

from realhf.api.experiment import OptimizerConfig
from realhf.architecture.model import DecoderConfig
from realhf.engine.backend import ModelSpec
from realhf.engine.model import ShardedModel
from realhf.engine.residency.offload import HostCopy
from tests.unit.engine.losses import ONE_RANK, next_token_loss, random_batch, trained_tokens

pytestmark = pytest.mark.gpu
CONFIG = DecoderConfig(
    hidden_size=1024, intermediate_size=2048, num_layers=4, num_heads=8, num_kv_heads=8, vocab_size=512
)


def test_training_goes_on_with_the_same_bits_in_memory_that_was_used_meanwhile() -> None:
    batch = random_batch(CONFIG, 8).to("cuda")
    results = []
    for offloads in (False, True):
        model = ShardedModel(
            ModelSpec(
                CONFIG,
                ONE_RANK,
                torch.bfloat16,
                "cuda",
                optimizer=OptimizerConfig(lr=1e-3),
                total_optimizer_steps=4,
            )
        )
        model.initialise(seed=0)
        whole = torch.cuda.memory_allocated()
        for _ in range(4):
            if offloads:
                model.residency.offload()
                # Taken from the memory that is being given back, and written over and over.
                others = [torch.full((2**20,), 7.0, device="cuda") for _ in range(64)]
                assert torch.cuda.memory_allocated() < whole
                del others
                model.residency.load()
            model.train_step(batch, "tokens", next_token_loss, trained_tokens, micro_batches=2)
        assert model.trainer is not None
        results.append([v.cpu() for v in (model.parameters.flat, *model.trainer.optimizer.state.values())])
        if offloads:
            before = torch.cuda.memory_allocated()
            model.residency.offload()
            held = sum(v.nbytes for v in (model.parameters.gradient, model.parameters.flat))
            assert before - torch.cuda.memory_allocated() >= held
        del model
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_pinned_memory_is_of_the_size_of_the_vectors() -> None:
    """As torch counts it after rounding up; one block for the first vector would be of 512 MiB."""
    mib = 2**20
    vectors = [
        torch.arange(65 * mib + 3, dtype=torch.float32, device="cuda"),
        torch.arange(5 * mib - 1, device="cuda").bfloat16(),
    ]
    values = [vector.cpu() for vector in vectors]
    size_bytes = sum(vector.nbytes for vector in vectors)
    torch.accelerator.empty_host_cache()  # what others gave back is not to be counted as taken again
    before = torch.cuda.memory.host_memory_stats()["allocated_bytes.current"]
    waiting = HostCopy(vectors)
    waiting.offload()
    taken = torch.cuda.memory.host_memory_stats()["allocated_bytes.current"] - before
    assert size_bytes <= taken < 1.03 * size_bytes
    waiting.load()
    assert all(torch.equal(vector.cpu(), value) for vector, value in zip(vectors, values, strict=True))
