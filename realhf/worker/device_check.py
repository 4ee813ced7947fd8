"""Whether a worker is on the hardware of the plan: the launcher may not see the machines of its workers."""

import logging
import socket

import torch

from realhf.base.errors import UserError
from realhf.machine.host import read_host
from realhf.planning.model.hardware import GIB, Hardware, mismatch

logger = logging.getLogger("realhf.worker")


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
