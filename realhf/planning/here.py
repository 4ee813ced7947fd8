"""The hardware of this machine: what a plan is made for where nobody says otherwise."""

import os
from collections.abc import Mapping

import msgspec

from realhf.base.errors import UserError
from realhf.machine.gpus import Gpu, count_gpus, visible_gpus
from realhf.machine.host import Host, read_host
from realhf.planning.model.descriptions import load_hardware, presets
from realhf.planning.model.hardware import GIB, Hardware, device_kind, mismatch
from realhf.planning.model.reported import described

CPU = "cpu"
FITTED_GPU = "h100"

# What processes take beside models and data. A worker's program (Python, torch, gloo): 0.24 GiB after its imports,
# more with what it allocates on the way. The launcher and the master take 0.1 GiB each; the system wants the rest.
PROGRAM_BYTES = round(0.4 * GIB)
SYSTEM_BYTES = GIB

# A GPU is counted with so much of its memory as the descriptions of the package are (80e9 bytes of the 85.5e9 of an
# "80GB" H100): the rest is for CUDA's context, the workspaces of its libraries and fragments.
COUNTED_OF_GPU = 0.93


def local_devices() -> int:
    """The number of GPUs that a run on this machine uses, or of its cores where there is none."""
    return count_gpus() or read_host().cores


def hardware_here(environ: Mapping[str, str] = os.environ) -> Hardware:
    """The GPUs that are visible, else the CPU with the memory and the cores that all workers share (`divided`).

    Raises:
        UserError: as `visible_gpus`, or the GPUs are of a kind that cannot be described.
    """
    gpus = visible_gpus(environ)
    return gpu_hardware(gpus[0], len(gpus)) if gpus else cpu_hardware(read_host())


def gpu_hardware(gpu: Gpu, devices_per_node: int = 1) -> Hardware:
    """The description of such GPUs, under their real name and with the memory that they report.

    That of the package which names the device, else one from what the driver reports.
    """
    known = next((preset for preset in presets() if preset.device_names and preset.describes(gpu.name)), None)
    memory = f"{gpu.memory_bytes / GIB:.1f} GiB reported"
    if known:
        hardware, text = known, f"{gpu.name}, {memory}, else as {known.name}"
    else:
        hardware = described(gpu, load_hardware(FITTED_GPU))
        text = f"{gpu.name}, {memory}; no preset knows it: described from what it reports, `realhf profile` measures it"
    return msgspec.structs.replace(
        hardware,
        name=device_kind(gpu.name),
        description=text,
        device_names=(gpu.name,),
        device_memory_bytes=int(COUNTED_OF_GPU * gpu.memory_bytes),
        devices_per_node=devices_per_node,
    )


def cpu_hardware(host: Host) -> Hardware:
    """A machine's cores and memory, which are still to be divided among workers."""
    limits = " and ".join(dict.fromkeys(filter(None, (host.memory_limit, host.cores_limit))))
    has = f"this machine's {host.memory_bytes / GIB:.1f} GiB and {host.cores} core{'s' if host.cores > 1 else ''}"
    return msgspec.structs.replace(
        load_hardware(CPU),
        description=f"{has}, limited by {limits}" if limits else has,
        host_memory_bytes=host.memory_bytes,
        host_cores=host.cores,
    )


def divided(hardware: Hardware, num_workers: int, environ: Mapping[str, str] = os.environ) -> Hardware:
    """What each of `num_workers` workers has of a host that they share; nothing changes where they share none.

    A worker has its part of the cores as threads, unless the user's OMP_NUM_THREADS says otherwise. Products of
    matrices go over all threads; what is bound by memory is taken to be as fast as on one. Where a worker has
    several threads the name says so, and with it the folder of the profiles that are measured with them.

    Raises:
        UserError: the programs of so many workers leave no memory for models.
    """
    if hardware.host_cores is not None:
        given = environ.get("OMP_NUM_THREADS", "").partition(",")[0]
        threads = int(given) if given.isdecimal() and int(given) else max(1, hardware.host_cores // num_workers)
        hardware = _with_threads(hardware, threads)
    if hardware.host_memory_bytes is None:
        return hardware
    share = (hardware.host_memory_bytes - SYSTEM_BYTES) // num_workers - PROGRAM_BYTES
    if share <= 0:
        raise UserError(
            f"{hardware.description} leave nothing for the models of {num_workers} workers, whose programs take "
            f"{PROGRAM_BYTES / GIB:.1f} GiB each beside {SYSTEM_BYTES / GIB:.1f} GiB of the system; give a smaller "
            "--num-workers, or the memory of each with --memory-gb"
        )
    return msgspec.structs.replace(hardware, device_memory_bytes=share)


def check_here(hardware: Hardware, *, is_given: bool, environ: Mapping[str, str] = os.environ) -> None:
    """Raises UserError if the workers of this machine would not be on such hardware.

    `is_given`: by --hardware; else it is what a run was planned for before.
    """
    gpus = visible_gpus(environ)
    name, memory_bytes = (gpus[0].name, gpus[0].memory_bytes) if gpus else (None, 0)
    problem = mismatch(hardware, name, memory_bytes)
    if not problem:
        return
    remedies = ["leave --hardware out" if is_given else f"give --hardware {device_kind(name) if name else CPU}"]
    if not hardware.is_gpu:
        remedies.append("set CUDA_VISIBLE_DEVICES= (to nothing) to run on the CPU")
    raise UserError(f"{problem} on this machine; {', or '.join(remedies)}, or predict only, with `realhf plan`")


def _with_threads(hardware: Hardware, threads: int) -> Hardware:
    base = hardware.name.removesuffix(_threads_suffix(hardware.threads))
    return msgspec.structs.replace(
        hardware,
        name=base + _threads_suffix(threads),
        threads=threads,
        matmul_flops={dtype: rate / hardware.threads * threads for dtype, rate in hardware.matmul_flops.items()},
    )


def _threads_suffix(threads: int) -> str:
    return f"-{threads}-threads" if threads > 1 else ""
