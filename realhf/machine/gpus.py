"""The NVIDIA GPUs of this machine, and which of them `CUDA_VISIBLE_DEVICES` leaves to a run.

They are read through NVML, the library of NVIDIA's driver: neither CUDA nor torch is started for it.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pynvml

from realhf.base.errors import UserError

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
# No device at all. SLURM writes the last one into a job that was given no GPU.
NO_DEVICES = frozenset({"", "-1", "NoDevFiles"})
FOR_THE_CPU = f"set {VISIBLE}= (to nothing) for a run on the CPU"
DEVICE_FILES = Path("/dev")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One device that CUDA can run on: a GPU, or a MIG instance of one.

    token: names it in `CUDA_VISIBLE_DEVICES`, for a worker that gets this device alone.
    num_cores: CUDA cores; clock_hz: the highest clock of its multiprocessors; memory_bandwidth: bytes a second, from
        the width and the highest clock of the memory's bus. Each is None if the driver does not report it.
    """

    token: str
    uuid: str
    name: str
    memory_bytes: int
    compute_capability: tuple[int, int]
    num_cores: int | None
    clock_hz: float | None
    memory_bandwidth: float | None

    @property
    def is_mig(self) -> bool:
        """Whether it is a MIG instance, a slice of a GPU."""
        return self.uuid.startswith("MIG-")


# The devices by the number of their GPU: the GPU itself, or its MIG instances.
Machine = tuple[tuple[Gpu, ...], ...]


def visible_gpus() -> tuple[Gpu, ...]:
    """The GPUs that a run on this machine uses, in the order of `CUDA_VISIBLE_DEVICES`; all if it is not set.

    The values mean what NVIDIA says (CUDA Programming Guide, "CUDA Environment Variables"): numbers of GPUs, UUIDs or
    their beginnings. Tokens are the user's, else UUIDs, which do not depend on `CUDA_DEVICE_ORDER`. A device that CUDA
    would silently hide is an error here.

    Raises:
        UserError: the variable names a missing device or names one twice, its numbers are ambiguous, the devices are of
            several kinds, or the driver does not work.
    """
    text = os.environ.get(VISIBLE)
    if text is not None and text.strip() in NO_DEVICES:
        return ()
    machine = machine_gpus()
    gpus = tuple(gpu for devices in machine for gpu in devices)
    if text is not None:
        gpus = _named(text, machine)
    _check_kinds(gpus)
    if len(gpus) > 1 and any(gpu.is_mig for gpu in gpus):
        raise UserError(
            f"{len(gpus)} MIG instances are visible, but NCCL does not connect them; "
            f"choose one with {VISIBLE}={gpus[0].token}"
        )
    return gpus


def machine_gpus() -> Machine:
    """The devices of this machine by the number of their GPU in `nvidia-smi`; none without a driver.

    Raises:
        UserError: there are devices, but the driver does not answer for them.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        files = device_files()
        if not files:
            return ()
        raise UserError(
            f"this machine has {files[0]}, but NVML, the library of NVIDIA's driver, says: {error}; see that "
            "`nvidia-smi` works (after an update of the driver restart the machine; give a container the driver's "
            f"utilities), or {FOR_THE_CPU}"
        ) from None
    try:
        found = map(_devices, range(pynvml.nvmlDeviceGetCount()))
        return tuple(devices for devices in found if devices is not None)
    finally:
        pynvml.nvmlShutdown()


def driver_version() -> str:
    """The version of NVIDIA's driver, such as 580.95.05, on a machine with GPUs."""
    pynvml.nvmlInit()
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()


def device_files() -> list[Path]:
    """The files through which the driver offers GPUs, such as /dev/nvidia0."""
    found = (path for path in DEVICE_FILES.glob("nvidia*") if path.name.removeprefix("nvidia").isdigit())
    return sorted(found)


def _devices(index: int) -> tuple[Gpu, ...] | None:
    """The GPU of this number, or its MIG instances; None where this process may not use it."""
    try:
        gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
        mig_mode = _reported(pynvml.nvmlDeviceGetMigMode, gpu)  # now, and after the next reset
        if mig_mode and mig_mode[0] == pynvml.NVML_DEVICE_MIG_ENABLE:
            return _instances(gpu)
        width = _reported(pynvml.nvmlDeviceGetMemoryBusWidth, gpu)  # bits
        memory_mhz = _reported(pynvml.nvmlDeviceGetMaxClockInfo, gpu, pynvml.NVML_CLOCK_MEM)
        return (
            replace(
                _read(gpu, parent=gpu),
                num_cores=_reported(pynvml.nvmlDeviceGetNumGpuCores, gpu),
                # Two transfers a cycle.
                memory_bandwidth=2e6 * memory_mhz * width / 8 if memory_mhz and width else None,
            ),
        )
    except pynvml.NVMLError_NoPermission:
        return None  # NVML counts the GPUs that a container or a job was not given
    except pynvml.NVMLError as error:
        raise UserError(f"GPU {index} cannot be read ({error}); see `nvidia-smi`, or {FOR_THE_CPU}") from None


def _instances(gpu: Any) -> tuple[Gpu, ...]:
    found = []
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        try:
            instance = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)
        except pynvml.NVMLError_NotFound:
            continue
        found.append(_read(instance, parent=gpu))
    return tuple(found)


def _read(device: Any, parent: Any) -> Gpu:
    """The fields that a GPU and its MIG instances have in common."""
    clock_mhz = _reported(pynvml.nvmlDeviceGetMaxClockInfo, parent, pynvml.NVML_CLOCK_SM)
    uuid = pynvml.nvmlDeviceGetUUID(device)
    memory = _reported(pynvml.nvmlDeviceGetMemoryInfo, device)
    return Gpu(
        token=uuid,
        uuid=uuid,
        name=pynvml.nvmlDeviceGetName(device),
        # A GPU without memory of its own (NVIDIA GB10, Jetson) computes in its host's.
        memory_bytes=memory.total if memory else psutil.virtual_memory().total,
        compute_capability=pynvml.nvmlDeviceGetCudaComputeCapability(parent),
        num_cores=None,
        clock_hz=1e6 * clock_mhz if clock_mhz else None,
        memory_bandwidth=None,
    )


def _reported(query: Callable[..., Any], *arguments: Any) -> Any:
    """NVML's answer; None if the device or the driver does not support the query."""
    try:
        return query(*arguments)
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound):
        return None


def _named(text: str, machine: Machine) -> tuple[Gpu, ...]:
    """The devices of `CUDA_VISIBLE_DEVICES=text`, each with the token that the user gave it."""
    tokens = [token.strip() for token in text.split(",")]
    kinds = {gpu.name for devices in machine for gpu in devices}
    if len(kinds) > 1 and os.environ.get(ORDER) != "PCI_BUS_ID" and any(token.isdecimal() for token in tokens):
        raise UserError(
            f"{VISIBLE}={text}: CUDA numbers GPUs of several kinds ({', '.join(sorted(kinds))}) by speed, so that the "
            f"numbers are not those of `nvidia-smi`; set {ORDER}=PCI_BUS_ID besides, or name them by UUID "
            "(`nvidia-smi -L`)"
        )
    gpus: list[Gpu] = []
    for token in tokens:
        try:
            gpu = _find(token, machine)
        except UserError as error:
            raise UserError(
                f"{VISIBLE}={text}: {error}; CUDA hides such an entry and all after it. This machine has "
                f"{_inventory(machine)}; name devices of these, unset the variable for all, or {FOR_THE_CPU}"
            ) from None
        if any(gpu.uuid == other.uuid for other in gpus):
            raise UserError(
                f"{VISIBLE}={text}: {token!r} names a device a second time; CUDA then shows none. Name each once"
            )
        gpus.append(replace(gpu, token=token))
    return tuple(gpus)


def _find(token: str, machine: Machine) -> Gpu:
    """The device that an entry of `CUDA_VISIBLE_DEVICES` names. Raises UserError if it names none, or several."""
    if token.isdecimal():
        if int(token) >= len(machine):
            raise UserError(f"there is no GPU {token}")
        match machine[int(token)]:
            case [gpu] if not gpu.is_mig:
                return gpu
        raise UserError(f"GPU {token} is in MIG mode, where instances are to be named")
    if not token.startswith(("GPU-", "MIG-")):
        raise UserError(f"{token!r} is neither the number nor the UUID of a device")
    found = [gpu for devices in machine for gpu in devices if gpu.uuid.startswith(token)]
    if len(found) != 1:
        raise UserError(f"{token} is the beginning of {len(found) or 'no'} UUID{'s' if found else ''}")
    return found[0]


def _inventory(machine: Machine) -> str:
    """The devices of this machine in words."""
    if not machine:
        return "no NVIDIA GPU"
    return "; ".join(
        f"{index}: {', '.join(f'{gpu.name} ({gpu.uuid})' for gpu in devices) or 'MIG mode without instances'}"
        for index, devices in enumerate(machine)
    )


def _check_kinds(gpus: Sequence[Gpu]) -> None:
    kinds: dict[str, list[str]] = {}
    for gpu in gpus:
        kinds.setdefault(gpu.name, []).append(gpu.token)
    if len(kinds) > 1:
        found = "; ".join(f"{len(tokens)} x {name} with {VISIBLE}={','.join(tokens)}" for name, tokens in kinds.items())
        raise UserError(f"a run needs GPUs of one kind, and {len(kinds)} kinds are visible; choose one: {found}")
