"""The products of a layer on a GPU, counted in traces without values (`meta`)."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from realhf.api.experiment import OptimizerConfig
from realhf.architecture.compute import Recomputation
from realhf.architecture.model import DecoderConfig
from realhf.engine.backend import ModelSpec
from realhf.engine.generate.kv_cache import KVCache, StepAttention
from realhf.engine.generate.paged_attention import DecodeRows
from realhf.engine.model import ShardedModel
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.models.decoder import Decoder
from realhf.models.recomputation import run_layer
from realhf.models.rotary import rotary_tables
from realhf.parallel.groups import GroupTable
from realhf.parallel.views import storage_id
from tests.unit.engine.fake_ranks import as_rank

META, ROWS, LAYERS = torch.device("meta"), 16, 3
PLAIN = DecoderConfig(
    hidden_size=128, intermediate_size=320, num_layers=LAYERS, num_heads=4, num_kv_heads=2, vocab_size=64
)
CONFIGS = {
    "llama": PLAIN,
    "qwen2": replace(PLAIN, qkv_bias=True),
    "qwen3": replace(PLAIN, qk_norm=True),
    "biased": replace(PLAIN, qkv_bias=True, mlp_bias=True, attention_output_bias=True, activation="gelu_tanh"),
}
PRODUCTS = {"mm", "addmm"}
OF_WEIGHTS = {*PRODUCTS, "mul", "add"}


class Operations(TorchDispatchMode):
    """Counts operations: all of them, those that make tensors from `vector`, those that write it, and joined gradients
    that are made by copies."""

    def __init__(self, vector: Tensor):
        super().__init__()
        self.vector, self.all, self.reading, self.writing = storage_id(vector), Counter[str](), Counter[str](), 0
        self.widest_cat = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.all[name] += 1
        reads = any(self._is_of_vector(leaf) for leaf in tree_leaves((args, kwargs)))
        is_view = any(self._is_of_vector(leaf) for leaf in tree_leaves(result))
        if reads and not is_view:
            self.reading[name] += 1
        self.writing += name.endswith("_") and is_view and name not in ("detach_", "requires_grad_")
        if name == "cat":
            self.widest_cat = max(self.widest_cat, result.shape[-1])
        return result

    def _is_of_vector(self, leaf: object) -> bool:
        return isinstance(leaf, Tensor) and storage_id(leaf) == self.vector

    @property
    def products(self) -> int:
        return sum(self.all[name] for name in PRODUCTS)


def model_of(config: DecoderConfig, tp: int = 1) -> ShardedModel:
    strategy = ParallelStrategy(tp=tp)
    layout = Layout(DeviceMesh(0, tp), strategy)
    with as_rank(0, tp):
        groups = GroupTable([layout], 0).groups(layout)
        return ShardedModel(ModelSpec(config, groups, torch.bfloat16, META, optimizer=OptimizerConfig()))


def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """Without products."""
    return q + (k + v).repeat_interleave(q.shape[1] // k.shape[1], dim=1)


def through_layers(decoder: Decoder, x: Tensor, attention: Any, recomputation: Recomputation = "off") -> Tensor:
    cos, sin = rotary_tables(torch.zeros(len(x), dtype=torch.int64, device=META), decoder.config, x.dtype)
    for layer in decoder.model.layers.values():
        x = run_layer(recomputation, layer, x, cos, sin, attention)
    return x


@pytest.mark.parametrize("recomputation", ["off", "selective", "full"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_training_has_four_products_a_layer_and_eight_backward(name: str, recomputation: Recomputation) -> None:
    config = CONFIGS[name]
    model = model_of(config)
    x = torch.zeros(ROWS, config.hidden_size, dtype=torch.bfloat16, device=META, requires_grad=True)
    with Operations(model.parameters.flat) as forward:
        out = through_layers(model.decoder, x, attend, recomputation)
    with Operations(model.parameters.gradient) as backward:
        out.backward(torch.zeros_like(out))
    assert forward.products == 4 * LAYERS
    # A layer that runs again ends before its last product.
    assert backward.products == (11 if recomputation == "full" else 8) * LAYERS
    assert set(forward.reading) <= OF_WEIGHTS, "no weight is copied"
    # q, k and v; gate and up; and every other parameter: each is added to the vector of gradients once.
    added = sum(1 for each in model.decoder.model.layers.parameters()) - 3 * LAYERS
    added -= LAYERS * 2 * config.qkv_bias + LAYERS * config.mlp_bias
    assert backward.writing == added
    assert backward.widest_cat == config.query_size + 2 * config.kv_size, "that of gate and up is made as one"


@pytest.mark.parametrize("name", CONFIGS)
def test_a_decode_step_has_four_products_a_layer(name: str) -> None:
    model = model_of(CONFIGS[name])
    config, like = model.config, model.parameters.flat
    cache = KVCache(range(LAYERS), 2, config.num_kv_heads, config.head_dim, like)
    rows = DecodeRows(*(torch.zeros(shape, dtype=torch.int64, device=META) for shape in ((ROWS, 1), (ROWS,))))
    x = torch.zeros(ROWS, config.hidden_size, dtype=torch.bfloat16, device=META)
    with torch.no_grad(), Operations(like) as decode:
        through_layers(model.decoder, x, StepAttention(cache, rows, None))
    assert decode.products == 4 * LAYERS
    assert set(decode.reading) <= OF_WEIGHTS


def test_shards_with_padding_in_between_are_multiplied_alone() -> None:
    """Of two tensor-parallel ranks each has 21 rows of gate and of up, of 65 numbers: no whole blocks of 64."""
    config = replace(PLAIN, hidden_size=65, intermediate_size=42, attention_head_dim=64)
    model = model_of(config, tp=2)
    x = torch.zeros(ROWS, config.hidden_size, dtype=torch.bfloat16, device=META)
    with torch.no_grad(), as_rank(0, 2), Operations(model.parameters.flat) as forward:
        through_layers(model.decoder, x, attend)
    assert forward.products == 5 * LAYERS
