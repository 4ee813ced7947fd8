"""Memory of large tensors on the CPU."""

import contextlib
import ctypes

import torch
from torch import Tensor

_HUGE_PAGE_BYTES = 2 << 20
_MADV_HUGEPAGE = 14  # of Linux's mman-common.h


def empty_in_huge_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor in pages of 2 MiB where the kernel has them; for what is read here and there.

    Who reads through pages of 4 KiB has an address translated for each of them, and with every first write a fault. The
    memory is malloc's, so that a worker has it again for what comes next, and it is not faulted in once a call.
    """
    memory = torch.empty(shape, dtype=dtype)
    first = -(-memory.data_ptr() // _HUGE_PAGE_BYTES)
    count = (memory.data_ptr() + memory.nbytes) // _HUGE_PAGE_BYTES - first
    if count > 0:
        # A kernel that has none, or takes no advice, changes nothing.
        with contextlib.suppress(OSError, AttributeError):
            address, size_bytes = first * _HUGE_PAGE_BYTES, count * _HUGE_PAGE_BYTES
            ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), _MADV_HUGEPAGE)
    return memory
