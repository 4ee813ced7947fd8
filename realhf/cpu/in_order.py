"""Where results can have the same bits under every layout (`reproducible="layout"`). Without torch: the launcher asks
before it starts workers, and each worker for itself."""

import importlib

from realhf.base.errors import UserError


def has_kernels() -> bool:
    """Whether this installation has the kernels (`realhf.cpu.products`)."""
    try:
        importlib.import_module("realhf.cpu._cpu")
    except ImportError:  # not built
        return False
    return True


def check_in_order(threads: int, *, is_here: bool = True) -> None:
    """Raises UserError where results of workers on CPUs would depend on the layout all the same.

    Args:
        threads: a worker's.
        is_here: it runs on this machine, with this installation.
    """
    if is_here and not has_kernels():
        raise UserError(
            "reproducible='layout': realhf is installed here without its C++ kernels, whose sums have one order; leave "
            "reproducible='layout' out, or install it anew with a compiler"
        )
    if threads > 1:
        raise UserError(
            f"reproducible='layout' with {threads} threads in a worker: sums over threads depend on their number; set "
            "OMP_NUM_THREADS=1, and start more workers"
        )
