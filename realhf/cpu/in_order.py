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


def check_in_order(gpu: str | None, threads: int, *, is_here: bool = True) -> None:
    """Raises UserError where a worker's results would depend on the layout all the same.

    Args:
        gpu: the name of its device, where that is a GPU.
        threads: its number of threads.
        is_here: it runs on this machine, whose processor is asked.
    """
    remedy = "leave reproducible='layout' out, or run on processors with AVX-512 and its bfloat16 instructions"
    if gpu is not None:
        raise UserError(f"reproducible='layout' on {gpu}: its kernels for GPUs are not written; {remedy}")
    if is_here and not has_products():
        raise UserError(f"reproducible='layout': this processor ({platform.machine()}) has no kernels for it; {remedy}")
    if threads > 1:
        raise UserError(
            f"reproducible='layout' with {threads} threads in a worker: sums over threads depend on their number; set "
            "OMP_NUM_THREADS=1, and start more workers"
        )
