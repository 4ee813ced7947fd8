"""Rollouts whose decode steps attend by the kernel in Triton's interpreter, against those of the CPU's kernels."""

import pytest
import torch

from realhf.api.generation import GenerationOptions
from realhf.engine.batch import Batch
from realhf.engine.generate import paged_attention
from realhf.engine.generate.decode_graphs import DecodeWorkspace
from realhf.engine.generate.loop import generate
from realhf.engine.generate.paged_attention import TritonKernels
from realhf.engine.interface import GenerationRequest
from realhf.gpu import paged_attention as kernel
from tests.unit.engine.captures import EagerCapture
from tests.unit.engine.decoder_boxes import build_decoder, initialise
from tests.unit.engine.losses import ONE_RANK, tiny
from tests.unit.models.flash import IN_INTERPRETER, WITH_TRITON

FAMILIES = {
    "grouped": tiny(num_layers=2, num_kv_heads=2),
    "windows": tiny(num_layers=2, num_kv_heads=1, sliding_window=20, full_attention_layers=(1,)),
    "heads of 80": tiny(num_layers=1, attention_head_dim=80, num_heads=6, num_kv_heads=1),
    "groups of 7": tiny(num_layers=1, attention_head_dim=96, num_heads=7, num_kv_heads=1, qkv_bias=True),
}


@IN_INTERPRETER
@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_tokens_are_those_of_the_cpu(monkeypatch, config):
    """Kernel by kernel, and padded as for graphs. Equal prompts share pages; with little memory some wait."""
    decoder = build_decoder(config, ONE_RANK, torch.float32)
    initialise(decoder, seed=0)
    for parameter in decoder.parameters():
        if parameter.ndim == 2:
            parameter.mul_(8)  # so large that next tokens differ in probability
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 24, (length,), generator=generator) for length in (1, 33, 15, 20)]
    batch = Batch(tuple(range(5)), {"prompt": [*prompts, prompts[1]]})
    options = GenerationOptions(max_new_tokens=7, eos_token=2, temperature=1.3, kv_cache_tokens=128)
    request = GenerationRequest(options, sample_key=(5, 3), micro_batches=1, return_logits=True)
    expected, _ = generate(decoder, batch, request)

    monkeypatch.setattr(paged_attention, "machine", lambda device: WITH_TRITON)
    monkeypatch.setattr(kernel, "SPLIT_TOKENS", 32)
    steps = []
    attend = TritonKernels.attend
    monkeypatch.setattr(TritonKernels, "attend", lambda *given: steps.append(len(given[3])) or attend(*given))
    for workspace in (None, DecodeWorkspace(EagerCapture())):
        steps.clear()
        actual, _ = generate(decoder, batch, request, workspace)
        assert len(steps) > 5
        assert [s.tolist() for s in actual.sequences] == [s.tolist() for s in expected.sequences]
        torch.testing.assert_close(actual.logits, expected.logits, rtol=1e-5, atol=1e-4)
