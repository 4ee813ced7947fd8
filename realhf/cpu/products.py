"""Products x W^T with weights in the order of a kernel of our own (`csrc/kernels/products.h`), on the CPU."""

from dataclasses import dataclass

import torch
from torch import Tensor

from realhf.cpu.huge_pages import empty_in_huge_pages
from realhf.cpu.native import DTYPES, kernels


@dataclass(frozen=True)
class PackedWeight:
    """A weight [`out`, `width`] of `dtype` in the kernel's order; `data` is its memory."""

    out: int
    width: int
    dtype: torch.dtype
    data: Tensor

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x W^T + bias [rows, out] of x [rows, width], rounded where torch's operators round.

        Each number is one sum in the order of the inputs: it does not depend on how many rows there are.
        """
        rows, width = x.shape
        assert width == self.width
        assert x.dtype == self.dtype
        assert bias is None or (bias.shape == (self.out,) and bias.dtype == x.dtype and bias.is_contiguous())
        if not _is_aligned(x):
            x = x.contiguous()
        y = torch.empty(rows, self.out, dtype=x.dtype)
        kernels.product(
            DTYPES[x.dtype], rows, self.out, width, x.data_ptr(), x.stride(0), self.data.data_ptr(),
            0 if bias is None else bias.data_ptr(), False, y.data_ptr(),
        )  # fmt: skip
        return y


def pack(weight: Tensor) -> PackedWeight | None:
    """A copy of `weight` [out, width]; None where the kernel does not take it.

    It takes float32 and bfloat16 (of these an even width) on CPUs.
    """
    out, width = weight.shape
    is_taken = kernels is not None and weight.device.type == "cpu" and weight.dtype in DTYPES
    if not is_taken or (weight.dtype == torch.bfloat16 and width % 2):
        return None
    dtype = DTYPES[weight.dtype]
    data = empty_in_huge_pages((kernels.packed_bytes(dtype, out, width),), torch.uint8)
    return _packed_into(data, weight.detach())


def product_once(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`PackedWeight.product` of a weight that `pack` takes, and that no other product uses."""
    data = torch.empty(kernels.packed_bytes(DTYPES[weight.dtype], *weight.shape), dtype=torch.uint8)
    return _packed_into(data, weight).product(x, bias)


def _packed_into(data: Tensor, weight: Tensor) -> PackedWeight:
    (out, width), (of_rows, of_columns) = weight.shape, weight.stride()
    by_columns = of_rows == 1 and of_columns != 1
    if not by_columns and of_columns != 1:
        weight = weight.contiguous()
        of_rows, of_columns = weight.stride()
    stride = of_columns if by_columns else of_rows
    kernels.pack(DTYPES[weight.dtype], out, width, weight.data_ptr(), stride, by_columns, data.data_ptr())
    return PackedWeight(out, width, weight.dtype, data)


def _is_aligned(x: Tensor) -> bool:
    """Whether every row is contiguous and begins at a multiple of four bytes, in which the kernel reads it."""
    return x.stride(1) == 1 and x.data_ptr() % 4 == 0 and x.stride(0) * x.itemsize % 4 == 0
