"""The batch script of a run: a pure function of the options and the processes."""

import shlex
from dataclasses import dataclass

from realhf.base.errors import UserError
from realhf.base.options import Options, option
from realhf.launch.devices import DEVICE_VARIABLE
from realhf.launch.process import WORKER_INDEX_VARIABLE, Job, ProcessSpec
from realhf.machine.gpus import VISIBLE
from realhf.rundir.paths import MASTER
from realhf.rundir.run import YEAR_S


@dataclass(frozen=True, kw_only=True)
class SlurmOptions(Options):
    """What is asked of SLURM beside the workers; None leaves it to the cluster's defaults.

    The job may wait `queue_timeout_s` to start (None: for ever). Workers may run on for `end_timeout_s` after the
    master has ended well, or the reverse. SLURM's controller may be silent for `controller_timeout_s`.
    """

    partition: str | None = option(None, "as sbatch --partition")
    account: str | None = option(None, "as sbatch --account")
    time_limit: str | None = option(None, "as sbatch --time")
    nodelist: str | None = option(None, "as sbatch --nodelist (default: that of @auto)")
    exclude: str | None = None
    cpu_only: bool = option(False, "the nodes have no GPUs; ask for none")
    sbatch: tuple[str, ...] = option((), "a further sbatch option; may be repeated", metavar="OPTION")
    queue_timeout_s: float | None = option(
        86_400.0, "longest to wait for the job to start (default a day)", bounds=(0, YEAR_S), unit="seconds"
    )
    cpus_per_worker: int = 1
    end_timeout_s: float = 60.0
    controller_timeout_s: float = 600.0
    poll_interval_s: float = 2.0

    def __post_init__(self) -> None:
        if self.cpus_per_worker < 1:
            raise UserError(f"cpus_per_worker={self.cpus_per_worker} asks for nothing; give 1 or more")
        super().__post_init__()
        for arg in self.sbatch:
            if not arg.startswith("-") or "\n" in arg:
                raise UserError(f"{arg!r} is no sbatch option; write one as --name=value")


def sbatch_text(options: SlurmOptions, job: Job) -> str:
    """The batch script that runs a job's master and workers, which differ in name only.

    Its exit code is that of the process that failed first. Raises UserError where the workers are no whole nodes.
    """
    master, *workers = job.processes
    assert master.name == MASTER, "no master"
    for worker in workers:  # tasks of one step, told apart by their index
        assert (worker.argv, worker.env) == (workers[0].argv, workers[0].env), f"{worker.name} differs from worker-0"
    nodes, left = divmod(len(workers), job.workers_per_node)
    if left or not nodes:
        raise UserError(
            f"{len(workers)} workers are no whole nodes of {job.workers_per_node} workers each; change --nodes, "
            "--gpus-per-node or the plan"
        )
    gpus = [] if options.cpu_only else [f"--gres=gpu:{job.workers_per_node}"]
    master_step = _srun(
        # Without --exact steps wait for each other; with --mem=0 the first does not take all memory.
        *("--exact", "--mem=0", "--nodes=1", "--ntasks=1", "--cpus-per-task=1", '--nodelist="$first_host"'),
        *([] if options.cpu_only else ["--gres=none"]),
    )
    worker_step = _srun(
        *("--exact", "--mem=0", f"--nodes={nodes}", f"--ntasks={len(workers)}"),
        *(f"--ntasks-per-node={job.workers_per_node}", f"--cpus-per-task={options.cpus_per_worker}"),
        *gpus,  # without --gpu-bind=none: SLURM 22.05 would tell the tasks no devices at all; it is the default besides
    )
    return _TEMPLATE.format(
        header="\n".join(f"#SBATCH {arg}" for arg in _job_args(options, job, nodes, gpus)),
        exits=shlex.quote(str(job.directory.exits)),
        logs=shlex.quote(str(job.directory.logs)),
        index_variable=WORKER_INDEX_VARIABLE,
        own_device=_CPU if options.cpu_only else _OWN_GPU,
        master_step=master_step,
        master_command=_command(master),
        worker_step=worker_step,
        worker_command=_command(workers[0]),
        end_timeout_s=round(options.end_timeout_s),
    )


def _job_args(options: SlurmOptions, job: Job, nodes: int, gpus: list[str]) -> list[str]:
    log = str(job.directory.job_log).replace("%", "%%")  # as a SLURM file name pattern that means just this path
    args = [
        f"--job-name={job.name}",
        f"--nodes={nodes}",
        # One task more than workers on each node, so that the master has a place on the first.
        f"--ntasks-per-node={job.workers_per_node + 1}",
        f"--cpus-per-task={options.cpus_per_worker}",
        # Not --gpus-per-node: a step could then not refuse GPUs.
        *gpus,
        "--no-requeue",
        f"--output={log}",
    ]
    for name in ("partition", "account", "time_limit", "nodelist", "exclude"):
        if value := getattr(options, name):
            args.append(f"--{name.removesuffix('_limit')}={value}")
    return [*map(shlex.quote, args), *options.sbatch]


def _srun(*args: str) -> str:
    return " \\\n    ".join(["srun", *args, "--kill-on-bad-exit=1"])


def _command(spec: ProcessSpec) -> str:
    env = ["env", *(f"{name}={value}" for name, value in sorted(spec.env.items()))] if spec.env else []
    return shlex.join([*env, *spec.argv])


# Every task of a node may use all of the node's GPUs, and shows CUDA the one of its own number. Where SLURM binds them
# (--gpus-per-task), a cgroup hides the others, and NCCL cannot open the memory of a neighbour's GPU. GPUs that only
# CUDA_VISIBLE_DEVICES hides stay reachable from CUDA 10.1 on (NCCL, src/transport/p2p.cc, p2pCanConnect).
_OWN_GPU = f"""\
    IFS=, read -ra gpus <<< "${{{VISIBLE}-}}"
    export {VISIBLE}="${{gpus[SLURM_LOCALID]-}}" {DEVICE_VARIABLE}=cuda:$SLURM_LOCALID"""
_CPU = f"""\
    export {VISIBLE}= {DEVICE_VARIABLE}=cpu:$SLURM_LOCALID"""

_TEMPLATE = """\
#!/bin/bash
{header}
set -u

# What each task runs. It leaves its exit code in a file, since srun's own tells neither which task
# failed first nor of a node that was lost. It writes its log itself: what passes through srun may
# come later than the exit code. SIGTERM is for the command, which may take its time.
export REALHF_EXITS={exits} REALHF_LOGS={logs}
task='
trap : TERM
name=$0
if [ "$name" = worker ]; then
    export {index_variable}=$SLURM_PROCID
    name=worker-$SLURM_PROCID
{own_device}
fi
"$@" >> "$REALHF_LOGS/$name.log" 2>&1
code=$?
echo "$code" > "$REALHF_EXITS/.$name" && mv "$REALHF_EXITS/.$name" "$REALHF_EXITS/$name"
exit "$code"
'

trap : TERM  # a cancelled job ends when its steps have ended
first_host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

{master_step} \\
    bash -c "$task" master \\
    {master_command} &
master=$!

{worker_step} \\
    bash -c "$task" worker \\
    {worker_command} &
workers=$!

alive() {{ kill -0 "$1" 2>/dev/null; }}
wait_for() {{  # process, seconds
    local end=$((SECONDS + $2))
    while alive "$1" && ((SECONDS < end)); do sleep 0.2; done
}}
first_failure() {{  # the exit code of the task that failed first, or else the code given
    local name code
    for name in $(ls -tr "$REALHF_EXITS"); do
        code=$(<"$REALHF_EXITS/$name")
        if ((code != 0)); then echo "$code"; return; fi
    done
    echo "$1"
}}

while alive "$master" && alive "$workers"; do sleep 0.2; done
if alive "$master"; then first=$workers other=$master; else first=$master other=$workers; fi
wait "$first"
code=$?
# After a failure the other may still write down what it knows of it.
if ((code == 0)); then wait_for "$other" {end_timeout_s}; else wait_for "$other" 60; fi
if alive "$other"; then
    echo "one step ended with exit code $code, the other did not end and is stopped" >&2
    ((code == 0)) && code=1
    kill -TERM "$other"
    wait_for "$other" 10
    kill -KILL "$other" 2>/dev/null
fi
wait "$other"
other_code=$?
((code == 0)) && code=$other_code
((code == 0)) || code=$(first_failure "$code")  # srun's may be that of a task which it killed itself
exit "$code"
"""
