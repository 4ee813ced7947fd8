"""A run as one job of a SLURM cluster: a master step and a worker step side by side."""

from dataclasses import replace

from realhf.launch.launcher import Exit, Launcher
from realhf.launch.process import Job
from realhf.launch.slurm.job import SubmittedJob
from realhf.launch.slurm.nodes import job_nodes, usable_nodes, without_nodes
from realhf.launch.slurm.script import SlurmOptions, sbatch_text


class SlurmLauncher(Launcher):
    """Runs the processes as tasks of one job, which goes on if the launcher dies. A place is the name of a node."""

    options_type = SlurmOptions
    is_remote = True

    def __init__(self, options: SlurmOptions) -> None:
        self._options = options
        self._job: Job | None = None
        self._submitted: SubmittedJob | None = None

    @property
    def job_id(self) -> str | None:
        """SLURM's number of the last job, None before the first."""
        return self._submitted.id if self._submitted else None

    def preview(self, job: Job) -> str:
        return sbatch_text(self._options_of(job), job)

    def start(self, job: Job) -> None:
        self._job, self._submitted = job, None
        self._submitted = SubmittedJob(self._options_of(job), job)

    def poll(self) -> list[Exit]:
        return self._submitted.poll() if self._submitted else []

    def stop(self, *, grace_s: float = 5.0) -> None:
        if self._submitted:
            self._submitted.stop(grace_s)

    def status(self) -> str:
        return self._submitted.status() if self._submitted else ""

    def place(self, worker: int) -> str | None:
        assert self._job is not None
        nodes, node = self._nodes(), worker // self._job.workers_per_node
        return nodes[node] if node < len(nodes) else None

    def lost(self) -> frozenset[str]:
        usable = self._usable()
        return frozenset() if usable is None else frozenset(self._nodes()).difference(usable)

    def room(self, avoided: frozenset[str]) -> int:
        assert self._job is not None
        usable, num_workers = self._usable(), len(self._job.workers)
        if usable is None:
            return num_workers  # SLURM does not say; the job waits for what it needs
        return min(len(frozenset(usable) - avoided) * self._job.workers_per_node, num_workers)

    def _options_of(self, job: Job) -> SlurmOptions:
        """What is asked of SLURM for a job."""
        nodelist, exclude = without_nodes(self._nodelist(job), sorted(job.avoided))
        return replace(self._options, nodelist=nodelist, exclude=exclude)

    def _nodelist(self, job: Job) -> str | None:
        return self._options.nodelist or job.nodelist

    def _usable(self) -> list[str] | None:
        assert self._job is not None
        return usable_nodes(self._options.partition, self._nodelist(self._job))

    def _nodes(self) -> list[str]:
        """The nodes of the last job, by number."""
        return job_nodes(self._submitted.id) if self._submitted else []
