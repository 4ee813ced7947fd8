"""Which kernel attends within packed sequences, and what is asked of each, against plain attention in float64."""

import inspect
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from realhf.models import attention
from realhf.models.attention import PackedAttention
from realhf.models.attention_kernels import Machine, boundaries, machine, packed_kernel
from tests.unit.models import flash
from tests.unit.models.flash import HOPPER

WITH_FLASH = replace(HOPPER, flash_attn=(2, 8))
WITH_VARLEN = replace(HOPPER, varlen=frozenset({"window_size", "enable_gqa"}))
LENGTHS = [3, 1, 7, 7, 4]


@pytest.mark.parametrize(
    ("machine", "dtype", "head_dim", "expected"),
    [
        (Machine(device="cpu"), torch.bfloat16, 64, "scaled dot products"),
        (replace(WITH_FLASH, varlen=WITH_VARLEN.varlen), torch.bfloat16, 64, "flash-attn"),
        (WITH_VARLEN, torch.bfloat16, 64, "torch varlen"),
        (replace(HOPPER, varlen=frozenset({"is_causal"})), torch.bfloat16, 64, "scaled dot products"),
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
