"""The kernels that a GPU takes, against the same on the CPU in float64."""

import pytest
import torch
from torch import Tensor

from realhf.engine.generate.kv_cache import KVCache, PrefillRows, StepAttention
from realhf.engine.generate.paged_attention import DecodeRows, PagedKernels, TorchKernels, paged_kernels
from realhf.models import attention
from realhf.models.attention import PackedAttention
from realhf.models.attention_kernels import Machine, machine

pytestmark = pytest.mark.gpu
LENGTHS = [3, 1, 700, 64, 64, 129]
SHAPES = [(4, 4, 64, None), (12, 2, 128, None), (4, 2, 64, 2), (4, 2, 128, 50), (4, 1, 256, 200)]
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-12}


def without(name: str) -> Machine:
    """This GPU as if a library were not installed."""
    here = machine("cuda")
    changed = {"flash-attn": {"flash_attn": None}, "varlen": {"flash_attn": None, "varlen": frozenset()}, "": {}}
    return Machine(**{**{f: getattr(here, f) for f in here.__dataclass_fields__}, **changed[name]})


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


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "window"), SHAPES)
@pytest.mark.parametrize("is_gathered", [False, True])
def test_steps_over_pages(dtype, heads, kv_heads, head_dim, window, is_gathered):
    """The kernels of the GPU beside gathered pages on the CPU in float64, with page tables of their own."""
    like = torch.empty(0, dtype=dtype, device="cuda")
    taken = TorchKernels() if is_gathered else paged_kernels(like, head_dim)
    torch.manual_seed(0)
    data = [[torch.randn(n + 3, h, head_dim).to(dtype) for h in (heads, kv_heads, kv_heads)] for n in LENGTHS]
    exact = steps(TorchKernels(), data, torch.empty(0, dtype=torch.float64), window)
    for actual, expected in zip(steps(taken, data, like, window), exact, strict=True):
        error = (actual.double().cpu() - expected).norm() / expected.norm()
        assert error < TOLERANCE[dtype]


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
