"""Memory of large tensors on the CPU."""

import contextlib
import ctypes

import torch
from torch import Tensor

_HUGE_PAGE_BYTES = 2 << 20
_MADV_HUGEPAGE = 14  # from Linux's mman-common.h


def empty_in_huge_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor in pages of 2 MiB, if the kernel has them; for memory that is read at scattered places.

    With pages of 4 KiB every page read costs an address translation, and every first write a page fault. The memory is
    malloc's: it is used again by the next calls, and need not be faulted in again.
    """
    memory = torch.empty(shape, dtype=dtype)
    first = -(-memory.data_ptr() // _HUGE_PAGE_BYTES)
    count = (memory.data_ptr() + memory.nbytes) // _HUGE_PAGE_BYTES - first
    if count > 0:
        # Without huge pages, or if the kernel refuses, nothing changes.
        with contextlib.suppress(OSError, AttributeError):
            address, size_bytes = first * _HUGE_PAGE_BYTES, count * _HUGE_PAGE_BYTES
            ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), _MADV_HUGEPAGE)
    return memory
