"""Where a run's processes run: what is started, on which devices or nodes, and how many workers there is room for."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol

from realhf.launch.devices import WITHOUT_GPU, Device, devices_of
from realhf.launch.launcher import MASTER, Launcher, ProcessSpec, process_environment, python_command, worker_name
from realhf.launch.local.launcher import LocalLauncher
from realhf.launch.slurm.launcher import SlurmLauncher
from realhf.launch.slurm.nodes import job_nodes, usable_nodes, without_nodes
from realhf.launch.slurm.script import SlurmOptions
from realhf.machine.gpus import Gpu
from realhf.rundir.paths import RunDirectory
from realhf.rundir.run import Run, RunSpec


class Site(Protocol):
    """Starts the processes of a run, and knows the places (devices, nodes) on which its workers are.

    A run's specification names the places that it does without (`RunSpec.avoided`).
    """

    @property
    def is_remote(self) -> bool:
        """Whether the processes run on other machines."""

    def launcher(self, run: Run) -> Launcher:
        """A new launcher, for one start."""

    def processes(self, run: Run) -> list[ProcessSpec]:
        """The master and one worker a device."""

    def place(self, run: Run, worker: int) -> str | None:
        """Where a worker of the last start was; None: not known."""

    def lost(self, run: Run) -> frozenset[str]:
        """The places of the last start that are not there any more, as far as that is known."""

    def room(self, run: Run, avoided: frozenset[str]) -> int:
        """How many of the run's workers there is room for now, without the places to be avoided."""


@dataclass(frozen=True)
class LocalSite:
    """This machine with those of its GPUs that runs may use, none for runs on the CPU; a place is a device."""

    directory: RunDirectory
    gpus: tuple[Gpu, ...]

    @property
    def is_remote(self) -> bool:
        return False

    def launcher(self, run: Run) -> Launcher:
        return LocalLauncher()

    def processes(self, run: Run) -> list[ProcessSpec]:
        workers = (
            _worker(self.directory, index, run, device.environment)
            for index, device in enumerate(self._devices(run.spec))
        )
        return [_process(self.directory, MASTER, "realhf.master", "127.0.0.1", env=WITHOUT_GPU), *workers]

    def place(self, run: Run, worker: int) -> str | None:
        return self._devices(run.spec)[worker].place

    def lost(self, run: Run) -> frozenset[str]:
        return frozenset()

    def room(self, run: Run, avoided: frozenset[str]) -> int:
        if self.gpus:
            return min(len(list(devices_of(self.gpus, avoided))), run.spec.num_workers)
        return run.spec.num_workers - len(avoided.difference(run.spec.avoided))

    def _devices(self, spec: RunSpec) -> list[Device]:
        """The run's devices, by worker."""
        return list(islice(devices_of(self.gpus, spec.avoided), spec.num_workers))


@dataclass
class SlurmSite:
    """A SLURM cluster; a place is the name of a node."""

    options: SlurmOptions
    directory: RunDirectory
    _last: SlurmLauncher | None = None

    @property
    def is_remote(self) -> bool:
        return True

    def launcher(self, run: Run) -> Launcher:
        self._last = SlurmLauncher(self.options_of(run), self.directory)
        return self._last

    def options_of(self, run: Run) -> SlurmOptions:
        """What is asked of SLURM for a start of the run."""
        nodes = run.spec.num_workers // run.spec.devices_per_node
        nodelist, exclude = without_nodes(self.options.nodelist, run.spec.avoided)
        return replace(self.options, nodes=nodes, nodelist=nodelist, exclude=exclude)

    def processes(self, run: Run) -> list[ProcessSpec]:
        # The batch script tells each which device it has.
        workers = [_worker(self.directory, index, run) for index in range(run.spec.num_workers)]
        return [_process(self.directory, MASTER, "realhf.master", env=WITHOUT_GPU), *workers]

    def place(self, run: Run, worker: int) -> str | None:
        nodes, node = self._nodes(), worker // run.spec.devices_per_node
        return nodes[node] if node < len(nodes) else None

    def lost(self, run: Run) -> frozenset[str]:
        usable = self._usable()
        return frozenset() if usable is None else frozenset(self._nodes()).difference(usable)

    def room(self, run: Run, avoided: frozenset[str]) -> int:
        usable = self._usable()
        if usable is None:
            return run.spec.num_workers  # SLURM does not say; the job waits for what it needs
        return min(len(frozenset(usable) - avoided) * run.spec.devices_per_node, run.spec.num_workers)

    def _usable(self) -> list[str] | None:
        return usable_nodes(self.options.partition, self.options.nodelist)

    def _nodes(self) -> list[str]:
        """The nodes of the last start, by number."""
        return job_nodes(self._last.job_id) if self._last and self._last.job_id else []


def _worker(directory: RunDirectory, index: int, run: Run, env: Mapping[str, str] | None = None) -> ProcessSpec:
    """With as many threads as the run was planned with."""
    threads = run.spec.hardware.threads if run.spec.hardware else 1
    return _process(directory, worker_name(index), "realhf.worker", env=env, threads=threads)


def _process(
    directory: RunDirectory,
    name: str,
    module: str,
    *words: str,
    env: Mapping[str, str] | None = None,
    threads: int = 1,
) -> ProcessSpec:
    return ProcessSpec(
        name=name,
        argv=python_command(module, str(directory.path), *words),
        env={**process_environment(threads), **(env or {})},
        log_path=directory.log(name),
    )
