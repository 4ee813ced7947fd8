"""Attention over pages of keys and values on the CPU (`csrc/kernels/paged_attention.h`): each sequence at its own
length, with one thread. The keys, and the values, of one head in a page lie together, in the order in which they are
read."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from realhf.cpu.native import kernels


def page_shapes(kv_heads: int, head_dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of the keys and of the values in a page."""
    return (kv_heads, head_dim, kernels.PAGE), (kv_heads, kernels.PAGE, head_dim)


def write(keys: Tensor, values: Tensor, places: Tensor, key: Tensor, value: Tensor) -> None:
    """Puts `key` and `value` [tokens, kv_heads, head_dim] into the pages at `places` [tokens] int64, page * tokens of a
    page + place in it."""
    _check(keys, values, key, value)
    assert places.shape == key.shape[:1]
    assert places.dtype == torch.int64
    assert places.is_contiguous()
    tokens, kv_heads, head_dim = key.shape
    kernels.write(
        _native(key.dtype), kv_heads, head_dim, keys.data_ptr(), values.data_ptr(), len(keys),
        tokens, places.data_ptr(), *_rows(key), *_rows(value),
    )  # fmt: skip


def attend(
    pages: tuple[Tensor, Tensor],
    rows: tuple[Tensor, Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
) -> Tensor:
    """[rows, heads, head_dim] for `query` of that shape; writes each row's `key` and `value` [rows, kv_heads, head_dim]
    behind its sequence first. `rows`: the table [rows, pages] int32 of each row's pages, and the tokens [rows] int64 in
    them."""
    (keys, values), (table, lengths) = pages, rows
    _check(keys, values, key, value)
    count, kv_heads, head_dim = key.shape
    group = query.shape[1] // kv_heads
    assert table.is_contiguous()
    assert table.dtype == torch.int32
    assert lengths.dtype == torch.int64
    assert lengths.is_contiguous()
    assert len(table) == len(lengths) == len(query) == count
    out = torch.empty(query.shape, dtype=query.dtype)
    kernels.attend(
        _native(key.dtype), kv_heads, group, head_dim, keys.data_ptr(), values.data_ptr(), len(keys),
        count, table.data_ptr(), table.shape[1], lengths.data_ptr(),
        *_rows(query), *_rows(key), *_rows(value), head_dim**-0.5, window or 0, out.data_ptr(),
    )  # fmt: skip
    return out


@cache
def _native(dtype: torch.dtype) -> Any:
    return getattr(kernels.DType, str(dtype).removeprefix("torch."))


def _rows(x: Tensor) -> tuple[int, int]:
    """Where x [tokens, heads, head_dim] begins, and how many elements lie from one token to the next."""
    assert x.stride()[1:] == (x.shape[2], 1)
    return x.data_ptr(), x.stride(0)


def _check(keys: Tensor, values: Tensor, key: Tensor, value: Tensor) -> None:
    """Checks shapes and layouts, which the kernels do not check."""
    _, kv_heads, head_dim, page = keys.shape
    assert page == kernels.PAGE
    assert values.shape == (len(keys), kv_heads, page, head_dim)
    assert keys.is_contiguous()
    assert values.is_contiguous()
    assert key.shape == value.shape == (len(key), kv_heads, head_dim), (key.shape, keys.shape)
    assert keys.dtype == values.dtype == key.dtype == value.dtype
