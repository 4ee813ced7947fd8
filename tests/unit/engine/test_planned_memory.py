"""The planner's bytes against what the engine really allocates."""

from dataclasses import replace

import pytest
import torch

from realhf.api.compute import ComputeConfig
from realhf.api.experiment import OptimizerConfig
from realhf.api.generation import GenerationOptions
from realhf.engine.batch import Batch
from realhf.engine.build import build_decoder
from realhf.engine.generate import generate_and_report, packed_weights
from realhf.engine.interface import Stats
from realhf.engine.memory import PeakMemory
from realhf.engine.model import ShardedModel
from realhf.engine.paged_attention import CppKernels, FlashKernels, TorchKernels, paged_kernel
from realhf.parallel.tensor import ColumnParallelLinear, RowParallelLinear
from realhf.parallel.vocabulary import Logits
from realhf.search.features import ENGINE
from realhf.search.hardware import load_hardware
from realhf.search.memory import cache_bytes, linear_elements, selective_elements
from tests.unit.engine.losses import ONE_RANK, next_token_loss, random_batch, tiny, trained_tokens
from tests.unit.models import flash

ONE = ONE_RANK.layout.strategy


@pytest.mark.parametrize("new_tokens", [12, 13, 14])
def test_the_cache(new_tokens: int) -> None:
    """In pages of 16: a prompt of 20 tokens and 12 more fill two of them."""
    config = tiny(num_kv_heads=2)
    decoder = build_decoder(config, ONE_RANK, torch.float32)
    batch = Batch((0, 1, 2), {"prompt": [torch.arange(20)] * 3})
    options = GenerationOptions(max_new_tokens=new_tokens, eos_token=-1)
    _, report = generate_and_report(decoder, batch, "prompt", options, sample_key=(0, 0), micro_batches=1)
    assert report.cache_bytes == 3 * cache_bytes(config, ONE, "float32", 20 + new_tokens)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "tokens"), [("bfloat16", 128, 256), ("bfloat16", 36, 16), ("float32", 128, 16)]
)
def test_pages_are_those_of_the_kernel_that_is_taken(dtype: str, head_dim: int, tokens: int) -> None:
    """Of flash-attn 256 tokens, and on GPUs that is planned for wherever it may be taken."""
    machine = replace(flash.HOPPER, flash_attn=(2, 8))
    chosen = paged_kernel(machine, getattr(torch, dtype), head_dim, has_cpp=True)
    page = FlashKernels.page if chosen == "flash-attn" else TorchKernels().page
    config = tiny(hidden_size=4 * head_dim)
    on_gpu, on_cpu = (ENGINE.on(load_hardware(name)) for name in ("h100", "cpu"))
    assert on_gpu.page_tokens(config, dtype) == page == tokens
    assert on_cpu.page_tokens(config, dtype) == CppKernels.page == 16


@pytest.mark.parametrize("changes", [{}, {"tied_embeddings": True}, {"mlp": "plain", "qkv_bias": True}], ids=str)
def test_the_weights_that_are_packed(changes: dict) -> None:
    config = tiny(num_kv_heads=2, **changes)
    decoder = build_decoder(config, ONE_RANK, torch.float32)
    modules = list(decoder.modules())
    joined = [m.joined for m in modules if hasattr(m, "joined")]
    alone = [m for m in modules if isinstance(m, ColumnParallelLinear | RowParallelLinear)]
    with packed_weights(decoder):
        packed = [m.weight for m in alone if m.packed is not None]
        packed += [m.weight for group in joined if group.packed is not None for m in group.linears]
        assert sum(weight.numel() for weight in packed) == linear_elements(config, ONE)
    assert all(m.packed is None for m in (*alone, *joined))


def test_what_selective_recomputation_keeps() -> None:
    config = tiny(num_layers=6, num_kv_heads=2)
    batch = random_batch(config, 4, lengths=(60, 70))
    tokens = sum(map(len, batch.data["tokens"]))
    compute, memory, live = ComputeConfig(recomputation="selective"), PeakMemory(), []
    model = ShardedModel(config, ONE_RANK, torch.float64, optimizer=OptimizerConfig(), compute=compute)
    model.initialise(seed=0)

    def loss(output: Logits, part: Batch) -> tuple[torch.Tensor, Stats]:
        live.append(memory.live_bytes)
        return next_token_loss(output, part)

    with memory:
        model.train_step(batch, "tokens", loss, trained_tokens, micro_batches=1)
    kept = live[0] / (8 * tokens * config.num_layers)
    planned = selective_elements(config, 1)
    assert planned < kept < planned + 30  # of all layers together: rotary tables and what the head has
