"""Which kernel attends within packed sequences, and what is asked of each, against plain attention in float64."""

import importlib.metadata
import inspect
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from realhf.base.errors import UserError
from realhf.models import attention
from realhf.models.attention import PackedAttention
from realhf.models.attention_kernels import Machine, boundaries, machine, packed_kernel
from tests.unit.models import flash
from tests.unit.models.flash import HOPPER

WITH_FLASH = replace(HOPPER, flash_attn=(2, 8))
WITH_VARLEN = replace(HOPPER, varlen=frozenset({"window_size", "enable_gqa"}))
LENGTHS = [3, 1, 7, 7, 4]


def _no_compiler():
    raise RuntimeError("no C\ncompiler")


# `triton.runtime`, where its driver works and where it does not.
GOOD, NO_COMPILER = (
    SimpleNamespace(driver=SimpleNamespace(active=SimpleNamespace(get_current_target=target)))
    for target in (lambda: "sm_90", _no_compiler)
)


@pytest.mark.parametrize(
    ("machine", "dtype", "head_dim", "expected"),
    [
        (Machine(device="cpu"), torch.bfloat16, 64, "scaled dot products"),
        (replace(WITH_FLASH, varlen=WITH_VARLEN.varlen), torch.bfloat16, 64, "flash-attn"),
        (WITH_VARLEN, torch.bfloat16, 64, "torch varlen"),
        (HOPPER, torch.bfloat16, 64, "scaled dot products"),
        (WITH_FLASH, torch.float32, 64, "scaled dot products"),
        (WITH_FLASH, torch.float64, 64, "scaled dot products"),
        (WITH_FLASH, torch.bfloat16, 256, "flash-attn"),
        (WITH_FLASH, torch.bfloat16, 264, "scaled dot products"),
        (WITH_VARLEN, torch.bfloat16, 20, "scaled dot products"),
        (replace(WITH_FLASH, compute_capability=(7, 5)), torch.bfloat16, 64, "scaled dot products"),
    ],
)
@pytest.mark.parametrize("window", [None, 5])
def test_the_kernel_is_that_which_takes_dtype_and_heads(machine, dtype, head_dim, expected, window):
    assert packed_kernel(machine, dtype, head_dim, window) == expected


def test_this_torch_has_windows_in_its_signature():
    """Which is all of `varlen_attn` that can be looked at without a GPU."""
    assert "window_size" in inspect.signature(varlen.varlen_attn).parameters
    assert machine("cpu") == Machine(device="cpu")


@pytest.fixture
def on_a_gpu(monkeypatch):
    """`machine("cuda")` anew in each test, for a GPU; packages are those that are really installed."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    machine.cache_clear()
    yield
    machine.cache_clear()


@pytest.mark.usefixtures("on_a_gpu")
def test_kernels_that_are_left_out(monkeypatch):
    monkeypatch.setenv("REALHF_WITHOUT", " triton,varlen,,flash-attn")
    here = machine("cuda")
    assert (here.triton, here.flash_attn, here.varlen) == (None, None, frozenset())
    assert [lack.name for lack in here.lacks] == ["triton", "flash-attn", "varlen"]
    for _, why, remedy in here.lacks:
        assert (why, remedy) == ("is left out by REALHF_WITHOUT", "take it out of REALHF_WITHOUT")


@pytest.mark.usefixtures("on_a_gpu")
def test_a_word_that_no_kernel_has_is_refused(monkeypatch):
    monkeypatch.setenv("REALHF_WITHOUT", "flashattn,triton")
    with pytest.raises(UserError, match="flashattn is not known; choose from triton, flash-attn, varlen"):
        machine("cuda")
    assert machine("cpu") == Machine(device="cpu")


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize(
    ("installed", "modules", "whys"),
    [
        ({}, {}, ["is not installed", "is not installed"]),
        ({"triton": "3.8.0", "flash-attn": "2.8.3"}, {"triton.runtime": GOOD, "flash_attn": GOOD}, []),
        (
            {"triton": "3.8.0", "flash-attn": "2.8.3"},
            {"triton.runtime": NO_COMPILER, "flash_attn": None},
            ["3.8.0 does not work here (RuntimeError: no C compiler)", "2.8.3 does not load with torch"],
        ),
        ({"triton": "3.8.0", "flash-attn": "2.5.9"}, {"triton.runtime": GOOD, "flash_attn": GOOD},
         ["2.5.9 is older than 2.6"]),
    ],
)  # fmt: skip
def test_what_does_not_work_is_missing(monkeypatch, installed, modules, whys):
    def version(package):
        if package in installed:
            return installed[package]
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    here = machine("cuda")
    assert "window_size" in here.varlen  # of this torch
    assert [lack.why[: len(why)] for lack, why in zip(here.lacks, whys, strict=True)] == whys
    assert all(lack.remedy for lack in here.lacks)
    names = {lack.name for lack in here.lacks}
    assert (here.triton, here.flash_attn) == (
        None if "triton" in names else (3, 8), None if "flash-attn" in names else (2, 8)
    )  # fmt: skip


@pytest.mark.usefixtures("on_a_gpu")
def test_a_varlen_attn_without_windows_is_missing(monkeypatch):
    """It has no causal mask."""
    monkeypatch.setattr(varlen, "varlen_attn", lambda q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, is_causal: None)
    here = machine("cuda")
    assert not here.varlen
    assert f"has no windows in torch {torch.__version__}" in [lack.why for lack in here.lacks]


def test_borders_of_packed_sequences():
    assert boundaries(LENGTHS, torch.device("cpu")).tolist() == [0, 3, 4, 11, 18, 22]


def plain(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """In float64, with a mask over all pairs of tokens."""
    sequence = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    place = torch.arange(sum(LENGTHS))
    sees = (sequence[:, None] == sequence) & (place <= place[:, None])
    if window is not None:
        sees &= place > place[:, None] - window
    group = query.shape[1] // key.shape[1]
    q, k, v = query.double(), key.double().repeat_interleave(group, 1), value.double().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / query.shape[2] ** 0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~sees, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2)])
@pytest.mark.parametrize("kernel", ["flash-attn", "torch varlen", "torch varlen of old", "scaled dot products"])
def test_every_kernel_is_asked_for_the_same(monkeypatch, kernel, heads, kv_heads, window):
    """Values and gradients, in the half precision that the kernels take."""
    here, dtype, tolerance = WITH_FLASH, torch.bfloat16, 2e-2
    match kernel:
        case "flash-attn":
            flash.install_flash_attn(monkeypatch)
        case "torch varlen":
            here = WITH_VARLEN
            monkeypatch.setattr(varlen, "varlen_attn", flash.varlen_attn)
        case "torch varlen of old":
            here = replace(HOPPER, varlen=frozenset({"window_size"}))
            monkeypatch.setattr(varlen, "varlen_attn", flash.without_groups)
        case _:
            dtype, tolerance = torch.float64, 1e-12
    monkeypatch.setattr(attention, "machine", lambda _: here)
    torch.manual_seed(0)
    data = [torch.randn(sum(LENGTHS), h, 8).to(dtype).requires_grad_() for h in (heads, kv_heads, kv_heads)]
    upstream = torch.randn(sum(LENGTHS), heads, 8).double()
    expected = plain(*data, window)
    expected_grads = torch.autograd.grad((expected * upstream).sum(), data)
    out = PackedAttention(LENGTHS)(0, *data, window)
    grads = torch.autograd.grad((out.double() * upstream).sum(), data)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    for actual, wanted in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(actual.double(), wanted.double(), rtol=2 * tolerance, atol=2 * tolerance)
