"""Checks what runs on this machine need. Exit code 0 if no check failed; every failing line says what to do.

examples:
  realhf doctor
  realhf doctor --runs-dir /scratch/me/runs --gpu
"""

import argparse
import fcntl
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import psutil
from rich.console import Console
from rich.text import Text

from realhf.base.errors import UserError
from realhf.cli.doctor_devices import (
    find_attention,
    find_cuda,
    find_gpu_matmul,
    find_gpus,
    find_kernel,
    find_nccl,
    find_ranks,
)
from realhf.cli.doctor_wire import find_curve, find_host_name, find_keys, find_loopback
from realhf.cli.findings import Check, Finding, State
from realhf.cli.output import Output
from realhf.machine.gpu_kernels import REMEDIES, WITHOUT
from realhf.machine.host import read_host
from realhf.planning.model.hardware import GIB

SLURM_COMMANDS = ("sbatch", "srun", "squeue", "scontrol", "scancel")
STYLES: dict[State, str] = {"ok": "green", "info": "blue", "warn": "yellow", "fail": "bold red"}


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--runs-dir", type=Path, default=Path("runs"), help="where run directories are to lie (default runs)"
    )
    command.add_argument("--gpu", action="store_true", help="also check CUDA, NCCL, reallocation and CUDA graphs")


def execute(arguments: argparse.Namespace) -> int:
    checks = [*base_checks(arguments.runs_dir), *(gpu_checks() if arguments.gpu else ())]
    return run_checks(checks, Output())


def run_checks(checks: Sequence[Check], console: Console) -> int:
    """Prints a line a check as it is done; returns the exit code: 1 if one failed."""
    failed = 0
    for check in checks:
        finding = check.run()
        failed += finding.state == "fail"
        console.print(line(check.name, finding), soft_wrap=True)
    if failed:
        console.print(f"{failed} of {len(checks)} checks failed", style=STYLES["fail"])
    return 1 if failed else 0


def line(name: str, finding: Finding) -> Text:
    """One line of the report, whatever the length of its texts."""
    detail, remedy = " ".join(finding.detail.split()), " ".join(finding.remedy.split())
    text = Text.assemble((f"{finding.state:<5}", STYLES[finding.state]), f"{name:<18}", detail)
    return text.append(f"; remedy: {remedy}" if remedy else "")


def base_checks(runs_dir: Path) -> list[Check]:
    """Checks of every machine that plans or runs."""
    disk = "give a --run-dir on a disk with POSIX modes and locks: a local one, NFS 4, Lustre with flock"
    gloo = "see that the loopback interface works and torch has gloo"
    reinstall = "install the package again in this environment (`make setup`, or pip install -e .)"
    return [
        Check("python", find_python, "use Python 3.11, 3.12 or 3.13"),
        Check("torch", find_torch, "pip install 'torch>=2.11'"),
        Check("GPUs", find_gpus, "see that `nvidia-smi -L` lists the devices"),
        Check("C++ searcher", find_searcher, f"{reinstall}; that compiles it and needs a C++17 compiler such as g++"),
        Check("messages", find_curve, "pip install --force-reinstall 'pyzmq>=26'"),
        Check("loopback", find_loopback, "bring it up with `ip link set lo up`, or give --network-interface to run"),
        Check("host name", find_host_name, "give the machine a name that stands for its address"),
        Check("keys", partial(find_keys, runs_dir), "give a --run-dir on a disk that keeps modes; see messages above"),
        Check("gloo groups", partial(find_ranks, "groups", "gloo", 2), gloo),
        Check("reallocation", partial(find_ranks, "reallocation", "gloo", 2), gloo),
        Check("run directories", partial(find_file_system, runs_dir), disk),
        Check("attention", partial(find_attention, "cpu"), reinstall),
        Check("SLURM", find_slurm, "install the SLURM client commands"),
        Check("cores, memory", find_cores_and_memory, "use a machine whose cores and memory psutil can read"),
    ]


def gpu_checks() -> list[Check]:
    """Further checks for runs on GPUs."""
    nccl = "install a CUDA build of torch with NCCL; NCCL_DEBUG=INFO says more"
    return [
        Check("CUDA", find_cuda, "install the NVIDIA driver and a CUDA build of torch (https://pytorch.org)"),
        Check("GPU arithmetic", find_gpu_matmul, "see `nvidia-smi` for errors and other processes on the GPUs"),
        Check("NCCL groups", partial(find_nccl, "groups"), nccl),
        Check("GPU reallocation", partial(find_nccl, "reallocation"), nccl),
        Check("CUDA graphs", partial(find_nccl, "generation"), 'set decode_graphs="off" in the generation options'),
        *kernel_checks("GPU attention", "cuda"),
    ]


def kernel_checks(name: str, device: str) -> list[Check]:
    """The attention kernels that are taken on a device, under this name, and each of a package that is missing."""
    remedy = f"correct {WITHOUT}, or leave out by it what does not work: {', '.join(REMEDIES)}"
    return [
        Check(name, partial(find_attention, device), remedy),
        *(Check(kernel, partial(find_kernel, kernel), remedy) for kernel in REMEDIES),
    ]


def find_python() -> str:
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        raise UserError(f"{platform.python_version()} is not supported")
    return f"{platform.python_version()} ({sys.executable})"


def find_torch() -> str:
    import torch

    devices = "the CPU"
    if torch.cuda.is_available():
        devices = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    detail = f"{torch.__version__} on {devices}"
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 11):
        raise UserError(f"{detail} is too old")
    return detail


def find_searcher() -> str:
    from realhf.planning import search as searcher

    return f"importable ({Path(searcher.__file__).parent})"


def find_file_system(runs_dir: Path) -> str | Finding:
    """The file system of run directories: atomic renames, modes that keep others out, locks between processes."""
    parent = next(path for path in (runs_dir.absolute(), *runs_dir.absolute().parents) if path.is_dir())
    with tempfile.TemporaryDirectory(prefix=".realhf-doctor-", dir=parent) as name:
        folder = Path(name)
        problems = [problem for check in (_rename_problem, _mode_problem, _lock_problem) if (problem := check(folder))]
    if problems:
        raise UserError(f"{parent}: {'; '.join(problems)}")
    free_gib = shutil.disk_usage(parent).free / GIB
    if free_gib < 1:
        return Finding("warn", f"{parent}: {free_gib:.2f} GiB free", "make room: checkpoints are written there")
    return f"{parent}: atomic rename, modes and locks are kept, {free_gib:.0f} GiB free"


def _rename_problem(folder: Path) -> str:
    old, new = folder / "status.json", folder / ".status.json.part"
    for file in (old, new):
        file.write_text(file.name)
    new.replace(old)
    return "" if old.read_text() == new.name and not new.exists() else "a rename does not replace a file"


def _mode_problem(folder: Path) -> str:
    keys, key = folder / "keys", folder / "keys" / "secret"
    keys.mkdir()
    keys.chmod(0o700)
    os.close(os.open(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    modes = keys.stat().st_mode & 0o777, key.stat().st_mode & 0o777
    return "" if modes == (0o700, 0o600) else f"modes 0700, 0600 became {modes[0]:04o}, {modes[1]:04o}"


def _lock_problem(folder: Path) -> str:
    """Locks keep a second launcher or master out of a run (`RunDirectory.lock`). torch's FileStore, in which the
    workers of a profile meet, needs them too."""
    path = folder / "lock"
    with path.open("w") as first, path.open("w") as second:
        try:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return f"flock does not work ({error.strerror})"
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return ""
    return "flock lets two in at once"


def find_slurm() -> str | Finding:
    missing = [command for command in SLURM_COMMANDS if not shutil.which(command)]
    if missing:
        return Finding("info", f"no {', '.join(missing)}: only --launcher local works from this machine")
    return f"{', '.join(SLURM_COMMANDS)} are here"


def find_cores_and_memory() -> str | Finding:
    host = read_host()
    # Memory that others in a control group use is not subtracted.
    available = min(psutil.virtual_memory().available, host.memory_bytes)
    cores = f"{host.cores} cores" + (f" (limit of {host.cores_limit})" if host.cores_limit else "")
    limit = f" (limit of {host.memory_limit})" if host.memory_limit else ""
    detail = f"{cores}, {available / GIB:.1f} of {host.memory_bytes / GIB:.1f} GiB free{limit}"
    if available < 2 * GIB:
        return Finding("warn", detail, "a worker of a tiny model takes about 0.5 GiB: use fewer workers")
    if host.cores < 2:
        return Finding("warn", detail, "workers share cores and get slow: use as many workers as cores")
    return detail
