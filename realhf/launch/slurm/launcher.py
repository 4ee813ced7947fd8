"""A run as one job of a SLURM cluster. SLURM says which nodes can be used."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from realhf.base.errors import UserError
from realhf.launch.launcher import Exit, Launcher
from realhf.launch.process import Job
from realhf.launch.slurm.commands import slurm_command
from realhf.launch.slurm.defaults import with_environment
from realhf.launch.slurm.job import SubmittedJob
from realhf.launch.slurm.offer import Offer, ask
from realhf.launch.slurm.refusal import unknown_names
from realhf.launch.slurm.script import SlurmOptions, sbatch_text
from realhf.launch.slurm.state import job_state
from realhf.launch.slurm.submission import array_text, submit_script, write_script

# States of a node that takes jobs, now or when the ones before have ended. Whatever else is shown counts as lost.
_USABLE = frozenset({"idle", "mixed", "allocated", "completing", "planned", "reserved"})
# The suffixes of states in sinfo: powered down, powering up, ... But "*" means that the node does not answer.
_SUFFIXES = "~#!%$@^-+"


class SlurmLauncher(Launcher):
    """Runs a master step and a worker step side by side in one job, which goes on if the launcher dies.

    A place is the name of a node.
    """

    options_type = SlurmOptions
    is_remote = True
    queues = True

    def __init__(self, options: SlurmOptions) -> None:
        self._options = options
        self._job: Job | None = None
        self._submitted: SubmittedJob | None = None
        self._offer: Offer | None = None

    def check(self) -> None:
        slurm_command("sbatch", "--version")
        self._offer = ask()
        if wrong := list(unknown_names(with_environment(self._options, os.environ), self._offer)):
            raise UserError("SLURM has no such job: " + "\n".join(wrong))

    def preview(self, job: Job) -> str:
        return sbatch_text(self._options_of(job), job)

    def start(self, job: Job) -> None:
        self._job, self._submitted = job, None
        self._submitted = SubmittedJob(self._options_of(job), job)

    def start_array(self, jobs: Sequence[Job], folder: Path, at_most: int | None) -> list[str]:
        """As an array, whose script lies in `folder`."""
        options = self._options_of(jobs[0])
        texts = [write_script(options, job) for job in jobs]
        script = folder / "array.sbatch"
        script.write_text(array_text(texts, [job.directory.script for job in jobs], at_most))
        array = submit_script(script, options, jobs[0])
        return [f"{array}_{task}" for task in range(len(jobs))]

    def adopt(self, job: Job, job_id: str) -> None:
        self._job, self._submitted = job, SubmittedJob(self._options_of(job), job, job_id)

    def job_id(self) -> str:
        return self._submitted.id if self._submitted else ""

    def leave(self) -> None:
        self._submitted = None

    def is_waiting(self) -> bool:
        return self._submitted is not None and self._submitted.is_waiting

    def poll(self) -> list[Exit]:
        return self._submitted.poll() if self._submitted else []

    def stop(self, *, grace_s: float = 5.0) -> None:
        if self._submitted:
            self._submitted.stop(grace_s)

    def status(self) -> str:
        return self._submitted.status() if self._submitted else ""

    def node_devices(self) -> int | None:
        self._offer = self._offer or ask()
        return self._offer.gpus_per_node(self._options.partition, self._options.gpu_type)

    def place(self, worker: int) -> str | None:
        assert self._job is not None
        nodes, node = self._nodes(), worker // self._job.workers_per_node
        return nodes[node] if node < len(nodes) else None

    def lost(self) -> frozenset[str]:
        usable = self._usable_nodes()
        return frozenset() if usable is None else frozenset(self._nodes()).difference(usable)

    def room(self, avoided: frozenset[str]) -> int:
        assert self._job is not None
        usable, num_workers = self._usable_nodes(), len(self._job.workers)
        if usable is None:
            return num_workers  # SLURM does not say; the job waits for what it needs
        return min(len(frozenset(usable) - avoided) * self._job.workers_per_node, num_workers)

    def _options_of(self, job: Job) -> SlurmOptions:
        """The request to SLURM for a job."""
        nodelist, exclude = without_nodes(self._options.nodelist or job.nodelist, sorted(job.avoided))
        asked = replace(with_environment(self._options, os.environ), nodelist=nodelist, exclude=exclude)
        if asked.cpus_per_worker is None and not asked.cpu_only:
            self._offer = self._offer or ask()
            return replace(asked, cpus_per_worker=self._offer.cpus_per_gpu(asked.partition, asked.gpu_type))
        return asked

    def _nodes(self) -> list[str]:
        """The nodes of the last job in the order of its tasks; [] where SLURM has forgotten it."""
        state = job_state(self._submitted.id)[0] if self._submitted else None
        return _expand(state.nodes) if state and state.nodes else []

    def _usable_nodes(self) -> list[str] | None:
        """The nodes that take jobs, of those that may be asked for; None if SLURM does not answer."""
        assert self._job is not None
        asked = {"partition": self._options.partition, "nodes": self._options.nodelist or self._job.nodelist}
        words = [f"--{name}={value}" for name, value in asked.items() if value]
        columns = "--Format=NodeList:200,StateLong:60,Partition:200"
        shown = slurm_command("sinfo", "--noheader", "--Node", columns, *words)
        if shown.returncode != 0:
            return None
        rows = [line.split() for line in shown.stdout.splitlines() if line.strip()]
        of_default_partition = [row for row in rows if row[2].endswith("*")]
        return read_nodes(rows if words else of_default_partition or rows)


def read_nodes(rows: Iterable[Sequence[str]]) -> list[str]:
    """The names of the usable nodes among rows of sinfo: (name, state, ...)."""
    return list(dict.fromkeys(name for name, state, *_ in rows if state.rstrip(_SUFFIXES) in _USABLE))


def without_nodes(nodelist: str | None, avoided: Sequence[str]) -> tuple[str | None, str | None]:
    """(nodelist, exclude) to ask SLURM for, such that the nodes to avoid are not among those of a job."""
    if not avoided or nodelist is None:
        return nodelist, ",".join(avoided) or None
    return ",".join(name for name in _expand(nodelist) if name not in avoided), None


def _expand(nodelist: str) -> list[str]:
    """node[1-2] -> node1, node2."""
    return slurm_command("scontrol", "show", "hostnames", nodelist).stdout.split()
