"""A stand-in for NVIDIA's driver: `pynvml` answers for devices that are not there."""
# ruff: noqa: N802 (the names are NVIDIA's)

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pynvml
import pytest

from realhf.machine import gpus


@dataclass(frozen=True)
class Device:
    """What the driver says of one GPU. A MIG instance has what `instances` holds, and the rest of its GPU.

    `error`: of every question about it.
    """

    name: str
    memory_mib: int
    capability: tuple[int, int]
    cores: int
    sm_mhz: int
    memory_mhz: int
    bus_width: int
    mig_mode: bool = False
    instances: tuple[tuple[str, str, int], ...] = ()  # UUID, name, MiB
    unknown: frozenset[str] = frozenset()  # questions that this device does not know
    error: int = pynvml.NVML_SUCCESS


# As these report themselves.
H100 = Device("NVIDIA H100 80GB HBM3", 81_559, (9, 0), 16_896, 1980, 2619, 5120)
A100 = Device("NVIDIA A100-SXM4-40GB", 40_960, (8, 0), 6912, 1410, 1215, 5120)
RTX_4090 = Device("NVIDIA GeForce RTX 4090", 24_564, (8, 9), 16_384, 3105, 10_501, 384)
KINDS = (H100, A100, RTX_4090)


def uuid_of(index: int) -> str:
    return f"GPU-{index}a000000-0000-0000-0000-00000000000{index}"


class Nvml:
    """Stands in for the functions of pynvml, as `nvidia-ml-py` declares them; `install` puts them into their place.

    A question that comes before `nvmlInit` or after `nvmlShutdown` is answered as the real library would.
    """

    def __init__(self, devices: Sequence[Device], init_error: int = pynvml.NVML_SUCCESS):
        self._devices = devices
        self._init_error = init_error
        self.num_users = 0  # that have not shut it down

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, function in inspect.getmembers(self, inspect.ismethod):
            if name.startswith("nvml"):
                monkeypatch.setattr(pynvml, name, function)

    def nvmlInit(self):
        _check(self._init_error)
        self.num_users += 1

    def nvmlShutdown(self):
        _check(pynvml.NVML_SUCCESS if self.num_users else pynvml.NVML_ERROR_UNINITIALIZED)
        self.num_users -= 1

    def nvmlSystemGetDriverVersion(self):
        return self._answer("580.95.05")

    def nvmlSystemGetCudaDriverVersion_v2(self):
        return self._answer(13000)

    def nvmlDeviceGetCount(self):
        return self._answer(len(self._devices))

    def nvmlDeviceGetHandleByIndex(self, index):
        if not 0 <= index < len(self._devices):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        _check(self._devices[index].error)
        return self._answer((index, None))

    def nvmlDeviceGetUUID(self, handle):
        index, instance = handle
        device = self._devices[index]
        return self._answer(uuid_of(index) if instance is None else device.instances[instance][0])

    def nvmlDeviceGetName(self, handle):
        index, instance = handle
        device = self._devices[index]
        return self._answer(device.name if instance is None else device.instances[instance][1])

    def nvmlDeviceGetMemoryInfo(self, handle, version=None):
        index, instance = handle
        device = self._devices[index]
        if "memory_mib" in device.unknown:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        mib = device.memory_mib if instance is None else device.instances[instance][2]
        return self._answer(pynvml.c_nvmlMemory_t(total=mib * 2**20, free=mib * 2**20, used=0))

    def nvmlDeviceGetCudaComputeCapability(self, handle):
        return self._of_gpu(handle, "capability")

    def nvmlDeviceGetNumGpuCores(self, device):
        return self._of_gpu(device, "cores")

    def nvmlDeviceGetMemoryBusWidth(self, device):
        return self._of_gpu(device, "bus_width")

    def nvmlDeviceGetMaxClockInfo(self, handle, type):
        return self._of_gpu(handle, {pynvml.NVML_CLOCK_SM: "sm_mhz", pynvml.NVML_CLOCK_MEM: "memory_mhz"}[type])

    def nvmlDeviceGetMigMode(self, device):
        mode = int(self._of_gpu(device, "mig_mode"))
        return [mode, mode]

    def nvmlDeviceGetMaxMigDeviceCount(self, device):
        return self._answer(7)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device, index):
        if index >= len(self._devices[device[0]].instances):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return self._answer((device[0], index))

    def _of_gpu(self, handle, field):
        index, instance = handle
        if instance is not None or field in self._devices[index].unknown:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return self._answer(getattr(self._devices[index], field))

    def _answer(self, value):
        _check(pynvml.NVML_SUCCESS if self.num_users else pynvml.NVML_ERROR_UNINITIALIZED)
        return value


def _check(code: int) -> None:
    if code != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(code)


def stand_in(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    devices: Sequence[Device],
    visible: str | None = None,
    init_error: int = pynvml.NVML_SUCCESS,
) -> Nvml:
    """Makes this machine one with these GPUs, whose device files lie in `folder`, and `CUDA_VISIBLE_DEVICES`."""
    for index in range(len(devices)):
        (folder / f"nvidia{index}").touch()
    monkeypatch.setattr(gpus, "DEVICE_FILES", folder)
    monkeypatch.delenv(gpus.ORDER, raising=False)
    if visible is None:
        monkeypatch.delenv(gpus.VISIBLE, raising=False)
    else:
        monkeypatch.setenv(gpus.VISIBLE, visible)
    nvml = Nvml(devices, init_error)
    nvml.install(monkeypatch)
    return nvml
