"""Generation with CUDA graphs on a GPU, against the same kernel by kernel and against the CPU."""

import pytest
import torch

from realhf.api.generation import GenerationOptions
from realhf.architecture.model import DecoderConfig
from realhf.engine.backend import ModelSpec
from realhf.engine.batch import Batch
from realhf.engine.generate.decode_graphs import CudaCapture
from realhf.engine.interface import GenerationOutput, GenerationRequest
from realhf.engine.model import ShardedModel
from tests.unit.engine.losses import ONE_RANK, boxes_of, tiny
from tests.unit.engine.test_generate import assert_same_rollouts

pytestmark = pytest.mark.gpu
SMALL = DecoderConfig(hidden_size=256, intermediate_size=512, num_layers=3, num_heads=4, num_kv_heads=2, vocab_size=300)


def model_on(device: str, config: DecoderConfig, dtype: torch.dtype) -> ShardedModel:
    model = ShardedModel(ModelSpec(config, ONE_RANK, dtype, device))
    model.initialise(0)
    for _, local in boxes_of(model).values():
        if local.ndim == 2:
            local.mul_(4)
    return model


def rollouts(model: ShardedModel, graphs: str, seed: int = 1, **options) -> GenerationOutput:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 300, (21,), generator=generator).tolist()
    prompts = [torch.randint(model.config.vocab_size, (n,), generator=generator) for n in lengths]
    batch = Batch(tuple(range(len(prompts))), {"prompt": prompts}).to(model.parameters.flat.device)
    sampling = GenerationOptions(max_new_tokens=40, eos_token=2, temperature=1.2, decode_graphs=graphs, **options)
    output = model.generate(batch, GenerationRequest(sampling, sample_key=(3, 1)))
    return GenerationOutput(**{f: [x.cpu() for x in getattr(output, f)] for f in GenerationOutput.__dataclass_fields__})


@pytest.mark.parametrize("config", [SMALL, tiny(sliding_window=6, num_kv_heads=2)], ids=["full", "windows"])
@pytest.mark.parametrize("memory", [None, 4096])
def test_float64_gives_the_tokens_of_the_cpu(config, memory):
    """Weights change in place between two calls, which share their graphs."""
    ours, oracle = (model_on(device, config, torch.float64) for device in ("cuda", "cpu"))
    for seed in (1, 2):
        for graphs in ("kept", "off", "kept"):
            expected = rollouts(oracle, "off", seed, kv_cache_tokens=memory)
            assert_same_rollouts(rollouts(ours, graphs, seed, kv_cache_tokens=memory), expected)
        for model in (ours, oracle):
            model.parameters.flat.mul_(1.01)


def test_bfloat16_replays_what_it_computes_kernel_by_kernel():
    """Padding changes the sizes of products, hence roundings; before the first token that differs they are small."""
    model = model_on("cuda", SMALL, torch.bfloat16)
    plain, replayed = rollouts(model, "off"), rollouts(model, "kept")
    for a, b, p, q in zip(plain.sequences, replayed.sequences, plain.logprobs, replayed.logprobs, strict=True):
        start, shortest = len(a) - len(p), min(len(a), len(b))
        differs = (a[:shortest] != b[:shortest]).nonzero().flatten().tolist()
        same = (differs[0] if differs else shortest) - start
        torch.testing.assert_close(p[:same], q[:same], rtol=0, atol=0.1)
    again = rollouts(model, "kept")
    assert all(torch.equal(a, b) for a, b in zip(replayed.sequences, again.sequences, strict=True))


def test_a_third_call_records_nothing(monkeypatch):
    """A bucket of a single step in the first call is recorded in the second."""
    model = model_on("cuda", SMALL, torch.bfloat16)
    for _ in range(2):
        rollouts(model, "kept")

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("recorded again")

    monkeypatch.setattr(CudaCapture, "record", fail)
    rollouts(model, "kept")
