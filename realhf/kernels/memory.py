"""Memory of large tensors on the CPU."""

import mmap

import torch
from torch import Tensor

_HUGE_PAGE_BYTES = 2 << 20


def empty_in_huge_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor in pages of 2 MiB where the kernel has them; for what is read here and there.

    Who reads through pages of 4 KiB has an address translated for each of them, and with every first write a fault.
    """
    meta = torch.empty(shape, dtype=dtype, device="meta")
    if meta.nbytes < _HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    area = mmap.mmap(-1, meta.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(area, dtype=dtype).view(shape)
