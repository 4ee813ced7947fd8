"""Attention of one new token a sequence over pages of keys and values.

The keys of a sequence are split among programs, since a few rows with long contexts would be too few programs for a GPU
(flash decoding, Dao et al., 2023); a second kernel joins what the splits found. A page is read once for all query heads
that share its key head. Launches depend on shapes alone, so that CUDA graphs can record them.

Keys and values lie in pages [pages, kv_heads, tokens, head_dim].
"""
# ruff: noqa: N803 (what a kernel is compiled for is in capitals, as Triton's own kernels have it)

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

SPLIT_TOKENS = 512
BLOCK_BYTES = 64  # that a program reads at a time, of one number each of the tokens: with more, float32 spills
LEAST_DOT = 16  # the side of the least matrix that tensor cores multiply
EVERYTHING = 1 << 30  # a window that ends no sequence

NUM_WARPS, NUM_STAGES = 4, 3


def attend(
    pages: tuple[Tensor, Tensor],
    table: Tensor,
    lengths: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
) -> Tensor:
    """Writes the keys and values of new tokens into their pages, and attends to all up to them.

    Args:
        pages: keys and values, in float32, bfloat16 or float16.
        table: [rows, pages] int32, the pages of each sequence in order; entries behind the last one are not used.
        lengths: [rows] int32, tokens in the pages, without the new one.
        query: [rows, heads, head_dim]; heads that follow one another share a key head.
        key, value: [rows, kv_heads, head_dim].
        window: the last tokens that are seen, the new one among them; None: all.

    Returns:
        [rows, heads, head_dim]; sums are in float32.
    """
    keys, values = pages
    rows, heads, head_dim = query.shape
    kv_heads, page = keys.shape[1:3]
    assert keys.is_contiguous()
    assert values.is_contiguous()
    for x in (query, key, value):
        assert x.stride()[1:] == (head_dim, 1), x.stride()
    assert table.stride(1) == 1
    assert table.dtype == lengths.dtype == torch.int32
    splits = -(-table.shape[1] * page // SPLIT_TOKENS)
    out = torch.empty(rows, heads, head_dim, dtype=query.dtype, device=query.device)
    parts, weights = out, out
    if splits > 1:
        parts = torch.empty(rows, heads, splits, head_dim, dtype=torch.float32, device=query.device)
        weights = torch.empty(rows, heads, splits, dtype=torch.float32, device=query.device)
    seen = window or EVERYTHING
    attend_split[(rows, kv_heads, splits)](
        query, key, value, keys, values, table, lengths, parts, weights, head_dim**-0.5 * math.log2(math.e), seen,
        query.stride(0), key.stride(0), value.stride(0), table.stride(0),
        **attend_constants(heads, kv_heads, head_dim, page, query.element_size()), IS_SPLIT=splits > 1,
        num_warps=NUM_WARPS, num_stages=NUM_STAGES,
    )  # fmt: skip
    if splits > 1:
        join_splits[(rows, heads)](
            parts, weights, lengths, out, seen, splits, SPLIT=SPLIT_TOKENS, HEAD_DIM=head_dim,
            DIM=triton.next_power_of_2(head_dim),
        )  # fmt: skip
    return out


def attend_constants(heads: int, kv_heads: int, head_dim: int, page: int, item_bytes: int) -> dict[str, int]:
    """The constants that a kernel is compiled with."""
    group = heads // kv_heads
    return {
        "GROUP": group,
        "ROWS": max(LEAST_DOT, triton.next_power_of_2(group)),
        "KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "DIM": max(LEAST_DOT, triton.next_power_of_2(head_dim)),
        "PAGE": page,
        "BLOCK": BLOCK_BYTES // item_bytes,
        "SPLIT": SPLIT_TOKENS,
    }


# A whole number that happens to be 1, or a multiple of 16, must not compile the kernel anew in the middle of a run.
@triton.jit(do_not_specialize=["seen", "query_row", "key_row", "value_row", "table_row"])
def attend_split(
    query, key, value, keys, values, table, lengths, parts, weights,
    scale, seen, query_row, key_row, value_row, table_row,
    GROUP: tl.constexpr, ROWS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr, IS_SPLIT: tl.constexpr,
) -> None:  # fmt: skip
    """A program for each (row, key head, split of its tokens): softmax as it goes (Milakov & Gimelshein, 2018).

    `parts` [rows, heads, splits, head_dim] and `weights` [rows, heads, splits]: the split's mean of the values, and the
    logarithm (of base 2) of the sum that it stands for. The split of the new token stores it.
    """
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    new = tl.load(lengths + row)  # the place of the new token
    begin = tl.maximum(split * SPLIT, new + 1 - seen)
    end = tl.minimum(split * SPLIT + SPLIT, new)
    has_new = new // SPLIT == split
    if (begin >= end) & (has_new == 0):
        return
    g, d, t = tl.arange(0, ROWS), tl.arange(0, DIM), tl.arange(0, BLOCK)
    is_dim = d < HEAD_DIM
    is_query = (g < GROUP)[:, None] & is_dim[None, :]
    head = kv_head * GROUP + g
    q = tl.load(query + row.to(tl.int64) * query_row + head[:, None] * HEAD_DIM + d[None, :], mask=is_query, other=0.0)
    table += row.to(tl.int64) * table_row

    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mean = tl.zeros([ROWS, DIM], tl.float32)  # times total
    if has_new:
        k = tl.load(key + row.to(tl.int64) * key_row + kv_head * HEAD_DIM + d, mask=is_dim, other=0.0)
        v = tl.load(value + row.to(tl.int64) * value_row + kv_head * HEAD_DIM + d, mask=is_dim, other=0.0)
        page = tl.load(table + new // PAGE).to(tl.int64)
        place = ((page * KV_HEADS + kv_head) * PAGE + new % PAGE) * HEAD_DIM + d
        tl.store(keys + place, k, mask=is_dim)
        tl.store(values + place, v, mask=is_dim)
        highest = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], 1) * scale
        total += 1.0
        mean += v.to(tl.float32)[None, :]

    for at in range(begin // BLOCK * BLOCK, end, BLOCK):
        token = at + t
        is_seen = (token >= begin) & (token < end)
        page = tl.load(table + token // PAGE, mask=is_seen, other=0).to(tl.int64)
        place = ((page * KV_HEADS + kv_head) * PAGE + token % PAGE)[:, None] * HEAD_DIM + d[None, :]
        is_read = is_seen[:, None] & is_dim[None, :]
        k = tl.load(keys + place, mask=is_read, other=0.0)
        products = tl.dot(q, tl.trans(k), input_precision="ieee").to(tl.float32) * scale
        products = tl.where(is_seen[None, :], products, float("-inf"))
        higher = tl.maximum(highest, tl.max(products, 1))  # finite: every block has a token that is seen
        kept, powers = tl.exp2(highest - higher), tl.exp2(products - higher[:, None])
        v = tl.load(values + place, mask=is_read, other=0.0)
        mean = mean * kept[:, None] + tl.dot(powers.to(v.dtype), v, input_precision="ieee").to(tl.float32)
        total = total * kept + tl.sum(powers, 1)
        highest = higher

    splits = tl.num_programs(2)
    part = (row.to(tl.int64) * KV_HEADS * GROUP + head) * splits + split
    tl.store(parts + part[:, None] * HEAD_DIM + d[None, :], mean / total[:, None], mask=is_query)
    if IS_SPLIT:
        tl.store(weights + part, highest + tl.log2(total), mask=g < GROUP)


@triton.jit(do_not_specialize=["seen", "splits"])
def join_splits(
    parts, weights, lengths, out, seen, splits,
    SPLIT: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
) -> None:  # fmt: skip
    """A program for each (row, head): the mean of its splits' means, those that the window has."""
    row, head = tl.program_id(0), tl.program_id(1)
    new = tl.load(lengths + row)
    d = tl.arange(0, DIM)
    pair = row.to(tl.int64) * tl.num_programs(1) + head
    highest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    mean = tl.zeros([DIM], tl.float32)
    for split in range(tl.maximum(new + 1 - seen, 0) // SPLIT, new // SPLIT + 1):
        part = pair * splits + split
        weight = tl.load(weights + part)
        higher = tl.maximum(highest, weight)
        kept, power = tl.exp2(highest - higher), tl.exp2(weight - higher)
        mean = mean * kept + power * tl.load(parts + part * HEAD_DIM + d, mask=d < HEAD_DIM, other=0.0)
        total = total * kept + power
        highest = higher
    tl.store(out + pair * HEAD_DIM + d, mean / total, mask=d < HEAD_DIM)
