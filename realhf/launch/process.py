"""The processes that a launcher starts for a run: commands, environments and logs."""

import importlib.util
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from realhf.base.code_files import python_command
from realhf.launch.devices import WITHOUT_GPU
from realhf.rundir.paths import MASTER, RunDirectory, worker_name, worker_of
from realhf.rundir.run import Run
from realhf.rundir.starts import START_VARIABLE, current_start

WORKER_INDEX_VARIABLE = "REALHF_WORKER_INDEX"
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the name since torch 2.9, and the one before

# The exit code of `Job.again` where there is nothing left to do.
AGAIN_ENDED = 3
# The exit code of a worker that has reported its failure to the master. A worker that ends with another one died
# silently.
TOLD_RETURNCODE = 86
# The exit code of a worker that has not heard its master for too long. The cause is elsewhere.
MASTERLESS_RETURNCODE = 87


@dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """One process to start: `name` is "master" or "worker-INDEX", and names its log in the run directory.

    `env` is added to the launcher's own environment, to which a launcher adds a worker's index (`worker_index`).
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.name == MASTER or worker_name(self.index or 0) == self.name, f"process name {self.name!r}"
        assert self.argv, f"{self.name} has no command"

    @property
    def index(self) -> int | None:
        """The worker's index, None for the master."""
        return worker_of(self.name)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One start of a run. `processes` are the master, if there is one, and the workers by index, node by node.

    `start_id` is the start's own (`realhf.rundir.starts`; "" where nothing is started yet, or that is no run).
    `nodelist` names the nodes that the experiment asks for (None: any), `avoided` places where something has failed.
    `again` is a command that makes the run directory ready where a cluster starts the job once more by itself, and at
    its first start too if `is_made_ready_there`. `after`: the cluster's id of a job that has to end well before.
    `takes_notice`: its processes end at SIGUSR2, also where they ignore SIGTERM; the run can be asked to end (`stop`).
    """

    name: str = "realhf"
    directory: RunDirectory
    processes: tuple[ProcessSpec, ...]
    workers_per_node: int
    nodelist: str | None = None
    avoided: frozenset[str] = frozenset()
    again: tuple[str, ...] = ()
    is_made_ready_there: bool = False
    after: str = ""
    takes_notice: bool = False
    start_id: str = ""

    def __post_init__(self) -> None:
        indices = [process.index for process in self.processes if process.name != MASTER]
        assert indices == [*range(len(indices))], f"workers {indices}"
        assert len(self.processes) - len(indices) <= 1, "several masters"

    @property
    def exits(self) -> Path:
        """Where its tasks leave their exit codes: those of another start lie elsewhere."""
        return self.directory.exits / self.start_id

    @property
    def workers(self) -> tuple[ProcessSpec, ...]:
        return tuple(process for process in self.processes if process.name != MASTER)


def job_of(run: Run, directory: RunDirectory, *, is_remote: bool) -> Job:
    """The master and the workers of a run, each worker with the threads that the run was planned with.

    `is_remote`: workers are on other machines than the master, so it listens on its host's address.
    """
    threads = run.spec.hardware.threads if run.spec.hardware else 1
    return Job(
        name=job_name(run.spec.experiment_file),
        directory=directory,
        processes=processes_of(directory, run.spec.num_workers, threads, is_remote=is_remote),
        workers_per_node=run.spec.devices_per_node,
        nodelist=run.experiment.settings.nodelist,
        avoided=frozenset(run.spec.avoided),
        again=python_command("realhf.lifecycle.again", str(directory.path)),
        takes_notice=True,
        start_id=current_start(directory),
    )


def job_name(experiment_file: str) -> str:
    return f"realhf-{Path(experiment_file).stem}"


def processes_of(
    directory: RunDirectory, num_workers: int, threads: int, *, is_remote: bool
) -> tuple[ProcessSpec, ...]:
    """The master and the workers of the newest start of a run."""
    command = python_command("realhf.master", str(directory.path), *([] if is_remote else ["127.0.0.1"]))
    start_id = current_start(directory)
    env = {START_VARIABLE: start_id} if start_id else {}
    master = ProcessSpec(name=MASTER, argv=command, env={**process_environment(), **WITHOUT_GPU, **env})
    return (master, *workers_of("realhf.worker", directory, num_workers, threads, **env))


def workers_of(module: str, directory: RunDirectory, count: int, threads: int, **env: str) -> tuple[ProcessSpec, ...]:
    """Workers that run a Python module on a directory, with `env` added to the environment of every process."""
    argv, env = python_command(module, str(directory.path)), process_environment(threads) | gpu_environment() | env
    return tuple(ProcessSpec(name=worker_name(index), argv=argv, env=env) for index in range(count))


def worker_index() -> int:
    """The index that a launcher gave to this worker process."""
    return int(os.environ[WORKER_INDEX_VARIABLE])


def module_of(spec: ProcessSpec) -> tuple[str, ...]:
    """The Python module that a process runs, and its words: the reverse of `python_command`."""
    begin = len(python_command(""))
    assert spec.argv[: begin - 1] == python_command("")[:-1], f"{spec.argv} is no command of Python"
    return spec.argv[begin - 1 :]


def process_environment(threads: int = 1) -> dict[str, str]:
    """The environment of every process: `threads` unless the user sets another number, unbuffered output, and malloc's
    settings.

    malloc asks for huge pages (glibc from 2.35 on; others do not know the option). A model of 144 MB that one
    process sends to three or seven others was there in 0.75 and 0.88 of the time, since fewer pages are looked up.
    `csrc/memory/aligned.cpp` says why it is loaded; libraries that the user preloads come first, such as another
    malloc.
    """
    own, preloaded = os.environ.get("GLIBC_TUNABLES"), os.environ.get("LD_PRELOAD")
    threads_text = os.environ.get("OMP_NUM_THREADS", str(threads))
    aligned = _aligned_memory()
    return {
        **({"LD_PRELOAD": ":".join(filter(None, [preloaded, aligned]))} if aligned else {}),
        "OMP_NUM_THREADS": threads_text,
        # Where all cores are in use, threads that spin while they wait take the cores from the threads that they wait
        # for: a step of PPO with two threads on two busy cores took ten times as long as with one.
        **({} if threads_text == "1" else {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}),
        "PYTHONUNBUFFERED": "1",
        # The later of two values of one option counts: the user's.
        "GLIBC_TUNABLES": ":".join(filter(None, ["glibc.malloc.hugetlb=1", own])),
    }


def gpu_environment() -> dict[str, str]:
    """Settings of CUDA for workers that have a GPU; the user's own stay.

    - A stream that waits for another worker must not hold up one that shares its hardware queue: there are 8, and 32
      are more than a worker has streams that wait (CUDA Programming Guide, "CUDA Environment Variables").
    - Vectors of gigabytes come and go between calls. Without segments that grow, what is freed lies in pieces, and none
      may be large enough for the next vector.
    - NCCL registers the memory of collectives in graphs, which it cannot in such segments: an illegal access follows
      (Megatron-LM asks for the same setting, `megatron/training/arguments.py`).
    - Kernels are loaded at the start. To load one later, CUDA may wait until the device is idle, and so for a stream
      that spins in a receive (CUDA Programming Guide, "Lazy Loading"). It costs memory of the device, and time once.
    - NCCL's monitor does not look every second whether another rank asks for a dump of NCCL's records. It would do so
      from a thread of C++ that needs the interpreter's lock, since the store is in Python.
    """
    settings = {
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        "CUDA_MODULE_LOADING": "EAGER",
        "NCCL_GRAPH_REGISTER": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    }
    if not any(name in os.environ for name in _ALLOCATOR):
        settings[_ALLOCATOR[0]] = "expandable_segments:True"
    return {name: os.environ.get(name, value) for name, value in settings.items()}


def _aligned_memory() -> str | None:
    """The library of `csrc/memory`; None where malloc is not glibc's or the loader cannot read the name."""
    module = importlib.util.find_spec("realhf.machine._aligned")
    if module is None or module.origin is None or platform.libc_ver()[0] != "glibc":
        return None
    return None if {" ", ":"} & set(module.origin) else module.origin
