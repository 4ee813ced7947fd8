"""The device that a worker's launcher has given to it, and whether it is the plan's: the launcher may not see the
machines of its workers."""

import logging
import os
import socket
from collections.abc import Mapping

import torch

from realhf.base.errors import UserError
from realhf.launch.devices import DEVICE_VARIABLE
from realhf.machine.gpus import FOR_THE_CPU, VISIBLE
from realhf.machine.host import read_host, threads_given
from realhf.planning.model.hardware import GIB, Hardware, mismatch

logger = logging.getLogger("realhf.worker")


def own_device(environ: Mapping[str, str] = os.environ) -> torch.device:
    """The one GPU that this process sees, or the CPU with as many threads as a worker has, as the launcher says.

    Nothing else is taken in its place: a worker on the CPU would wait for ever for its peers on GPUs.

    Raises:
        UserError: this process is to have a GPU, and torch does not see exactly one.
    """
    kind = environ[DEVICE_VARIABLE].partition(":")[0]
    if kind == "cpu":
        torch.set_num_threads(threads_given(environ) or 1)
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


def check_device(hardware: Hardware | None, rank: int, device: torch.device) -> None:
    """A worker's device is of the kind that its run was planned for, with the memory that the plan counts on.

    Memory of the host is only warned of: it may have been given on purpose (--memory-gb), and there may be swap.

    Raises:
        UserError: it is not; the text names the worker, its host, both devices and a remedy.
    """
    if hardware is None:
        return  # another version planned the run
    name, memory_bytes = found_device(device)
    problem = mismatch(hardware, name, memory_bytes)
    if problem:
        raise UserError(
            f"worker {rank} on {socket.gethostname()}: {problem}; run on the devices that were planned for, or plan "
            "for these: --hardware NAME, or the path of a description"
        )
    if name is None and hardware.device_memory_bytes > memory_bytes:
        logger.warning(
            "the plan counts on %.1f GiB a worker, and this machine has %.1f GiB",
            hardware.device_memory_bytes / GIB,
            memory_bytes / GIB,
        )


def found_device(device: torch.device) -> tuple[str | None, int]:
    """Name and memory in bytes of a GPU as the driver reports them; for the CPU, None and the memory of the host."""
    if device.type != "cuda":
        return None, read_host().memory_bytes
    properties = torch.cuda.get_device_properties(device)
    return properties.name, properties.total_memory
