"""`realhf doctor`: what this machine has of what a run needs, a line a check, and the remedy of what fails."""

import argparse
import contextlib
import fcntl
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import psutil
import zmq
from rich.console import Console
from rich.text import Text

DESCRIPTION = (
    """Checks what runs on this machine need. Exit code 0 if no check failed; every failing line says what to do."""
)

EXAMPLE = """examples:
  realhf doctor
  realhf doctor --runs-dir /scratch/me/runs --gpu"""

COLLECTIVE_TIMEOUT_S = 120.0
SLURM_COMMANDS = ("sbatch", "srun", "squeue", "scontrol", "scancel")
MIN_TORCH = (2, 11)
GIB = 2**30

State = Literal["ok", "info", "warn", "fail"]
STYLES: dict[State, str] = {"ok": "green", "info": "blue", "warn": "yellow", "fail": "bold red"}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one check found. What fails or is to be warned of has a remedy."""

    state: State
    detail: str
    remedy: str = ""

    def __post_init__(self) -> None:
        assert self.remedy or self.state in ("ok", "info"), f"no remedy for {self.detail!r}"


@dataclass(frozen=True)
class Check:
    """A name for the line, and what to do for it. What `find` raises counts as a failure with `remedy`."""

    name: str
    find: Callable[[], Finding]
    remedy: str

    def run(self) -> Finding:
        try:
            return self.find()
        except Exception as error:  # whatever is wrong with the machine is what this command is to say
            text = str(error).strip() or "no message"
            return Finding(state="fail", detail=f"{type(error).__name__}: {text}", remedy=self.remedy)


def add_command(commands: Any) -> None:
    command = commands.add_parser(
        "doctor",
        help="check what this machine has",
        description=DESCRIPTION,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "--runs-dir", type=Path, default=Path("runs"), help="where run directories are to lie (default runs)"
    )
    command.add_argument("--gpu", action="store_true", help="also check CUDA, NCCL and attention on every GPU here")
    command.set_defaults(execute=execute, takes_experiment_fields=False)


def execute(arguments: argparse.Namespace) -> int:
    checks = [*base_checks(arguments.runs_dir), *(gpu_checks() if arguments.gpu else ())]
    return run_checks(checks, Console())


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
    """What every machine needs that plans or runs."""
    reinstall = "install the package again in this environment (`make setup`, or pip install -e .)"
    return [
        Check("python", find_python, "use Python 3.11, 3.12 or 3.13"),
        Check("torch", find_torch, "pip install 'torch>=2.11'"),
        Check("C++ searcher", find_searcher, f"{reinstall}; that compiles it and needs a C++17 compiler such as g++"),
        Check("messages", find_curve, "pip install --force-reinstall 'pyzmq>=26'"),
        Check("loopback", find_loopback, "bring it up with `ip link set lo up`, or give --network-interface to run"),
        Check("gloo", partial(find_collectives, "gloo", 2), "see that the loopback interface works and torch has gloo"),
        Check(
            "run directories", partial(find_file_system, runs_dir), "give a --run-dir on a local disk, NFS or Lustre"
        ),
        Check("attention", partial(find_attention, "cpu"), reinstall),
        Check("SLURM", find_slurm, "install the SLURM client commands"),
        Check("cores, memory", find_cores_and_memory, "use a machine of which psutil can read cores and memory"),
    ]


def gpu_checks() -> list[Check]:
    """What runs on GPUs need besides."""
    return [
        Check("CUDA", find_cuda, "install the NVIDIA driver and a CUDA build of torch (https://pytorch.org)"),
        Check("GPU arithmetic", find_gpu_matmul, "see `nvidia-smi` for errors and other processes on the GPUs"),
        Check("NCCL", find_nccl, "install a CUDA build of torch with NCCL; NCCL_DEBUG=INFO says more"),
        Check("GPU attention", partial(find_attention, "cuda"), "pip install flash-attn --no-build-isolation"),
    ]


def find_python() -> Finding:
    version = platform.python_version()
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        return Finding(state="fail", detail=f"{version} is not supported", remedy="use Python 3.11, 3.12 or 3.13")
    return Finding(state="ok", detail=f"{version} ({sys.executable})")


def find_torch() -> Finding:
    import torch

    devices = "the CPU"
    if torch.cuda.is_available():
        devices = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    detail = f"{torch.__version__} on {devices}"
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if (major, minor) < MIN_TORCH:
        return Finding(state="fail", detail=f"{detail} is too old", remedy="pip install 'torch>=2.11'")
    return Finding(state="ok", detail=detail)


def find_searcher() -> Finding:
    from realhf.search import searcher

    return Finding(state="ok", detail=f"importable ({Path(searcher.__file__).parent})")


def find_curve() -> Finding:
    detail = f"pyzmq {zmq.pyzmq_version()}, libzmq {zmq.zmq_version()}"
    if not zmq.has("curve"):
        return Finding(
            state="fail",
            detail=f"{detail} cannot encrypt (no CURVE)",
            remedy="pip install --force-reinstall 'pyzmq>=26'; its wheels have CURVE",
        )
    return Finding(state="ok", detail=f"{detail} with CURVE")


def find_loopback() -> Finding:
    """The interface that local runs name to gloo, and a connection over it."""
    addresses = {a.address for a in psutil.net_if_addrs().get("lo", ()) if a.family is socket.AF_INET}
    if not addresses:
        return Finding(
            state="fail",
            detail=f"no interface lo with an IPv4 address; there are {', '.join(psutil.net_if_addrs()) or 'none'}",
            remedy="bring it up with `ip link set lo up`, or give --network-interface to run",
        )
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=5).close()
    return Finding(state="ok", detail=f"lo has {', '.join(sorted(addresses))} and takes connections")


def find_collectives(backend: str, num_processes: int) -> Finding:
    """An all-reduce between processes that meet as workers do: through a file, nothing listens for strangers."""
    code = "import sys; from realhf.cli.doctor import all_reduce_as; all_reduce_as(*sys.argv[1:])"
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    if backend == "gloo":
        env["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory(prefix="realhf-doctor-") as folder, contextlib.ExitStack() as ended:
        processes = []
        for rank in range(num_processes):
            argv = [sys.executable, "-c", code, backend, str(rank), str(num_processes), str(Path(folder, "store"))]
            process = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            ended.enter_context(process)
            ended.callback(process.kill)
            processes.append(process)
        for rank, process in enumerate(processes):
            try:
                output, _ = process.communicate(timeout=COLLECTIVE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                who = f"process {rank} of {num_processes}"
                raise TimeoutError(f"{who} did not end within {COLLECTIVE_TIMEOUT_S:g} s") from None
            if process.returncode:
                last = output.strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
                raise RuntimeError(f"process {rank} of {num_processes}: {last[0]}")
    return Finding(state="ok", detail=f"all-reduce between {num_processes} processes")


def all_reduce_as(backend: str, rank: str, num_processes: str, store: str) -> None:
    """One process of `find_collectives`: sums the numbers 1 to `num_processes`, of which it gives one."""
    import torch
    import torch.distributed as dist

    size = int(num_processes)
    device = torch.device("cuda", int(rank)) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, size),  # type: ignore[attr-defined]
        rank=int(rank),
        world_size=size,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )
    numbers = torch.full((1024,), float(int(rank) + 1), device=device)
    dist.all_reduce(numbers)
    expected = size * (size + 1) / 2
    if not bool((numbers == expected).all()):
        raise ArithmeticError(f"the all-reduce gave {numbers[0].item():g} instead of {expected:g}")
    dist.destroy_process_group()


def find_file_system(runs_dir: Path) -> Finding:
    """What a run directory's files rest on: atomic renames, modes that keep others out, locks between processes."""
    parent = next(path for path in (runs_dir.absolute(), *runs_dir.absolute().parents) if path.is_dir())
    with tempfile.TemporaryDirectory(prefix=".realhf-doctor-", dir=parent) as name:
        folder = Path(name)
        problems = [problem for check in (_rename_problem, _mode_problem, _lock_problem) if (problem := check(folder))]
    if problems:
        return Finding(
            state="fail",
            detail=f"{parent}: {'; '.join(problems)}",
            remedy="give a --run-dir on a disk with POSIX modes and locks: a local one, NFS 4, Lustre with flock",
        )
    free_gib = shutil.disk_usage(parent).free / GIB
    if free_gib < 1:
        return Finding(
            state="warn", detail=f"{parent}: {free_gib:.2f} GiB free", remedy="make room: checkpoints are written there"
        )
    return Finding(state="ok", detail=f"{parent}: atomic rename, modes and locks are kept, {free_gib:.0f} GiB free")


def _rename_problem(folder: Path) -> str:
    old, new = folder / "status.json", folder / ".status.json.part"
    old.write_text("old")
    new.write_text("new")
    new.replace(old)
    return "" if old.read_text() == "new" and not new.exists() else "a rename does not replace a file"


def _mode_problem(folder: Path) -> str:
    keys, key = folder / "keys", folder / "keys" / "secret"
    keys.mkdir()
    keys.chmod(0o700)
    os.close(os.open(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    modes = keys.stat().st_mode & 0o777, key.stat().st_mode & 0o777
    return "" if modes == (0o700, 0o600) else f"modes 0700, 0600 became {modes[0]:04o}, {modes[1]:04o}"


def _lock_problem(folder: Path) -> str:
    """torch's FileStore, through which workers meet, locks its file with flock."""
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


def find_slurm() -> Finding:
    found = [command for command in SLURM_COMMANDS if shutil.which(command)]
    missing = [command for command in SLURM_COMMANDS if command not in found]
    if not missing:
        return Finding(state="ok", detail=f"{', '.join(found)} are here")
    return Finding(state="info", detail=f"no {', '.join(missing)}: only --launcher local works from this machine")


def find_cores_and_memory() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = psutil.virtual_memory()
    detail = f"{cores} cores, {memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free"
    if memory.available < 2 * GIB:
        return Finding(
            state="warn", detail=detail, remedy="a worker of a tiny model takes about 0.5 GiB: use fewer workers"
        )
    if cores < 2:
        return Finding(
            state="warn", detail=detail, remedy="workers share cores and get slow: use as many workers as cores"
        )
    return Finding(state="ok", detail=detail)


def find_cuda() -> Finding:
    import torch

    if not torch.cuda.is_available():
        built_for = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        return Finding(
            state="fail",
            detail=f"torch {torch.__version__}, built {built_for}, sees no GPU",
            remedy="install the NVIDIA driver (`nvidia-smi` must work) and a CUDA build of torch (https://pytorch.org)",
        )
    free = [torch.cuda.mem_get_info(i)[0] / GIB for i in range(torch.cuda.device_count())]
    detail = f"CUDA {torch.version.cuda}, {len(free)} GPUs with {', '.join(f'{gib:.0f}' for gib in free)} GiB free"
    return Finding(state="ok", detail=detail)


def find_gpu_matmul() -> Finding:
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
    return Finding(state="ok", detail=f"bfloat16 matmul is right on {num_gpus} GPUs")


def find_nccl() -> Finding:
    import torch
    import torch.distributed as dist

    if not dist.is_nccl_available():
        raise RuntimeError(f"torch {torch.__version__} is built without NCCL")
    num_gpus = torch.cuda.device_count()
    if num_gpus == 0:
        raise RuntimeError("there is no GPU")
    reduced = find_collectives("nccl", num_gpus)
    version = ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    return Finding(state=reduced.state, detail=f"{version}, {reduced.detail}, one a GPU")


def find_attention(device: str) -> Finding:
    """Which kernels runs on this machine would take."""
    import torch

    from realhf.engine.paged_attention import describe_attention

    if device == "cuda" and not torch.cuda.is_available():
        return Finding(state="info", detail="no GPU to choose for")
    return Finding(state="ok", detail="; ".join(describe_attention(device)))
