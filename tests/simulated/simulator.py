"""Runs programs of `tests/simulated/programs` on simulated GPUs: one process a rank, each with one device.

FakeGPU takes the place of NVIDIA's driver, of the CUDA runtime, cuBLAS, NCCL and NVML. Its coordinator carries messages
between the ranks. torch's own CUDA build runs on top, as it would on a GPU, but no kernel computes anything.
"""

import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from realhf.launch.process import gpu_environment
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
AT_START = Path(__file__).parent / "at_start"
FOLDER_VARIABLE = "REALHF_SIMULATED_GPU"
OTHERS = ("CUDA_", "PYTORCH_", "TRITON_")  # variables that are not passed on
DEADLINE_S = 900.0  # only a hang reaches it
GRACE_S = 5.0  # in which ranks may end by themselves, once one has failed or all have been asked for their stacks
TAIL_LINES = 40
# In the order in which the loader has to find them; the first adds functions of NCCL that FakeGPU lacks.
LIBRARIES = (
    "libncclshim.so", "libnccl.so.2", "libcublas.so.12", "libcudart.so.12", "libcuda.so.1", "libnvidia-ml.so.1",
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """A program that ended well on all ranks.

    logs: what each rank printed.
    memberships: the sum of the sizes of all NCCL communicators that were made.
    """

    logs: list[str]
    memberships: int

    def values(self, name: str) -> list[float]:
        """The numbers that each rank printed as a line `name: NUMBER`, of all ranks in order."""
        lines = (line.partition(": ") for log in self.logs for line in log.splitlines())
        return [float(value) for before, _, value in lines if before == name]


@dataclass(frozen=True)
class Simulator:
    """A folder of `scripts/simulated_gpu.py`, and where logs go. Use `started`."""

    folder: Path
    scratch: Path

    @property
    def python(self) -> Path:
        return self.folder / "venv/bin/python"

    @property
    def _socket(self) -> Path:
        return self.scratch / "s"  # the path of a socket has 107 characters at most

    @property
    def _report(self) -> Path:
        return self.scratch / "cluster.json"

    def environment(self, devices: int = 1) -> dict[str, str]:
        """The environment of a process that sees this many simulated GPUs."""
        library = self.folder / "lib"
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith(OTHERS)},
            "FAKEGPU_MODE": "simulate",
            "FAKEGPU_DIST_MODE": "simulate",
            "FAKEGPU_PROFILE": "h100",
            "FAKEGPU_DEVICE_COUNT": str(devices),
            "FAKEGPU_TERMINAL_REPORT": "0",
            "FAKEGPU_REPORT_PATH": str(self.scratch / "report.json"),
            "FAKEGPU_COORDINATOR_TRANSPORT": "unix",
            "FAKEGPU_COORDINATOR_ADDR": str(self._socket),
            "FAKEGPU_COORDINATOR_TIMEOUT_MS": str(int(1000 * DEADLINE_S)),
            "LD_LIBRARY_PATH": str(library),
            "LD_PRELOAD": ":".join(str(library / name) for name in LIBRARIES),
            # The memory of a device is calloc's: fresh pages, never touched, in place of used ones that it would clear.
            "MALLOC_MMAP_THRESHOLD_": str(2**20),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "TRITON_CACHE_DIR": str(self.folder / "triton"),
        }

    def run(
        self, program: str, world: int, *arguments: object, environment: Mapping[str, str] | None = None
    ) -> Outcome:
        """Runs a module of `programs` on ranks 0 to `world - 1`, with the settings of CUDA that a launcher gives.

        Raises:
            AssertionError: a rank failed, or the deadline has passed; with the end of every rank's log. At the deadline
                every rank prints the stacks of its threads first.
        """
        environment = self.environment() | gpu_environment() | dict(environment or {}) | {"WORLD_SIZE": str(world)}
        environment["STORE"] = str(self.scratch / "store")
        command = [str(self.python), "-X", "faulthandler", "-m", f"tests.simulated.programs.{program}"]
        command += map(str, arguments)
        logs = [self.scratch / f"{rank}.log" for rank in range(world)]
        with self._coordinator() as coordinator, _ended() as ranks:
            for rank, log in enumerate(logs):
                with log.open("w") as file:
                    own = environment | {"RANK": str(rank)}
                    ranks.append(subprocess.Popen(command, cwd=ROOT, env=own, stdout=file, stderr=subprocess.STDOUT))
            problem = _wait(ranks)
            texts = [log.read_text(errors="replace") for log in logs]
            if problem:
                tails = ("\n".join(text.splitlines()[-TAIL_LINES:]) for text in texts)
                shown = "\n".join(f"--- rank {rank}\n{tail}" for rank, tail in enumerate(tails))
                raise AssertionError(f"{program} {' '.join(map(str, arguments))}: {problem}\n{shown}")
            return Outcome(texts, self._memberships(coordinator))

    def realhf(self, *words: object, gpus: int) -> "tuple[subprocess.CompletedProcess[str], int]":
        """One `realhf` command on a machine with simulated GPUs, with stand-ins for kernels in its workers.

        Returns:
            how it ended, and the sum of the sizes of all communicators, as `Outcome.memberships`.
        """
        environment = self.environment(gpus) | {
            # By number: FakeGPU does not know devices by their UUIDs, which a launcher takes otherwise.
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus))),
            "PYTHONPATH": f"{AT_START}:{ROOT}",
        }
        command = [str(self.python), "-m", "realhf.cli", *map(str, words)]
        with self._coordinator() as coordinator:
            ended = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=DEADLINE_S
            )
            return ended, self._memberships(coordinator)

    @contextmanager
    def _coordinator(self) -> "Iterator[subprocess.Popen[bytes]]":
        command = [self.folder / "lib/fakegpu-coordinator", "--transport", "unix", "--address", self._socket]
        with (self.scratch / "coordinator.log").open("w") as log, _ended() as processes:
            environment = dict(os.environ, FAKEGPU_CLUSTER_REPORT_PATH=str(self._report))
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
            wait_until(self._socket.exists, "the coordinator's socket")
            yield processes[0]

    def _memberships(self, coordinator: "subprocess.Popen[bytes]") -> int:
        """Asks the coordinator to end, which writes its report then."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(GRACE_S)
            connection.connect(str(self._socket))
            connection.sendall(b"SHUTDOWN\n")
            connection.recv(100)
        coordinator.wait(60)
        # The report lists ranks as each communicator numbers them, so only their sum has a meaning.
        return sum(rank["communicator_inits"] for rank in json.loads(self._report.read_text())["ranks"])


@contextmanager
def started(folder: Path) -> Iterator[Simulator]:
    """A simulator with a scratch folder of its own, for one run."""
    with tempfile.TemporaryDirectory(prefix="realhf-sim-") as scratch:
        yield Simulator(folder, Path(scratch))


def missing_in(folder: Path) -> list[str]:
    """The files that a folder of `scripts/simulated_gpu.py` lacks."""
    wanted = ("venv/bin/python", "lib/fakegpu-coordinator", *(f"lib/{name}" for name in LIBRARIES))
    return [name for name in wanted if not (folder / name).exists()]


@contextmanager
def _ended() -> "Iterator[list[subprocess.Popen[bytes]]]":
    """Whatever happens, the processes in the list are gone afterwards."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _wait(ranks: "Sequence[subprocess.Popen[bytes]]") -> str:
    """Returns when all ranks have ended, or soon after one has failed: "", or what went wrong."""
    deadline, problem = time.monotonic() + DEADLINE_S, ""
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.1)
        failed = [(number, rank.returncode) for number, rank in enumerate(ranks) if rank.returncode]
        if failed and not problem:
            problem = f"rank {failed[0][0]} ended with code {failed[0][1]}"
            deadline = time.monotonic() + GRACE_S
    late = [number for number, rank in enumerate(ranks) if rank.poll() is None]
    if late and not problem:
        problem = f"ranks {late} had not ended after {DEADLINE_S:g} s"
        for number in late:
            ranks[number].send_signal(signal.SIGABRT)  # faulthandler prints the stacks
        time.sleep(GRACE_S)
    failed = [(number, rank.returncode) for number, rank in enumerate(ranks) if rank.returncode]
    return problem or (f"rank {failed[0][0]} ended with code {failed[0][1]}" if failed else "")
