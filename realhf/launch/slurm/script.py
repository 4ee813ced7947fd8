"""The batch script of a run (`job.sbatch.jinja`): a pure function of the options and the processes."""

import math
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import jinja2

from realhf.base.durations import DAY_S, YEAR_S
from realhf.base.errors import UserError
from realhf.base.options import Option, Options
from realhf.launch.devices import DEVICE_VARIABLE
from realhf.launch.process import AGAIN_ENDED, WORKER_INDEX_VARIABLE, Job, ProcessSpec
from realhf.launch.slurm.offer import seconds_of
from realhf.launch.slurm.sbatch_words import check_sbatch_words
from realhf.rundir.paths import MASTER
from realhf.rundir.starts import START_VARIABLE

_DEFAULT_NOTICE_S = 120


@dataclass(frozen=True, kw_only=True)
class SlurmOptions(Options):
    """Options of the request to SLURM besides the workers; None leaves one to the cluster's defaults.

    `environment`: variables that the tasks get wherever the cluster passes none on. The job may wait
    `queue_timeout_s` to start (None: for ever). Workers may run on for `end_timeout_s` after the
    master has ended well, or the reverse. SLURM's controller may be silent for `controller_timeout_s`.
    """

    partition: Annotated[str | None, Option("as sbatch --partition", metavar="NAME")] = None
    account: Annotated[str | None, Option("as sbatch --account", metavar="NAME")] = None
    time_limit: Annotated[str | None, Option("as sbatch --time", metavar="TIME")] = None
    nodelist: Annotated[str | None, Option("as sbatch --nodelist (default: that of @auto)", metavar="NODES")] = None
    exclude: str | None = None
    cpu_only: Annotated[bool, Option("the nodes have no GPUs; ask for none")] = False
    cpus_per_worker: Annotated[
        int | None,
        Option("CPUs of each worker (default: with GPUs their share of a node's CPUs, else 1)", range=(1, 4096)),
    ] = None
    mem: Annotated[str | None, Option("memory of a node, as sbatch --mem", metavar="SIZE")] = None
    gpu_type: Annotated[str | None, Option("the kind of GPU to ask for, as the cluster names it", metavar="TYPE")] = (
        None
    )
    setup_lines: Annotated[
        tuple[str, ...],
        Option(
            "a line of bash that the job runs first, such as 'module load cuda'; may be repeated",
            flag="--setup-line",
            metavar="LINE",
        ),
    ] = ()
    srun: Annotated[
        tuple[str, ...],
        Option(
            "further words for srun, such as '--container-image=FILE' or 'apptainer exec --nv FILE'; may be repeated",
            metavar="WORDS",
        ),
    ] = ()
    sbatch: Annotated[tuple[str, ...], Option("a further sbatch option; may be repeated", metavar="OPTION")] = ()
    until_done: Annotated[
        bool,
        Option("after its time limit, preemption or a lost node the job waits in the queue again, and the run goes on"),
    ] = False
    notice_s: Annotated[
        float | None,
        Option(
            "how long before the time limit the run saves and ends (default 120, at most a quarter of --time-limit)",
            range=(1, DAY_S),
            unit="seconds",
        ),
    ] = None
    plan_in_job: Annotated[
        bool, Option("the job plans the run on its first node (default where nothing here tells the nodes' hardware)")
    ] = False
    queue_timeout_s: Annotated[
        float | None, Option("longest to wait for the job to start (default a day)", range=(0, YEAR_S), unit="seconds")
    ] = float(DAY_S)
    environment: tuple[tuple[str, str], ...] = ()
    end_timeout_s: float = 60.0
    controller_timeout_s: float = 600.0
    poll_interval_s: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for value in self.sbatch:
            check_sbatch_words(value)
        for value in (*self.srun, *self.setup_lines):
            if "\n" in value or not value.strip():
                raise UserError(f"{value!r} is not one line; give --srun and --setup-line once for each")
        if (limit_s := self.limit_s) and self.notice_s and self.notice_s >= limit_s:
            raise UserError(f"--notice-s {self.notice_s:g} is not within --time-limit {self.time_limit}; lower it")
        self.srun_words  # noqa: B018  (raises for quotes that do not end)
        if self.mem is not None and not re.fullmatch(r"\d+[KMGT]?", self.mem):
            raise UserError(f"--mem {self.mem} is no size; give the memory of a node as a number and K, M, G or T: 64G")
        if self.gpu_type is not None and (self.cpu_only or not re.fullmatch(r"[\w.-]+", self.gpu_type)):
            rule = "asks for GPUs, --cpu-only for none" if self.cpu_only else "is no name; see sinfo --Format=gres"
            raise UserError(f"--gpu-type {self.gpu_type} {rule}; leave one out")

    @property
    def limit_s(self) -> float | None:
        """The time limit in seconds; None where there is none, or SLURM has to make sense of it."""
        return seconds_of(self.time_limit or "")

    @property
    def srun_words(self) -> tuple[str, ...]:
        try:
            return tuple(word for value in self.srun for word in shlex.split(value))
        except ValueError as error:
            raise UserError(f"--srun {' '.join(self.srun)!r}: {error}; write it as in a shell") from None


def rendered(template: str, **values: object) -> str:
    """A template of this folder with these values; its filter `quote` makes a value one word of bash."""
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["quote"] = lambda value: shlex.quote(str(value))
    return templates.get_template(template).render(values)


def sbatch_text(options: SlurmOptions, job: Job) -> str:
    """The batch script that runs a job's master, if it has one, and its workers, which differ in name only.

    Its exit code is that of the process that failed first. Raises UserError where the workers are no whole nodes.
    """
    workers = job.workers
    for worker in workers:  # tasks of one step, told apart by their index
        assert (worker.argv, worker.env) == (workers[0].argv, workers[0].env), f"{worker.name} differs from worker-0"
    nodes, left = divmod(len(workers), job.workers_per_node)
    if left or not nodes:
        raise UserError(
            f"{len(workers)} workers are no whole nodes of {job.workers_per_node} workers each; change --nodes, "
            "--gpus-per-node or the plan"
        )
    cpus = options.cpus_per_worker or 1
    gpus = ":".join(filter(None, ("gpu", options.gpu_type, str(job.workers_per_node))))
    limit_s = math.inf if options.limit_s is None else options.limit_s
    masters = [process for process in job.processes if process.name == MASTER]
    return rendered(
        "job.sbatch.jinja",
        options=options,
        job=job,
        directory=job.directory,
        nodes=nodes,
        cpus=cpus,
        gres="" if options.cpu_only else f"--gres={gpus}",
        notice_s=max(1, round(options.notice_s or min(_DEFAULT_NOTICE_S, limit_s / 4))),
        # In a container there may be another one.
        interpreter="" if options.srun_words else workers[0].argv[0],
        master_command=_command(masters[0]) if masters else "",
        worker_command=_command(workers[0]),
        again=shlex.join(job.again) or ":",
        again_ended=AGAIN_ENDED,
        start_variable=START_VARIABLE,
        index_variable=WORKER_INDEX_VARIABLE,
        device_variable=DEVICE_VARIABLE,
    )


def _command(spec: ProcessSpec) -> str:
    # The start's id is exported by the script, since it is another one where SLURM starts the job once more.
    variables = [f"{name}={value}" for name, value in sorted(spec.env.items()) if name != START_VARIABLE]
    env = ["/usr/bin/env", *variables] if variables else []
    return shlex.join([*env, *spec.argv])
