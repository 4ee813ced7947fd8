"""The cores and the memory of this machine."""

import os


def count_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0))
