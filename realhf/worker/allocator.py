"""How a worker's process deals with host memory."""

import contextlib
import ctypes

# Parameters of glibc's mallopt (malloc.h).
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_NEVER = 2**31 - 1
_TOP_PAD_BYTES = 64 * 2**20


def give_back_freed_memory() -> None:
    """Returns the free memory that malloc keeps, once: after a start, the memory that filled the models is not needed
    again."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def keep_freed_memory() -> bool:
    """Makes malloc keep freed memory for the next step, and not give it back to the kernel. Returns whether it will.

    A training step frees its activations and allocates as many again. Given back and fetched anew, every
    page is zeroed and faulted in once a step: a small model's step on the CPU took 1.15 to 1.35 times as long.
    Only glibc is known to have these options; elsewhere nothing changes.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    options = ((_M_MMAP_THRESHOLD, _NEVER), (_M_TRIM_THRESHOLD, _NEVER), (_M_TOP_PAD, _TOP_PAD_BYTES))
    accepted = [mallopt(option, value) == 1 for option, value in options]  # all of them are asked
    return all(accepted)
