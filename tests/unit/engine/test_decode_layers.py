"""A decode step with one kernel a layer, against the same step through the layers' modules."""

from dataclasses import replace

import pytest
import torch

from realhf.architecture.model import DecoderConfig
from realhf.engine.generate.decode_layers import decode_layers
from realhf.engine.generate.kv_cache import KVCache, PrefillRows, StepAttention
from realhf.engine.generate.loop import packed_weights
from realhf.engine.generate.paged_attention import DecodeRows
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.models.attention import packed_positions
from realhf.models.decoder import Decoder
from realhf.parallel.groups import ParallelGroups

CONFIG = DecoderConfig(
    hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, vocab_size=50
)  # fmt: skip
CONFIGS = {
    "grouped heads": CONFIG,
    "biased": replace(CONFIG, qkv_bias=True),
    "a window": replace(CONFIG, sliding_window=7),
}
LENGTHS = [5, 17, 31]


def decoder_of(config: DecoderConfig, dtype: torch.dtype) -> Decoder:
    torch.manual_seed(0)
    decoder = Decoder(config, ParallelGroups(Layout(DeviceMesh(0, 1), ParallelStrategy()), 0)).to(dtype)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return decoder


def steps(decoder: Decoder, like: torch.Tensor) -> list[torch.Tensor]:
    """Logits of a prefill and of two decode steps."""
    config = decoder.config
    torch.manual_seed(1)
    cache = KVCache(range(config.num_layers), 9, config.num_kv_heads, config.head_dim, like)
    table = torch.tensor([[4, 0, 0], [7, 2, 0], [1, 8, 5]], dtype=torch.int32)
    positions = packed_positions(LENGTHS)
    rows = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    places = table[rows, positions // 16].long() * 16 + positions % 16
    tokens = torch.randint(config.vocab_size, (sum(LENGTHS),))
    out = [decoder(tokens, positions, StepAttention(cache, None, PrefillRows(LENGTHS, places))).full()]
    for step in range(2):
        lengths = torch.tensor(LENGTHS) + step
        tokens = torch.randint(config.vocab_size, (len(LENGTHS),))
        out.append(decoder(tokens, lengths, StepAttention(cache, DecodeRows(table, lengths), None)).full())
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_steps_are_those_of_the_modules_bit_by_bit(name, dtype):
    decoder = decoder_of(CONFIGS[name], dtype)
    called: list[int] = []
    decoder.model.layers["0"].register_forward_pre_hook(lambda _, inputs: called.append(len(inputs[0])))
    with torch.inference_mode(), packed_weights(decoder):
        assert decoder.infers_layer is not None
        found = steps(decoder, torch.empty(0, dtype=dtype))
        assert called == [sum(LENGTHS)]  # the prefill alone
        decoder.infers_layer = None
        expected = steps(decoder, torch.empty(0, dtype=dtype))
    assert decoder.infers_layer is None
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    "config",
    [
        replace(CONFIG, qk_norm=True),
        replace(CONFIG, mlp_bias=True),
        replace(CONFIG, attention_output_bias=True),
        replace(CONFIG, activation="gelu"),
        replace(CONFIG, norm="layer"),
    ],
    ids=lambda config: f"{config.qk_norm} {config.mlp_bias} {config.activation} {config.norm}",
)
def test_layers_of_other_kinds_keep_their_modules(config):
    decoder = decoder_of(config, torch.float32)
    with packed_weights(decoder):
        assert decoder.infers_layer is None


def test_without_packed_weights_there_is_no_kernel():
    assert decode_layers(decoder_of(CONFIG, torch.float32)) is None
