"""Where results can have the same bits under every layout (`reproducible="layout"`). Without torch: the launcher asks
before it starts workers, and each worker for itself."""

import importlib
import platform

from realhf.base.errors import UserError


def has_products() -> bool:
    """Whether this processor, and this build, has the kernels (`realhf.cpu.products`)."""
    try:
        kernels = importlib.import_module("realhf.cpu._cpu")
    except ImportError:  # not built
        return False
    return bool(kernels.has_products())


def check_in_order(threads: int, *, is_here: bool = True) -> None:
    """Raises UserError where results of workers on CPUs would depend on the layout all the same.

    Args:
        threads: a worker's.
        is_here: it runs on this machine, whose processor is asked.
    """
    if is_here and not has_products():
        raise UserError(
            f"reproducible='layout': this processor ({platform.machine()}) has no kernels for it; leave "
            "reproducible='layout' out, or run on processors with AVX-512 and its bfloat16 instructions"
        )
    if threads > 1:
        raise UserError(
            f"reproducible='layout' with {threads} threads in a worker: sums over threads depend on their number; set "
            "OMP_NUM_THREADS=1, and start more workers"
        )
