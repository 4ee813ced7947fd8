"""Checks of devices, and of what several processes do together: on the CPU with gloo, on GPUs with NCCL."""

import contextlib
import os
import subprocess
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from realhf.base.code_files import python_command
from realhf.base.errors import UserError
from realhf.cli.findings import Finding
from realhf.launch.devices import devices_of, in_words
from realhf.machine.gpus import FOR_THE_CPU, VISIBLE, driver_version, machine_gpus, visible_gpus
from realhf.machine.torch_build import torch_cuda_version
from realhf.planning.model.hardware import GIB

RANKS_TIMEOUT_S = 300.0  # seconds where nothing else runs; a busy machine may take minutes to start a process
FOUND = "found: "  # libraries may print lines of their own


def find_gpus() -> str | Finding:
    """The GPUs that runs on this machine use, and whether the installed torch can."""
    gpus = visible_gpus()
    if not gpus:
        why = f"{VISIBLE}={os.environ[VISIBLE]} leaves none" if VISIBLE in os.environ else "no NVIDIA GPU"
        return Finding("info", f"{why}: runs compute on the CPU")
    num_devices = sum(len(devices) for devices in machine_gpus())
    capability = ".".join(map(str, gpus[0].compute_capability))
    chosen = f", {VISIBLE}={os.environ[VISIBLE]}" if VISIBLE in os.environ else ""
    detail = (
        f"{in_words(gpus)} of {min(gpu.memory_bytes for gpu in gpus) / GIB:.1f} GiB, compute capability {capability}, "
        f"driver {driver_version()}; {len(gpus)} of the {num_devices} here{chosen}"
    )
    if torch_cuda_version() is None:
        remedy = f"install a build that was (https://pytorch.org), or {FOR_THE_CPU}"
        return Finding("fail", f"{detail}; the installed torch was not built for CUDA", remedy)
    return detail


def find_ranks(check: str, backend: str, num_processes: int) -> str:
    """A check of `realhf.profiling.self_check` by processes that meet as workers do: through a file, with nothing that
    listens; over NCCL each sees a GPU of its own. Raises RuntimeError with the last line of a process that failed,
    TimeoutError if one did not end. None is left."""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    if backend == "gloo":
        env["GLOO_SOCKET_IFNAME"] = "lo"
    devices = devices_of(visible_gpus() if backend == "nccl" else ())
    outputs = []
    with tempfile.TemporaryDirectory(prefix="realhf-doctor-") as folder, contextlib.ExitStack() as ended:
        processes = []
        for rank, device in zip(range(num_processes), devices, strict=False):
            words = (check, backend, str(rank), str(num_processes), str(Path(folder, "store")))
            argv, own = python_command("realhf.profiling.self_check", *words), env | device.environment
            process = subprocess.Popen(argv, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            processes.append(ended.enter_context(process))
            ended.callback(process.kill)
        for rank, process in enumerate(processes):
            who = f"process {rank} of {num_processes}"
            try:
                output, _ = process.communicate(timeout=RANKS_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                raise TimeoutError(f"{who} did not end within {RANKS_TIMEOUT_S:g} s") from None
            if process.returncode:
                last = output.strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
                raise RuntimeError(f"{who}: {last[0]}")
            outputs.append(output)
    return "".join(line.removeprefix(FOUND) for line in outputs[0].splitlines() if line.startswith(FOUND))


def find_cuda() -> str:
    import torch

    if not torch.cuda.is_available():
        built_for = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        raise UserError(f"torch {torch.__version__}, built {built_for}, sees no GPU")
    free = [torch.cuda.mem_get_info(i)[0] / GIB for i in range(torch.cuda.device_count())]
    return f"CUDA {torch.version.cuda}, {len(free)} GPUs with {', '.join(f'{gib:.0f}' for gib in free)} GiB free"


def find_gpu_matmul() -> str:
    """A product in bfloat16 on every GPU, held against the CPU's in float64."""
    import torch

    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(512, 512, generator=generator).bfloat16() for _ in range(2))  # [512, 512]
    expected = a.double() @ b.double()
    num_gpus = torch.cuda.device_count()
    if num_gpus == 0:
        raise RuntimeError("there is no GPU")
    for i in range(num_gpus):
        got = (a.to(f"cuda:{i}") @ b.to(f"cuda:{i}")).double().cpu()
        error = float((got - expected).norm() / expected.norm())
        if not error < 0.01:  # bfloat16 rounds the result to 8 bits
            raise ArithmeticError(f"GPU {i}: a bfloat16 matmul is {error:.1%} off")
    return f"bfloat16 matmul is right on {num_gpus} GPUs"


def find_nccl(check: str) -> str | Finding:
    """A check with one process a GPU, on the largest power of two of them; graphs need one, and take two."""
    import torch
    import torch.distributed as dist

    if not dist.is_nccl_available():
        raise RuntimeError(f"torch {torch.__version__} is built without NCCL")
    num_gpus = torch.cuda.device_count()
    if num_gpus == 0:
        raise RuntimeError("there is no GPU")
    if check == "generation":
        return find_ranks(check, "nccl", min(num_gpus, 2))
    if num_gpus == 1:
        return Finding("info", "one GPU: nothing to talk to")
    found = find_ranks(check, "nccl", 1 << (num_gpus.bit_length() - 1))
    nccl = ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    return f"NCCL {nccl}: {found}"


def find_attention(device: str) -> str | Finding:
    """Which kernels runs on this machine would take."""
    import torch

    from realhf.engine.generate.paged_attention import describe_attention

    if device == "cuda" and not torch.cuda.is_available():
        return Finding("info", "no GPU to choose for")
    return "; ".join(describe_attention(device))


def find_kernel(name: str) -> str | Finding:
    """A kernel of a package, by its word in `REALHF_WITHOUT`: its version, or what takes its place on the GPU."""
    import torch

    from realhf.engine.generate.paged_attention import missing_kernels

    if not torch.cuda.is_available():
        return Finding("info", "no GPU to choose for")
    if missing := missing_kernels("cuda").get(name):
        return Finding("warn", *missing)
    try:
        return version(name)
    except PackageNotFoundError:
        return "nothing is missing"
