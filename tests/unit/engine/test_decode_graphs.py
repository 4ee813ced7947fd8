"""Decode steps padded to buckets and replayed over buffers that stay, against the same generation without."""

import pytest
import torch

from realhf.api.generation import GenerationOptions
from realhf.architecture.decoding import graphs_refusal
from realhf.architecture.model import DecoderConfig, Experts
from realhf.base.errors import UserError
from realhf.engine.backend import ModelSpec
from realhf.engine.batch import Batch
from realhf.engine.build import build_decoder, initialise
from realhf.engine.generate import paged_attention
from realhf.engine.generate.decode_graphs import DecodeWorkspace, capture_of, power_of_two, rows_bucket
from realhf.engine.generate.loop import generate
from realhf.engine.interface import GenerationRequest
from realhf.engine.model import ShardedModel
from realhf.models.decoder import Decoder
from tests.unit.engine.captures import EagerCapture, TracedCapture
from tests.unit.engine.losses import ONE_RANK, tiny
from tests.unit.engine.test_generate import KEY, assert_same_rollouts

FAMILIES = {
    "grouped": tiny(num_layers=2, num_kv_heads=2),
    "windows": tiny(num_layers=2, sliding_window=6, full_attention_layers=(1,)),
    "learned positions": tiny(num_layers=2, positions="learned", max_positions=64, norm="layer", mlp="plain"),
    "tied and scaled": tiny(num_layers=2, tied_embeddings=True, scale_embeddings=True, norm="rms_plus_one"),
}


def test_buckets_by_hand():
    rows = (1, 2, 3, 4, 5, 8, 9, 16, 17, 100, 128, 129, 160, 161)
    assert [rows_bucket(n) for n in rows] == [1, 2, 4, 4, 8, 8, 16, 16, 24, 104, 128, 160, 160, 192]
    assert [power_of_two(n) for n in (1, 2, 3, 4, 5, 9)] == [1, 2, 4, 4, 8, 16]


def test_what_is_not_captured():
    assert graphs_refusal(tiny(), on_gpu=True) is None
    assert "host" in (graphs_refusal(tiny(experts=Experts(count=4, per_token=2)), on_gpu=True) or "")
    assert graphs_refusal(tiny(), on_gpu=False) == "a CPU has no graphs"
    assert capture_of(decoder_of(tiny()), "kept") is None
    with pytest.raises(UserError, match="decode_graphs='on' is not known; choose one of kept, call, off"):
        GenerationOptions(max_new_tokens=1, eos_token=-1, decode_graphs="on")


def decoder_of(config: DecoderConfig) -> Decoder:
    decoder = build_decoder(config, ONE_RANK, torch.float64)
    initialise(decoder, seed=0)
    for parameter in decoder.parameters():
        if parameter.ndim == 2:
            parameter.mul_(8)  # so large that next tokens differ in probability
    return decoder


def batch_of(samples: int, longest: int = 20, seed: int = 1) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (samples,), generator=generator).tolist()
    return Batch(tuple(range(samples)), {"prompt": [torch.randint(3, 24, (n,), generator=generator) for n in lengths]})


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize(("kernels", "memory"), [("C++", None), ("torch", 160)])
def test_the_rollouts_are_those_without_graphs(monkeypatch, kernels, config, memory):
    """Rows end at different times, so that buckets shrink; with little memory some wait, and steps with prompts among
    them are computed as they are."""
    if kernels == "torch":
        monkeypatch.setattr(paged_attention, "_kernels", None)
    decoder, batch, capture = decoder_of(config), batch_of(13), EagerCapture()
    options = GenerationOptions(max_new_tokens=24, eos_token=2, temperature=1.3, kv_cache_tokens=memory)
    arguments = {"sample_key": KEY, "micro_batches": 1, "return_logits": True}
    expected = generate(decoder, batch, GenerationRequest(options, **arguments))[0]
    actual, report = generate(decoder, batch, GenerationRequest(options, **arguments), DecodeWorkspace(capture))
    assert_same_rollouts(actual, expected)
    torch.testing.assert_close(actual.logits, expected.logits, rtol=0, atol=1e-9)
    assert 1 < capture.captures < capture.replays
    assert capture.replays > report.steps // 3
    assert len({len(x) for x in actual.logprobs}) > 3


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_recorded_operators_are_all_that_is_needed(monkeypatch, config):
    """Nothing of a step is read on the host or decided by Python. A kernel in C++ cannot be recorded here."""
    monkeypatch.setattr(paged_attention, "_kernels", None)
    decoder, batch, capture = decoder_of(config), batch_of(3), TracedCapture()
    options = GenerationOptions(max_new_tokens=5, eos_token=-1)
    arguments = {"sample_key": KEY, "micro_batches": 1}
    expected = generate(decoder, batch, GenerationRequest(options, **arguments))[0]
    actual = generate(decoder, batch, GenerationRequest(options, **arguments), DecodeWorkspace(capture))[0]
    assert_same_rollouts(actual, expected)
    assert (capture.captures, capture.replays) == (2, 4)  # the table grows to two pages


def test_buffers_and_graphs_are_kept_between_calls():
    """The parameters change in place, as training and reallocation change them."""
    decoder = decoder_of(FAMILIES["grouped"])
    options = GenerationOptions(max_new_tokens=24, eos_token=-1, temperature=1.3)
    capture = EagerCapture()
    workspace = DecodeWorkspace(capture)

    def call(batch: Batch) -> int:
        """How many graphs it made."""
        before = capture.captures
        arguments = {"sample_key": KEY, "micro_batches": 1}
        actual = generate(decoder, batch, GenerationRequest(options, **arguments), workspace)[0]
        assert_same_rollouts(actual, generate(decoder, batch, GenerationRequest(options, **arguments))[0])
        return capture.captures - before

    assert call(batch_of(9)) == 1
    for parameter in decoder.parameters():
        parameter.mul_(1.01)
    assert call(batch_of(9, seed=2)) == 0
    assert call(batch_of(3)) == 1  # fewer rows, of another bucket
    assert call(batch_of(12)) == 1  # more pages than there are
    assert call(batch_of(9)) == 0  # padded to the same 16 rows
    decoder.lm_head.weight.data = decoder.lm_head.weight.data.clone()
    assert call(batch_of(9)) == 1  # a graph reads what lies at the old address


def test_a_model_keeps_them_as_long_as_it_is_asked_to():
    model = ShardedModel(ModelSpec(tiny(), ONE_RANK, torch.float32))
    model.initialise(0)
    spaces = []
    for graphs in ("kept", "kept", "call", "kept"):
        options = GenerationOptions(max_new_tokens=4, eos_token=-1, decode_graphs=graphs)
        model.generate(batch_of(3), GenerationRequest(options, sample_key=KEY))
        spaces.append(model._kept.workspace)
    first, second, none, new = spaces
    assert first is second is not None
    assert none is None
    assert new is not None
    assert new is not first
    model.residency.free()
    assert model._kept.workspace is None  # their pages go with the parameters
