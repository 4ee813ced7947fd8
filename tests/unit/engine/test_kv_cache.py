"""Attention over pages, by each kernel, against plain attention of each sequence in float64."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from realhf.architecture.decoding import PAGE_TOKENS as PAGE
from realhf.engine.generate import kv_cache, paged_attention
from realhf.engine.generate.kv_cache import KVCache, PrefillRows, StepAttention
from realhf.engine.generate.paged_attention import (
    CppKernels,
    DecodeRows,
    FlashKernels,
    LayerPages,
    TorchKernels,
    TritonKernels,
    describe_attention,
    missing_kernels,
    paged_kernel,
    paged_kernels,
)
from realhf.models.attention_kernels import Lack, Machine
from tests.unit.models import flash
from tests.unit.models.flash import WITH_TRITON

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}
LAYERS = range(3, 5)
TRITON = pytest.param("triton", marks=flash.IN_INTERPRETER)


@pytest.fixture(params=["cpp", "torch", TRITON])
def kernels(request, monkeypatch):
    match request.param:
        case "cpp":
            assert paged_attention._kernels is not None, "the C++ modules are not built"
        case "torch":
            monkeypatch.setattr(paged_attention, "_kernels", None)
        case "triton":
            monkeypatch.setattr(paged_attention, "machine", lambda _: WITH_TRITON)


def plain(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """Causal attention of one sequence [tokens, heads, head_dim] in float64, one token and head at a time."""
    out = torch.zeros_like(query, dtype=torch.float64)
    group = query.shape[1] // key.shape[1]
    for t in range(len(query)):
        first = 0 if window is None else max(0, t + 1 - window)
        for h in range(query.shape[1]):
            k, v = (x[first : t + 1, h // group].double() for x in (key, value))
            weights = (k @ query[t, h].double() / query.shape[2] ** 0.5).softmax(0)
            out[t, h] = weights @ v
    return out


@pytest.mark.parametrize(
    ("kernels", "dtype"),
    [
        *((kind, dtype) for dtype in TOLERANCE for kind in ("cpp", "torch")),
        # It knows no float64, and the interpreter multiplies the bits of bfloat16 as whole numbers.
        pytest.param("triton", torch.float32, marks=flash.IN_INTERPRETER),
    ],
    indirect=["kernels"],
)
@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "window"),
    [(2, 1, 8, None), (1, 4, 64, None), (2, 2, 16, 5), (1, 1, 2, 1), (2, 1, 80, 20), (1, 3, 7, None), (1, 14, 96, 9)],
)
def test_steps_attend_to_the_whole_sequence(kernels, dtype, kv_heads, group, head_dim, window):
    """Prompts of several lengths are computed in one step, and then token by token, mixed with new prompts."""
    torch.manual_seed(0)
    prompts, total = [1, 15, 16, 17, 40], [21, 30, 33, 18, 44]
    shape = (max(total), kv_heads * group, head_dim), (max(total), kv_heads, head_dim)
    data = [[torch.randn(s).to(dtype) for s in (shape[0], shape[1], shape[1])] for _ in prompts]
    expected = [plain(q[:n], k[:n], v[:n], window) for (q, k, v), n in zip(data, total, strict=True)]

    width = 3
    cache = KVCache(LAYERS, 5 * width, kv_heads, head_dim, torch.empty(0, dtype=dtype))
    cache._keys.fill_(1e4)  # what was there before must not matter
    cache._values.fill_(1e4)
    table = torch.randperm(5 * width).to(torch.int32).view(5, width)
    lengths = [0] * 5
    for time in range(60):
        decoding = [i for i in range(5) if 0 < lengths[i] < total[i]]
        starting = [i for i in range(5) if not lengths[i] and time >= 3 * i]
        if not decoding and not starting:
            continue
        decode = prefill = None
        if decoding:
            own = torch.tensor([lengths[i] for i in decoding], dtype=cache.kernels.lengths_dtype)
            decode = DecodeRows(table[decoding], own)
        if starting:
            places = [table[i, t // PAGE].long() * PAGE + t % PAGE for i in starting for t in range(prompts[i])]
            prefill = PrefillRows([prompts[i] for i in starting], torch.stack(places))
        attend = StepAttention(cache, decode, prefill)
        spans = [(i, lengths[i], lengths[i] + 1) for i in decoding] + [(i, 0, prompts[i]) for i in starting]
        rows = [torch.cat([data[i][part][a:b] for i, a, b in spans]) for part in range(3)]
        for layer in LAYERS:
            out = attend(layer, *rows, window)
            wanted = torch.cat([expected[i][a:b] for i, a, b in spans])
            torch.testing.assert_close(out.double(), wanted, rtol=0, atol=TOLERANCE[dtype])
        for i, _, end in spans:
            lengths[i] = end
    assert lengths == total


def test_copied_pages_hold_the_same_in_all_layers(kernels):
    cache = KVCache(LAYERS, 4, 2, 8, torch.empty(0))
    cache._keys.normal_()
    cache._values.normal_()
    before = cache._keys.clone(), cache._values.clone()
    cache.copy_pages([(0, 2), (1, 3)])
    for store, old in zip((cache._keys, cache._values), before, strict=True):
        assert torch.equal(store[:, [0, 1, 2, 3]], old[:, [0, 1, 0, 1]])


def test_what_the_kernels_read_of_a_page_is_zero_at_first(kernels, monkeypatch):
    """Where they read behind the end of a sequence: what was there before must be finite."""
    for dtype in (torch.float32, torch.bfloat16):
        monkeypatch.setattr(kv_cache, "_empty_like", lambda like, shape: torch.full(shape, torch.nan, dtype=like.dtype))
        cache = KVCache(LAYERS, 4, 2, 8, torch.empty(0, dtype=dtype))
        assert [bool((store == 0).all()) for store in (cache._keys, cache._values)] == [cache.kernels.reads_behind] * 2
        assert cache.size_bytes == 2 * 2 * 4 * PAGE * 2 * 8 * dtype.itemsize
        assert list(cache.layers) == [3, 4]
        for store in (cache._keys, cache._values):
            store.fill_(torch.nan)
        cache.copy_pages([])
        cache.clear()
        is_zero = [bool((store == 0).all()) for store in (cache._keys, cache._values)]
        assert is_zero == [cache.kernels.reads_behind] * 2


def test_pages_lie_on_the_device_of_the_model():
    made = kv_cache._empty_like(torch.empty(0, dtype=torch.bfloat16, device="meta"), (2, 3))
    assert (made.device.type, made.dtype, made.shape) == ("meta", torch.bfloat16, (2, 3))


INTEGERS = (torch.int64, torch.int32, torch.int32)


def test_what_kernels_say_of_themselves():
    said = [(k.page, k.lengths_dtype, k.reads_behind, k.gathers) for k in (CppKernels, TritonKernels, FlashKernels)]
    assert said == [(page, integers, False, False) for page, integers in zip((16, 16, 256), INTEGERS, strict=True)]
    kernels = TorchKernels()
    assert (kernels.page, kernels.lengths_dtype, kernels.reads_behind, kernels.gathers) == (16, torch.int64, True, True)
    assert TorchKernels(3).page_shapes(2, 8) == ((2, 8, 3), (2, 3, 8))
    assert FlashKernels().page_shapes(2, 8) == ((256, 2, 8), (256, 2, 8))
    assert TritonKernels().page_shapes(2, 8) == ((2, 16, 8), (2, 16, 8))


def test_the_kernels_of_a_machine(monkeypatch):
    flash_machine = replace(flash.HOPPER, flash_attn=(2, 8))
    for here, has_cpp, dtype, head_dim, kind in (
        (Machine(device="cpu"), True, torch.float32, 64, CppKernels),
        (Machine(device="cpu"), False, torch.float32, 64, TorchKernels),
        (flash_machine, True, torch.bfloat16, 64, FlashKernels),
        (flash_machine, True, torch.bfloat16, 36, TorchKernels),
        (WITH_TRITON, True, torch.bfloat16, 36, TritonKernels),
    ):
        monkeypatch.setattr(paged_attention, "machine", lambda device, here=here: here)
        if not has_cpp:
            monkeypatch.setattr(paged_attention, "_kernels", None)
        assert type(paged_kernels(torch.empty(0, dtype=dtype), head_dim)) is kind
        monkeypatch.undo()


def test_kernels_are_described_once_for_all_dtypes_that_take_them(monkeypatch):
    lines = describe_attention("cpu")
    assert len(lines) == 1
    assert lines[0].startswith("bfloat16, float32, float64: ")
    assert lines[0].endswith(" over packed sequences, C++ over the KV cache")
    here = replace(flash.HOPPER, flash_attn=(2, 8))
    monkeypatch.setattr(paged_attention, "machine", lambda device: here)
    assert describe_attention("cuda") == [
        "bfloat16: flash-attn over packed sequences, flash-attn over the KV cache",
        "float32, float64: scaled dot products over packed sequences, gathered pages over the KV cache",
    ]
    monkeypatch.setattr(paged_attention, "machine", lambda device: WITH_TRITON)
    assert describe_attention("cuda") == [
        "bfloat16, float32: scaled dot products over packed sequences, Triton over the KV cache",
        "float64: scaled dot products over packed sequences, gathered pages over the KV cache",
    ]
    monkeypatch.setattr(paged_attention, "machine", lambda device: Machine(device="cpu"))
    monkeypatch.setattr(paged_attention, "_kernels", None)
    assert describe_attention("cpu")[0].endswith(", gathered pages over the KV cache")


LACKS = tuple(Lack(name, "is not installed", f"install {name}") for name in ("triton", "flash-attn", "varlen"))
FLASH, VARLEN = {"flash_attn": (2, 8)}, {"varlen": frozenset({"window_size"})}


@pytest.mark.parametrize(
    ("there", "lacks", "said"),
    [
        ({"triton": (3, 8), **FLASH, **VARLEN}, "", []),
        (FLASH | VARLEN, "triton", ["over the KV cache flash-attn takes its place, in pages of 256 tokens"]),
        (VARLEN, "triton flash-attn", ["gathered pages takes its place, so that each step first copies its keys and",
                                       "torch varlen takes its place, whose gradients may differ in their last bits"]),
        ({"triton": (3, 8)}, "flash-attn varlen", ["scaled dot products takes its place, with a launch for each"] * 2),
        ({"triton": (3, 8)} | FLASH, "varlen", []),
    ],
)  # fmt: skip
def test_a_missing_kernel_is_told_with_what_takes_its_place(monkeypatch, there, lacks, said):
    """Where that is something else."""
    lacking = tuple(lack for lack in LACKS if lack.name in lacks.split())
    here = replace(flash.HOPPER, **there, lacks=lacking)
    monkeypatch.setattr(paged_attention, "machine", lambda device: here)
    missing = missing_kernels("cuda")
    assert list(missing) == (lacks.split() if said else [])
    for (name, (text, remedy)), words in zip(missing.items(), said, strict=True):
        assert text.startswith(f"{name} is not installed: over ")
        assert words in text
        assert remedy == f"install {name}"
    monkeypatch.setattr(paged_attention, "machine", lambda device: replace(here, compute_capability=(7, 5)))
    assert not missing_kernels("cuda")  # no package would help


def test_wrong_tensors_never_come_to_the_kernel():
    """It takes shapes, orders and dtypes on trust."""
    kernels = CppKernels()
    keys, values = torch.zeros(3, 2, 8, PAGE), torch.zeros(3, 2, PAGE, 8)
    new, places = torch.zeros(4, 2, 8), torch.arange(4)
    rows = DecodeRows(torch.zeros(4, 1, dtype=torch.int32), torch.arange(4))
    pages = LayerPages(keys, values)
    kernels.write(pages, places, new, new)
    kernels.attend(pages, rows, new, new, new, None)
    wide = torch.zeros(4, 2, 16)
    for wrong in (
        (keys, values, places[:3], new, new),
        (keys, values, places.int(), new, new),
        (keys, values, torch.arange(8)[::2], new, new),
        (torch.zeros(3, 2, 8, 8), values, places, new, new),
        (keys, torch.zeros(2, 2, PAGE, 8), places, new, new),
        (keys, torch.zeros(3, 2, 8, PAGE), places, new, new),
        (torch.zeros(3, 2, PAGE, 8).transpose(2, 3), values, places, new, new),
        (keys, torch.zeros(3, 2, 8, PAGE).transpose(2, 3), places, new, new),
        (keys, values, places, new[:, :1], new),
        (keys, values, places, new, new[:3]),
        (keys, values, places, new[:, :1], new[:, :1]),
        (keys, values, places, wide[:, :, ::2], new),
        (keys, values, places, new, torch.zeros(4, 8, 2).transpose(1, 2)),
        (keys.double(), values, places, new, new),
        (keys, values.double(), places, new, new),
        (keys, values, places, new.double(), new),
        (keys, values, places, new, new.double()),
    ):
        with pytest.raises(AssertionError):
            kernels.write(LayerPages(*wrong[:2]), *wrong[2:])
    table, lengths = rows.table, rows.lengths
    for wrong_rows, query in (
        (DecodeRows(table.long(), lengths), new),
        (DecodeRows(table, lengths.int()), new),
        (DecodeRows(torch.zeros(1, 4, dtype=torch.int32).t().expand(4, 2), lengths), new),
        (DecodeRows(table, torch.arange(8)[::2]), new),
        (DecodeRows(table[:3], lengths), new),
        (DecodeRows(table, lengths[:3]), new),
        (rows, new[:3]),
    ):
        with pytest.raises(AssertionError):
            kernels.attend(pages, wrong_rows, query, new, new, None)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 60.0])
def test_weights_of_any_size_are_exact(scale):
    """The kernel's own exponential function, from nearly equal weights to one that takes all."""
    torch.manual_seed(1)
    length = 200
    query, key, value = torch.randn(1, 2, 32) * scale, torch.randn(length, 2, 32), torch.randn(length, 2, 32)
    cache = KVCache(range(1), length // PAGE + 1, 2, 32, torch.empty(0))
    table = torch.arange(length // PAGE + 1, dtype=torch.int32)[None]
    StepAttention(cache, None, PrefillRows([length - 1], torch.arange(length - 1)))(0, key[:-1], key[:-1], value[:-1])
    out = StepAttention(cache, DecodeRows(table, torch.tensor([length - 1])), None)(0, query, key[-1:], value[-1:])
    q, k, v = (x.double().transpose(0, 1) for x in (query, key, value))
    torch.testing.assert_close(out.double(), F.scaled_dot_product_attention(q, k, v).transpose(0, 1), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("machine", "dtype", "head_dim", "has_cpp", "expected"),
    [
        (Machine(device="cpu"), torch.bfloat16, 64, True, "C++"),
        (Machine(device="cpu"), torch.float16, 64, True, "gathered pages"),
        (Machine(device="cpu"), torch.float32, 64, False, "gathered pages"),
        (flash.HOPPER, torch.bfloat16, 64, True, "gathered pages"),
        (replace(flash.HOPPER, flash_attn=(2, 8)), torch.bfloat16, 64, True, "flash-attn"),
        (replace(flash.HOPPER, flash_attn=(2, 8)), torch.bfloat16, 36, True, "gathered pages"),
        (replace(flash.HOPPER, flash_attn=(2, 8)), torch.float32, 64, True, "gathered pages"),
        (WITH_TRITON, torch.bfloat16, 64, True, "Triton"),
        (WITH_TRITON, torch.float16, 80, True, "Triton"),
        (WITH_TRITON, torch.float32, 256, True, "Triton"),
        (WITH_TRITON, torch.float64, 64, True, "gathered pages"),
        (WITH_TRITON, torch.bfloat16, 264, True, "gathered pages"),
        (replace(WITH_TRITON, flash_attn=(2, 8)), torch.bfloat16, 64, True, "Triton"),
        (replace(WITH_TRITON, compute_capability=(7, 5)), torch.float32, 64, True, "gathered pages"),
        (replace(WITH_TRITON, device="cpu"), torch.float32, 64, True, "C++"),
    ],
)
def test_which_kernel_attends_over_pages(machine, dtype, head_dim, has_cpp, expected):
    assert paged_kernel(machine, dtype, head_dim, has_cpp=has_cpp) == expected


@pytest.mark.parametrize("window", [None, 100])
def test_flash_attention_is_asked_for_the_whole_sequence(monkeypatch, window):
    """Pages of 256 tokens, the last one full, begun, or about to begin."""
    flash.install_flash_attn(monkeypatch)
    monkeypatch.setattr(flash, "groups_read_once", [])
    torch.manual_seed(0)
    prompts = [255, 256, 3]
    steps, kv_heads, group, head_dim = 3, 2, 2, 8
    kernels = FlashKernels()
    cache = KVCache(range(1), 7, kv_heads, head_dim, torch.empty(0, dtype=torch.bfloat16), kernels)
    table = torch.tensor([[4, 1], [0, 6], [2, 5]], dtype=torch.int32)
    shape = (max(prompts) + steps, kv_heads * group, head_dim), (max(prompts) + steps, kv_heads, head_dim)
    data = [[torch.randn(s).bfloat16() for s in (shape[0], shape[1], shape[1])] for _ in prompts]
    places = [table[i, t // 256].long() * 256 + t % 256 for i, n in enumerate(prompts) for t in range(n)]
    rows = [torch.cat([data[i][part][:n] for i, n in enumerate(prompts)]) for part in range(3)]
    StepAttention(cache, None, PrefillRows(prompts, torch.stack(places)))(0, *rows)
    for step in range(steps):
        lengths = torch.tensor([n + step for n in prompts], dtype=kernels.lengths_dtype)
        query, key, value = (torch.stack([data[i][p][n + step] for i, n in enumerate(prompts)]) for p in range(3))
        out = StepAttention(cache, DecodeRows(table, lengths), None)(0, query, key, value, window)
        for i, n in enumerate(prompts):
            first = 0 if window is None else max(0, n + step + 1 - window)
            q, k, v = query[i : i + 1], *(data[i][p][first : n + step + 1] for p in (1, 2))
            wanted = flash.attend(q.double(), k.double(), v.double(), (-1, -1), causal=True)
            torch.testing.assert_close(out[i : i + 1].double(), wanted, rtol=0, atol=2e-2)
    assert flash.groups_read_once == [window is None] * steps, "what keys of grouped heads are read once for"
