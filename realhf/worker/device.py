"""The device that a worker's launcher has given to it."""

import os
from collections.abc import Mapping

import torch

from realhf.base.errors import UserError
from realhf.launch.devices import DEVICE_VARIABLE
from realhf.machine.gpus import FOR_THE_CPU, VISIBLE


def own_device(environ: Mapping[str, str] = os.environ) -> torch.device:
    """The one GPU that this process sees, or the CPU with as many threads as a worker has, as the launcher says.

    Nothing else is taken in its place: a worker on the CPU would wait for ever for its peers on GPUs.

    Raises:
        UserError: this process is to have a GPU, and torch does not see exactly one.
    """
    kind = environ[DEVICE_VARIABLE].partition(":")[0]
    if kind == "cpu":
        torch.set_num_threads(int(environ.get("OMP_NUM_THREADS", "1")))
        return torch.device("cpu")
    assert kind == "cuda", environ[DEVICE_VARIABLE]
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if seen != 1:
        raise UserError(
            f"this worker is to have a GPU of its own, {VISIBLE}={environ.get(VISIBLE)!r}, and torch "
            f"{torch.__version__} sees {seen}; try `realhf doctor --gpu` on this machine, or {FOR_THE_CPU} (under "
            "SLURM: give --cpu-only)"
        )
    return torch.device("cuda", 0)


def device_name(device: torch.device) -> str:
    """The name of a GPU as the driver reports it, or "CPU"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
