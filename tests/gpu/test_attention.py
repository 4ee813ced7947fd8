"""The kernels that a GPU takes, against the same on the CPU in float64."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from realhf.engine.generate.kv_cache import KVCache, PrefillRows, StepAttention
from realhf.engine.generate.paged_attention import (
    DecodeRows,
    FlashKernels,
    LayerPages,
    PagedKernels,
    TorchKernels,
    TritonKernels,
    paged_kernels,
)
from realhf.models import attention
from realhf.models.attention import PackedAttention
from realhf.models.attention_kernels import Machine, machine

pytestmark = pytest.mark.gpu
LENGTHS = [3, 1, 700, 64, 64, 129]
SHAPES = [(4, 4, 64, None), (12, 2, 128, None), (4, 2, 64, 2), (4, 2, 128, 50), (4, 1, 256, 200)]
ODD_SHAPES = [(12, 2, 80, None), (7, 1, 96, 100), (14, 1, 36, None)]
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-12}


def without(name: str) -> Machine:
    """This GPU as if a library were not installed."""
    changed = {"flash-attn": {"flash_attn": None}, "varlen": {"flash_attn": None, "varlen": frozenset()}, "": {}}
    return replace(machine("cuda"), **changed[name])


@pytest.mark.parametrize("missing", ["", "flash-attn", "varlen"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "window"), SHAPES)
def test_packed_attention_and_its_gradients(monkeypatch, missing, dtype, heads, kv_heads, head_dim, window):
    torch.manual_seed(0)
    rounded = [torch.randn(sum(LENGTHS), h, head_dim).to(dtype) for h in (heads, kv_heads, kv_heads)]
    upstream = torch.randn(sum(LENGTHS), heads, head_dim).to(dtype)
    exact = run(rounded, upstream, torch.float64, "cpu", window)
    here = without(missing)
    monkeypatch.setattr(attention, "machine", lambda _: here)
    for actual, expected in zip(run(rounded, upstream, dtype, "cuda", window), exact, strict=True):
        error = (actual.double().cpu() - expected).norm() / expected.norm()
        assert error < TOLERANCE[dtype]


def run(data: list[Tensor], upstream: Tensor, dtype: torch.dtype, device: str, window: int | None) -> list[Tensor]:
    leaves = [x.to(device, dtype, copy=True).requires_grad_() for x in data]
    out = PackedAttention(LENGTHS)(0, *leaves, window)
    return [out.detach(), *torch.autograd.grad((out * upstream.to(device, dtype)).sum(), leaves)]


def test_gradients_are_the_same_in_every_run():
    if machine("cuda").flash_attn is None:
        pytest.skip("only flash-attn promises that")
    torch.manual_seed(0)
    data = [torch.randn(sum(LENGTHS), h, 128).bfloat16() for h in (12, 2, 2)]
    first, second = (run(data, data[0], torch.bfloat16, "cuda", None) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_triton_works_here():
    """Unless it is left out: without it decode is many times slower."""
    assert isinstance(paged_kernels(torch.empty(0, dtype=torch.bfloat16, device="cuda"), 128), TritonKernels)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "window"), [*SHAPES, *ODD_SHAPES])
@pytest.mark.parametrize("kernels", [TritonKernels(), FlashKernels(), TorchKernels()], ids=lambda x: type(x).__name__)
def test_steps_over_pages(kernels, dtype, heads, kv_heads, head_dim, window):
    """Each kernel that the GPU has, beside gathered pages on the CPU in float64, with page tables of their own."""
    here = machine("cuda")
    is_there = {
        TritonKernels: here.runs_triton(dtype, head_dim),
        FlashKernels: here.flash_attn is not None and here.runs_flash(dtype, head_dim),
    }
    if not is_there.get(type(kernels), True):
        pytest.skip("not installed, or not for such heads")
    like = torch.empty(0, dtype=dtype, device="cuda")
    torch.manual_seed(0)
    data = [[torch.randn(n + 3, h, head_dim).to(dtype) for h in (heads, kv_heads, kv_heads)] for n in LENGTHS]
    exact = steps(TorchKernels(), data, torch.empty(0, dtype=torch.float64), window)
    for actual, expected in zip(steps(kernels, data, like, window), exact, strict=True):
        error = (actual.double().cpu() - expected).norm() / expected.norm()
        assert error < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_depends_on_neither_its_company_nor_the_width_of_the_table(dtype):
    """Bit by bit, by our kernel."""
    kernels, lengths, width = TritonKernels(), [1100, 20, 512, 513], 70
    torch.manual_seed(0)
    shapes = kernels.page_shapes(2, 128)
    pages = LayerPages(*(torch.randn(4 * width, *shape, device="cuda").to(dtype) for shape in shapes))
    table = torch.randperm(4 * width, device="cuda").view(4, width).int()
    query, key, value = (torch.randn(4, h, 128, device="cuda").to(dtype) for h in (14, 2, 2))
    cached = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    together = kernels.attend(pages, DecodeRows(table, cached), query, key, value, None)
    for row, length in enumerate(lengths):
        own = slice(row, row + 1)
        rows = DecodeRows(table[own, : length // 16 + 1], cached[own])
        assert torch.equal(kernels.attend(pages, rows, query[own], key[own], value[own], None)[0], together[row])


@torch.inference_mode()
def steps(kernels: PagedKernels, data: list[list[Tensor]], like: Tensor, window: int | None) -> list[Tensor]:
    """What three tokens behind each of `LENGTHS` give."""
    page = kernels.page
    width = (max(LENGTHS) + 3) // page + 1
    generator = torch.Generator().manual_seed(page)
    table = torch.randperm(width * len(LENGTHS), generator=generator).view(len(LENGTHS), width)
    heads, head_dim = data[0][1].shape[1:]
    cache = KVCache(range(1), table.numel(), heads, head_dim, like, kernels)
    rows = [torch.cat([own[part][:n] for own, n in zip(data, LENGTHS, strict=True)]).to(like) for part in range(3)]
    places = torch.cat(
        [table[i, torch.arange(n) // page] * page + torch.arange(n) % page for i, n in enumerate(LENGTHS)]
    )
    StepAttention(cache, None, PrefillRows(LENGTHS, places.to(like.device)))(0, *rows, window)
    outputs = []
    for step in range(3):
        lengths = torch.tensor([n + step for n in LENGTHS], dtype=kernels.lengths_dtype, device=like.device)
        new = [torch.stack([o[p][n + step] for o, n in zip(data, LENGTHS, strict=True)]).to(like) for p in range(3)]
        decode = DecodeRows(table.to(like.device, torch.int32), lengths)
        outputs.append(StepAttention(cache, decode, None)(0, *new, window))
    return outputs
