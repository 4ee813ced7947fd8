"""The checks of `gpu_check.py` that no single command of realhf makes: packages, one GPU, graphs and groups of several.

Each prints a line, as `realhf doctor` does; the exit code is 1 if one failed. On a CPU gloo takes NCCL's place.

Command: python scripts/gpu_parts.py PART [--cpu]
"""

import argparse
import sys
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import pynvml

from realhf.cli.doctor import find_torch, gpu_checks, kernel_checks, run_checks
from realhf.cli.doctor_devices import find_ranks
from realhf.cli.findings import Check, Finding
from realhf.cli.output import Output
from realhf.launch.devices import in_words
from realhf.machine.gpus import driver_version, visible_gpus
from realhf.machine.torch_build import torch_cuda_version

# The oldest driver for a torch of each CUDA (NVIDIA's "CUDA Compatibility", minor version compatibility).
LEAST_DRIVERS = {12: 525, 13: 580}
MEGATRON = "pip install 'realhf[gpu]'"
PARTS = ("packages", "one", "graphs", "groups")


def checks_of(part: str, *, on_cpu: bool) -> list[Check]:
    """The checks of one of `PARTS`: of the visible GPUs, or of the CPU."""
    ready = {check.name: check for check in gpu_checks()}
    no_graphs = 'GenerationOptions(decode_graphs="off"), or --ppo.decode-graphs off where a command runs PPO'
    loopback = "see that the loopback interface works (`realhf doctor`) and torch has gloo"
    match part, on_cpu:
        case "packages", _:
            return [
                Check("driver", find_driver, "see that `nvidia-smi` lists the GPUs; install NVIDIA's driver"),
                Check("torch", find_torch, "pip install 'torch>=2.11'"),
                Check("NCCL", find_nccl_version, "install a CUDA build of torch, which brings NCCL (pytorch.org)"),
                *kernel_checks("attention", "cpu" if on_cpu else "cuda"),
                Check("megatron-core", find_megatron, MEGATRON),
                Check("pytest", partial(version, "pytest"), "pip install pytest: the tests of kernels need it"),
            ]
        case "one", False:
            graphs = Check("decode graphs", ready["CUDA graphs"].find, no_graphs)
            return [ready["CUDA"], ready["GPU arithmetic"], graphs]
        case "graphs", False:
            return [Check("NCCL in graphs", ready["CUDA graphs"].find, no_graphs)]
        case "groups", False:
            return [ready["NCCL groups"], ready["GPU reallocation"]]
    names = {"one": ["generation"], "graphs": ["generation"], "groups": ["groups", "reallocation"]}[part]
    processes = 1 if part == "one" else 2
    return [Check(name, partial(find_ranks, name, "gloo", processes), loopback) for name in names]


def find_driver() -> str | Finding:
    """The driver, the GPUs, and whether the driver's CUDA takes the installed torch."""
    gpus, built_for = visible_gpus(), torch_cuda_version()
    if not gpus:
        return Finding("info", "no GPU is visible: everything computes on the CPU")
    pynvml.nvmlInit()
    try:
        number = pynvml.nvmlSystemGetCudaDriverVersion_v2()  # 13020 is CUDA 13.2
    finally:
        pynvml.nvmlShutdown()
    major, minor = number // 1000, number % 1000 // 10
    built = f"torch was built for CUDA {built_for}" if built_for else "torch was built without CUDA"
    detail = f"{driver_version()}, up to CUDA {major}.{minor}; {in_words(gpus)}; {built}"
    remedy = f"install a torch that was built for CUDA {major} (https://pytorch.org/get-started/locally)"
    if built_for is None:
        return Finding("fail", detail, remedy)
    wanted = int(built_for.partition(".")[0])
    if wanted > major:
        newer = f"a driver of version {LEAST_DRIVERS[wanted]} or later" if wanted in LEAST_DRIVERS else "a newer driver"
        return Finding("fail", f"{detail}: the driver is too old for it", f"{remedy}, or {newer}")
    return detail


def find_nccl_version() -> str | Finding:
    import torch
    import torch.distributed as dist

    if not dist.is_nccl_available():
        if not visible_gpus():
            return Finding("info", "this torch has none, and without GPUs nothing needs it")
        raise RuntimeError(f"torch {torch.__version__} is built without NCCL")
    return ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]


def find_megatron() -> str | Finding:
    try:
        return version("megatron-core")
    except PackageNotFoundError:
        return Finding("info", 'not installed: only backend="megatron" needs it', MEGATRON)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--cpu", action="store_true")
    arguments = parser.parse_args()
    return run_checks(checks_of(arguments.part, on_cpu=arguments.cpu), Output())


if __name__ == "__main__":
    sys.exit(main())
