"""Pages of the host's memory that a tensor gives back while it keeps its addresses."""

import contextlib
import ctypes
import mmap

_MADV_DONTNEED = 4  # from Linux's mman-common.h


HUGE_PAGE_BYTES = 2 << 20


def give_back(begin: int, end: int, page_bytes: int = mmap.PAGESIZE) -> int:
    """Gives the whole pages between two addresses back to the kernel; later they are zeros, in new pages.

    The memory is malloc's, private to the process; what it holds must not be needed any more. Returns where the pages
    end: from there on nothing was given back.
    """
    first, last = -(-begin // page_bytes) * page_bytes, end // page_bytes * page_bytes
    if last <= first:
        return begin
    # Without this call, or if the kernel refuses, the memory stays.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_DONTNEED)
    return last
