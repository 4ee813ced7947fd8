"""Products and sums whose numbers have one order of their terms each, whatever rows and columns are beside them.

Tiles have constant sizes, a program goes through all terms of its numbers, and nothing is chosen by shapes. Shapes do
not change the compiled program either, since compilers may then add up in another order.
"""
# ruff: noqa: N803 (what a kernel is compiled for is in capitals, as Triton's own kernels have it)

import torch
import triton
import triton.language as tl
from torch import Tensor

# (rows, outputs, inputs) of a tile.
TILES = {torch.float32: (32, 64, 32), torch.bfloat16: (64, 64, 64)}
PRODUCT_WARPS, PRODUCT_STAGES = 4, 3
BLOCK = 1024  # numbers of a row that a program reads at a time
ALIGNMENT = 16  # numbers, and bytes of addresses: what Triton takes to be aligned


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias [rows, out] of x [rows, in], weight [out, in] and bias [out], all of one dtype in `TILES`.

    A number is one sum in float32 over the inputs, tile by tile, rounded once.
    """
    y = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    if y.numel():
        x, weight = _aligned(x), _aligned(weight)
        rows, outs, depth = TILES[x.dtype]
        add_products[(triton.cdiv(len(weight), outs), triton.cdiv(len(x), rows))](
            x, weight, y if bias is None else bias, y, len(x), len(weight), x.shape[1], x.stride(0), weight.stride(0),
            HAS_BIAS=bias is not None, ROWS=rows, OUTS=outs, DEPTH=depth,
            num_warps=PRODUCT_WARPS, num_stages=PRODUCT_STAGES,
        )  # fmt: skip
    return y


def row_sums(x: Tensor) -> Tensor:
    """The sums of the rows of x [rows, width], [rows] float32."""
    x = x if x.stride(1) == 1 else x.contiguous()
    sums = torch.empty(len(x), dtype=torch.float32, device=x.device)
    if len(x):
        add_row[(len(x),)](x, sums, x.shape[1], x.stride(0), BLOCK=BLOCK, num_warps=4)
    return sums


def add_rows(total: Tensor, index: Tensor, x: Tensor) -> None:
    """Adds rows of x [rows, width] to those rows of `total` [n, width] that `index` [rows] int64 names; those of one
    name are summed up in float32 first, in their order."""
    if not len(x):
        return
    x = x.contiguous()
    names, order = index.sort(stable=True)
    starts = torch.searchsorted(names, torch.arange(len(total) + 1, device=index.device))
    add_named_rows[(len(total), triton.cdiv(x.shape[1], BLOCK))](
        total, x, order, starts, x.shape[1], total.stride(0), BLOCK=BLOCK, num_warps=4
    )


def _aligned(x: Tensor) -> Tensor:
    """x [rows, width] with rows that are aligned, in places and lengths; zeros fill up a copy."""
    rows, width = x.shape
    is_aligned = x.stride(1) == 1 and not x.stride(0) % ALIGNMENT and not x.data_ptr() % ALIGNMENT
    if is_aligned and not width % ALIGNMENT:
        return x
    padded = x.new_zeros(rows, triton.cdiv(width, ALIGNMENT) * ALIGNMENT)
    padded[:, :width] = x
    return padded


# `width`, `x_row` and `weight_row` are multiples of 16 in every launch, and so are the addresses but that of the bias.
@triton.jit(do_not_specialize=["rows", "outs"], do_not_specialize_on_alignment=["bias"])
def add_products(
    x, weight, bias, y, rows, outs, width, x_row, weight_row,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, OUTS: tl.constexpr, DEPTH: tl.constexpr,
) -> None:  # fmt: skip
    """A program for each tile of y [rows, outs]."""
    out, row = tl.program_id(0) * OUTS + tl.arange(0, OUTS), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_out, is_row = out < outs, row < rows
    x += row.to(tl.int64)[:, None] * x_row
    weight += out.to(tl.int64)[:, None] * weight_row
    total = tl.zeros([ROWS, OUTS], tl.float32)
    for at in range(0, width, DEPTH):
        place = at + tl.arange(0, DEPTH)
        is_place = (place < width)[None, :]
        of_x = tl.load(x + place[None, :], mask=is_row[:, None] & is_place, other=0.0)
        of_weight = tl.load(weight + place[None, :], mask=is_out[:, None] & is_place, other=0.0)
        total = tl.dot(of_x, tl.trans(of_weight), total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + out, mask=is_out, other=0.0).to(tl.float32)[None, :]
    y += row.to(tl.int64)[:, None] * outs + out[None, :]
    tl.store(y, total.to(y.dtype.element_ty), mask=is_row[:, None] & is_out[None, :])


@triton.jit(do_not_specialize=["width", "x_row"], do_not_specialize_on_alignment=["x", "sums"])
def add_row(x, sums, width, x_row, BLOCK: tl.constexpr) -> None:
    """A program for each row of x [rows, width]: `BLOCK` sums of every `BLOCK`th number, then one tree of these."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for at in range(0, width, BLOCK):
        place = at + tl.arange(0, BLOCK)
        total += tl.load(x + row * x_row + place, mask=place < width, other=0.0).to(tl.float32)
    tl.store(sums + row, tl.sum(total, 0))


@triton.jit(do_not_specialize=["width", "total_row"])
def add_named_rows(total, x, order, starts, width, total_row, BLOCK: tl.constexpr) -> None:
    """A program for each row of `total` and block of it; `order` [starts[i], starts[i + 1]) are the rows of x for i."""
    row, at = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first, end = tl.load(starts + row), tl.load(starts + row + 1)
    if first == end:
        return
    is_place = at < width
    added = tl.zeros([BLOCK], tl.float32)
    for place in range(first, end):
        source = tl.load(order + place)
        added += tl.load(x + source * width + at, mask=is_place, other=0.0).to(tl.float32)
    place = total + row.to(tl.int64) * total_row + at
    tl.store(place, (tl.load(place, mask=is_place) + added).to(total.dtype.element_ty), mask=is_place)
