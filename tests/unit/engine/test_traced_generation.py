"""The planner's bytes of decode steps on a GPU against a trace of the engine's tensors on `meta`."""

import math
from typing import Any

import pytest
import torch

from benchmarks.lib.peak_memory import PeakMemory
from realhf.architecture.model import DTYPE_BYTES, DecoderConfig, DType
from realhf.architecture.named import ARCHITECTURES
from realhf.engine.generate.sampling import Truncation, draw
from realhf.gpu import paged_attention
from realhf.planning.model.gpu_generation import DrawOptions, split_bytes

META, MOST = torch.device("meta"), 1.05  # times the trace


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("vocab", [32000, 50257, 151936])
@pytest.mark.parametrize("min_new_tokens", [0, 4])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (50, 1.0), (0, 0.9), (50, 0.9)])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_draws(temperature: float, top_k: int, top_p: float, min_new_tokens: int, vocab: int, dtype: DType) -> None:
    options = DrawOptions(temperature=temperature, top_k=top_k, top_p=top_p, min_new_tokens=min_new_tokens)
    rows = 256
    with PeakMemory() as memory:
        forbidden = torch.empty(rows, dtype=torch.int64, device=META) if min_new_tokens else None
        logits = torch.empty(rows, vocab, dtype=getattr(torch, dtype), device=META)
        uniforms = torch.empty(rows, dtype=torch.float64, device=META)
        draw(logits, uniforms, temperature, Truncation(top_k=top_k, top_p=top_p, forbidden=forbidden))
    assert memory.peak_bytes <= options.drawing_bytes(rows, vocab, dtype) <= MOST * memory.peak_bytes


def test_options_of_a_call() -> None:
    class Options:
        temperature, top_k = 0.5, 3

    assert DrawOptions.of(Options()) == DrawOptions(temperature=0.5, top_k=3)
    assert DrawOptions.of(object()) == DrawOptions()


class Launch:
    """Stands for a kernel: its tensors are there, and nothing runs."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **constants: None


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("rows", "tokens"), [(256, 16384), (8, 512), (1, 513), (3, 5000)])
@pytest.mark.parametrize("is_graph", [False, True])
def test_attention_in_splits(
    is_graph: bool, rows: int, tokens: int, dtype: DType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_attention, "attend_split", Launch())
    monkeypatch.setattr(paged_attention, "join_splits", Launch())
    model = ARCHITECTURES["qwen2.5-1.5b"]
    planned = split_bytes(model, dtype, 1, rows, tokens, is_graph=is_graph)
    pages = math.ceil(tokens / 16)
    if is_graph:  # by hand: rows and pages of a table in buckets
        rows, pages = {256: 256, 8: 8, 1: 1, 3: 4}[rows], {1024: 1024, 32: 32, 33: 64, 313: 512}[pages]
    assert planned == traced_attention(model, dtype, rows, pages)


def traced_attention(model: DecoderConfig, dtype: DType, rows: int, pages: int) -> int:
    """The bytes that attention takes beside its result."""
    like: dict[str, Any] = {"dtype": getattr(torch, dtype), "device": META}
    q, kv = (torch.empty(rows, heads, model.head_dim, **like) for heads in (model.num_heads, model.num_kv_heads))
    cache = torch.empty(2, model.num_kv_heads, 16, model.head_dim, **like)
    table, lengths = (torch.empty(shape, dtype=torch.int32, device=META) for shape in ((rows, pages), (rows,)))
    with PeakMemory() as memory:
        paged_attention.attend((cache, cache), table, lengths, q, kv, kv, None)
    return memory.peak_bytes - rows * model.num_heads * model.head_dim * DTYPE_BYTES[dtype]
