"""What `realhf doctor` finds out about the GPUs of this machine, before torch is asked."""

import os

from realhf.base.errors import UserError
from realhf.cli.findings import Finding
from realhf.launch.devices import in_words
from realhf.machine.gpus import FOR_THE_CPU, VISIBLE, driver_version, machine_gpus, visible_gpus
from realhf.machine.torch_build import torch_cuda_version

GIB = 2**30


def find_gpus() -> Finding:
    """The GPUs that runs on this machine use, and whether the installed torch can."""
    try:
        gpus = visible_gpus()
        if not gpus:
            why = f"{VISIBLE}={os.environ[VISIBLE]} leaves none" if VISIBLE in os.environ else "no NVIDIA GPU"
            return Finding(state="info", detail=f"{why}: runs compute on the CPU")
        num_devices = sum(len(devices) for devices in machine_gpus())
    except UserError as error:
        return Finding(state="fail", detail=str(error), remedy="`nvidia-smi -L` lists the devices")
    first = gpus[0]
    capability = ".".join(str(number) for number in first.compute_capability)
    chosen = f", {VISIBLE}={os.environ[VISIBLE]}" if VISIBLE in os.environ else ""
    detail = (
        f"{in_words(gpus)} of {min(gpu.memory_bytes for gpu in gpus) / GIB:.1f} GiB, compute capability {capability}, "
        f"driver {driver_version()}; {len(gpus)} of the {num_devices} here{chosen}"
    )
    if torch_cuda_version() is None:
        return Finding(
            state="fail",
            detail=f"{detail}; the installed torch was not built for CUDA",
            remedy=f"install a build that was (https://pytorch.org), or {FOR_THE_CPU}",
        )
    return Finding(state="ok", detail=detail)
