"""The hardware of this machine, for which plans are made by default."""

import os
from collections.abc import Mapping

import msgspec

from realhf.architecture.model import DType
from realhf.base.errors import UserError
from realhf.machine.gpus import Gpu, visible_gpus
from realhf.machine.host import Host, read_host, threads_given
from realhf.planning.model.descriptions import load_hardware, presets
from realhf.planning.model.hardware import GIB, Hardware, device_kind, mismatch

CPU = "cpu"
FITTED_GPU = "h100"

# Memory of processes beside models and data. A worker's program (Python, torch, gloo): 0.24 GiB after its imports,
# more with what it allocates on the way. The launcher and the master take 0.1 GiB each; the system wants the rest.
PROGRAM_BYTES = round(0.4 * GIB)
SYSTEM_BYTES = GIB

# A GPU is counted with so much of its memory as the descriptions of the package are (80e9 bytes of the 85.5e9 of an
# "80GB" H100): the rest is for CUDA's context, the workspaces of its libraries and fragments.
COUNTED_OF_GPU = 0.93

# FLOP of a CUDA core's share of its multiprocessor in a cycle, dense, by compute capability (least first): the tensor
# cores' products of bfloat16 with sums in float32, where there are such; fused multiply-adds in float32, since the
# engine computes products of float32 in float32; float64 with the tensor cores of 8.0 and 9.0. From NVIDIA's
# architecture whitepapers: Volta (64 cores a multiprocessor), Turing, A100 (1,024 FMA of tensor cores a multiprocessor
# of 64 cores), GA102 and Ada (512 of 128), H100 (2,048 of 128), Blackwell (4,096 of 128; RTX Blackwell 512 of 128).
FLOP_PER_CORE: dict[tuple[int, int], dict[DType, float]] = {
    (0, 0): {"bfloat16": 2, "float32": 2, "float64": 1 / 16},
    (7, 0): {"bfloat16": 2, "float32": 2, "float64": 1},
    (7, 5): {"bfloat16": 2, "float32": 2, "float64": 1 / 16},
    (8, 0): {"bfloat16": 32, "float32": 2, "float64": 2},
    (8, 6): {"bfloat16": 8, "float32": 2, "float64": 1 / 32},
    (9, 0): {"bfloat16": 32, "float32": 2, "float64": 2},
    (10, 0): {"bfloat16": 64, "float32": 2, "float64": 1},
    (12, 0): {"bfloat16": 8, "float32": 2, "float64": 1 / 32},
}
# These sum products of bfloat16 in float32 at half the rate of the other chips of their generations (the same papers).
HALVED = "GeForce"

# Peaks of the GPU whose rates were fitted, as it reports them: 16,896 cores at 1,980 MHz; 5,120 bits at 2,619 MHz, two
# transfers a cycle.
FITTED_PRODUCTS = 16_896 * 1.98e9 * 32
FITTED_MEMORY = 2 * 2.619e9 * 5120 / 8

# Devices of a node where no link is known: PCI Express 4 with 16 lanes, by way of the host.
PCIE = {"intra_node_bandwidth": 1.0e10, "intra_node_latency_s": 1.0e-5, "host_bandwidth": 2.4e10}


def hardware_here() -> Hardware:
    """`gpus_here`, else the CPU with the memory and the cores that all workers share (`divided`)."""
    return gpus_here() or cpu_hardware(read_host())


def gpus_here(kind: str | None = None) -> Hardware | None:
    """The visible GPUs, if any; only if they are of `kind`, where that is given. Raises UserError as `visible_gpus`, or
    for GPUs that cannot be described."""
    gpus = visible_gpus()
    is_wanted = bool(gpus) and kind in (None, device_kind(gpus[0].name))
    return gpu_hardware(gpus[0], len(gpus)) if is_wanted else None


def gpu_hardware(gpu: Gpu, devices_per_node: int = 1) -> Hardware:
    """The package's description of such GPUs, else `described`; the name and the memory are what they report."""
    known = next((preset for preset in presets() if preset.device_names and preset.describes(gpu.name)), None)
    text = f"{gpu.name}, {gpu.memory_bytes / GIB:.1f} GiB reported"
    if known:
        hardware, text = known, f"{text}, else as {known.name}"
    else:
        hardware = described(gpu, load_hardware(FITTED_GPU))
        text = f"{text}; no preset knows it: described from what it reports, `realhf profile` measures it"
    return msgspec.structs.replace(
        hardware,
        name=device_kind(gpu.name),
        description=text,
        device_names=(gpu.name,),
        device_memory_bytes=int(COUNTED_OF_GPU * gpu.memory_bytes),
        devices_per_node=devices_per_node,
    )


def described(gpu: Gpu, base: Hardware) -> Hardware:
    """A GPU that no description knows, by what its driver reports; the costs that software sets are those of `base`,
    the fitted one.

    Peaks are cores x clock x operations of a core in a cycle, times what `base` reaches of its own. Nothing is said of
    how sure that is. Raises UserError if the driver does not report what that needs.
    """
    if gpu.num_cores is None or gpu.clock_hz is None or gpu.memory_bandwidth is None:
        raise UserError(
            f"{gpu.name}: no description is of it, and its driver does not report its cores, clock and memory bus; "
            "write a description and give it with --hardware FILE.yaml (profiles/README.md has the fields)"
        )
    known = max(capability for capability in FLOP_PER_CORE if capability <= gpu.compute_capability)
    rates = dict(FLOP_PER_CORE[known])
    if HALVED in gpu.name and rates["bfloat16"] == 8:
        rates["bfloat16"] = 4
    cycles = gpu.num_cores * gpu.clock_hz
    return msgspec.structs.replace(
        base,
        matmul_flops={dtype: base.flops("bfloat16") / FITTED_PRODUCTS * cycles * flop for dtype, flop in rates.items()},
        memory_bandwidth=base.memory_bandwidth / FITTED_MEMORY * gpu.memory_bandwidth,
        inter_node_send_bandwidth=None,
        uncertainty=None,
        **PCIE,
    )


def cpu_hardware(host: Host) -> Hardware:
    """A machine's cores and memory, all of them; workers share them (`divided`)."""
    limits = " and ".join(dict.fromkeys(filter(None, (host.memory_limit, host.cores_limit))))
    has = f"this machine's {host.memory_bytes / GIB:.1f} GiB and {host.cores} core{'s' if host.cores > 1 else ''}"
    return msgspec.structs.replace(
        load_hardware(CPU),
        description=f"{has}, limited by {limits}" if limits else has,
        host_memory_bytes=host.memory_bytes,
        host_cores=host.cores,
    )


def divided(
    hardware: Hardware, num_workers: int, threads: int | None = None, environ: Mapping[str, str] = os.environ
) -> Hardware:
    """The share of each of `num_workers` workers in a host; hardware that is not shared stays as it is.

    A worker's threads are OMP_NUM_THREADS, else `threads`, else its part of the cores. Matrix products use all of
    them; what is bound by memory is taken to be as fast as on one. The name tells several threads, since profiles
    are measured with them.
    Raises UserError if the programs of so many workers leave no memory for models.
    """
    if hardware.host_cores is not None:
        threads = threads_given(environ) or threads or max(1, hardware.host_cores // num_workers)
        name = hardware.name.removesuffix(f"-{hardware.threads}-threads")
        hardware = msgspec.structs.replace(
            hardware,
            name=f"{name}-{threads}-threads" if threads > 1 else name,
            threads=threads,
            matmul_flops={dtype: rate / hardware.threads * threads for dtype, rate in hardware.matmul_flops.items()},
        )
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


def check_here(hardware: Hardware, *, is_given: bool) -> None:
    """Raises UserError if the workers of this machine would not be on such hardware, which is given by --hardware or
    what a run was planned for before."""
    gpus = visible_gpus()
    name, memory_bytes = (gpus[0].name, gpus[0].memory_bytes) if gpus else (None, 0)
    problem = mismatch(hardware, name, memory_bytes)
    if not problem:
        return
    remedies = ["leave --hardware out" if is_given else f"give --hardware {device_kind(name) if name else CPU}"]
    if not hardware.is_gpu:
        remedies.append("set CUDA_VISIBLE_DEVICES= (to nothing) to run on the CPU")
    raise UserError(f"{problem} on this machine; {', or '.join(remedies)}, or predict only, with `realhf plan`")
