"""Causal attention over packed sequences: the one seam between the decoder and its kernels."""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel

from realhf.cpu.ordered_attention import PackedPages
from realhf.gpu.host_numbers import on_device
from realhf.models.attention_kernels import (
    boundaries,
    flash_attention,
    machine,
    packed_kernel,
    torch_varlen_attention,
)
from realhf.parallel.ordered import on_gpu

if TYPE_CHECKING:
    from realhf.gpu.packed_attention import PagesOnGpu


class Attention(Protocol):
    """The attention that a decoder layer calls: over packed sequences in training, over the KV cache in generation."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None = None) -> Tensor:
        """query [tokens, heads, head_dim], key and value [tokens, kv_heads, head_dim], all after
        rotation; returns [tokens, heads, head_dim]. `layer` is the global layer index. A token attends
        to the last `window` tokens of its sequence, itself included; None: to all."""


class PackedAttention:
    """Causal self-attention inside each packed sequence, without padding.

    If the machine has a kernel for packed sequences (`realhf.models.attention_kernels`), one call takes all of them.
    Else neighbours of equal length go through one call, so a batch in order of length takes one call for each length.
    With `in_order` numbers are those of decode steps, bit by bit.
    """

    def __init__(self, lengths: Sequence[int], *, in_order: bool = False):
        self.lengths = list(lengths)
        self.in_order = in_order
        self._cu_seqlens: Tensor | None = None
        self._pages_there: PagesOnGpu | None = None

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None = None) -> Tensor:
        if self.in_order:
            is_on_gpu = on_gpu(query)
            pages = self._pages_on(query.device) if is_on_gpu else self.pages
            fast = partial(self._by_head if is_on_gpu else self._by_length, window=window)
            return attend_in_order(pages, fast, query, key, value, window)
        here = machine(query.device.type)
        match packed_kernel(here, query.dtype, query.shape[-1], window):
            case "flash-attn":
                return flash_attention(query, key, value, *self._borders(query.device), window)
            case "torch varlen":
                return torch_varlen_attention(query, key, value, *self._borders(query.device), window, here.varlen)
            case "scaled dot products":
                return self._by_length(query, key, value, window)

    @cached_property
    def pages(self) -> PackedPages:
        """The places of the sequences' keys and values, for all layers."""
        ends = np.cumsum(self.lengths)
        rows = [(np.arange(end - length, end), 0) for end, length in zip(ends, self.lengths, strict=True)]
        return PackedPages(rows, int(ends[-1]))

    def _pages_on(self, device: torch.device) -> "PagesOnGpu":
        """`pages` on the device, copied once for all layers."""
        if self._pages_there is None:
            from realhf.gpu.packed_attention import PagesOnGpu

            of_host = (self.pages.kept, self.pages.places, self.pages.table, self.pages.lengths.int())
            self._pages_there = PagesOnGpu(self.pages.pages, *(on_device(each, device) for each in of_host))
        return self._pages_there

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """Neighbours of equal lengths: (sequences, length)."""
        return [(len(list(run)), length) for length, run in groupby(self.lengths)]

    def _borders(self, device: torch.device) -> tuple[Tensor, int]:
        """cu_seqlens on the device, made once for all layers, and the longest length."""
        if self._cu_seqlens is None:
            self._cu_seqlens = boundaries(self.lengths, device)
        return self._cu_seqlens, max(self.lengths)

    def _by_head(self, query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
        """On a GPU, with the same gradients in every run. A call for each key head: layouts differ in the number of
        heads of a rank, and a kernel may divide its sums by that."""
        here, group = machine(query.device.type), query.shape[1] // key.shape[1]
        parts = []
        for each in zip(query.split(group, 1), key.split(1, 1), value.split(1, 1), strict=True):
            q, k, v = (x.contiguous() for x in each)
            if packed_kernel(here, query.dtype, query.shape[-1], window) == "flash-attn":
                parts.append(flash_attention(q, k, v, *self._borders(query.device), window))
            else:
                with sdpa_kernel(SDPBackend.MATH):
                    parts.append(self._by_length(q, k, v, window))
        return torch.cat(parts, dim=1)

    def _by_length(self, query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
        sizes = [count * length for count, length in self.runs]
        dtype, parts = query.dtype, []
        if dtype == torch.bfloat16 and query.device.type == "cpu" and torch.is_grad_enabled() and query.requires_grad:
            # The CPU kernel's backward pass is up to six times slower in bfloat16 than in float32, and never faster.
            query, key, value = query.float(), key.float(), value.float()
        # Split, not sliced: the gradient of a slice is as large as the whole tensor.
        for run, *qkv in zip(self.runs, query.split(sizes), key.split(sizes), value.split(sizes), strict=True):
            q, k, v = (x.unflatten(0, run).transpose(1, 2) for x in qkv)  # [sequences, heads, length, head_dim]
            parts.append(_causal(q, k, v, window).transpose(1, 2).flatten(0, 1))
        return torch.cat(parts).to(dtype)


def attend_in_order(
    pages: "PackedPages | PagesOnGpu",
    fast: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
) -> Tensor:
    """The attention of `pages`, with the gradients of `fast`, which computes the same up to rounding."""
    if torch.is_grad_enabled() and query.requires_grad:
        attended: Tensor = _InOrder.apply(query, key, value, pages, fast, window)
        return attended
    return pages.attend(query, key, value, window)


class _InOrder(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pages: "PackedPages | PagesOnGpu",
        fast: Any,
        window: int | None,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.fast = fast
        return pages.attend(query, key, value, window)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            return *torch.autograd.grad(ctx.fast(*inputs), inputs, grad), None, None, None


def _causal(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Attention of q [sequences, heads, length, head_dim] to k and v [sequences, kv_heads, length, head_dim]."""
    length, is_grouped = q.shape[2], q.shape[1] != k.shape[1]
    if window is None or window >= length:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped)
    parts = []
    # In blocks of a window's length, work grows with length x window, not with the square of the length.
    for start in range(0, length, window):
        end, first = min(start + window, length), max(start - window + 1, 0)
        queries = torch.arange(start, end, device=q.device)[:, None]
        keys = torch.arange(first, end, device=q.device)
        may_see = (keys <= queries) & (keys > queries - window)  # [block, keys]
        k_part, v_part = k[:, :, first:end], v[:, :, first:end]
        parts.append(F.scaled_dot_product_attention(q[:, :, start:end], k_part, v_part, may_see, enable_gqa=is_grouped))
    return torch.cat(parts, dim=2)


def packed_positions(lengths: list[int]) -> Tensor:
    """Position of every packed token inside its sequence: [tokens] int64."""
    return torch.cat([torch.arange(length) for length in lengths])
