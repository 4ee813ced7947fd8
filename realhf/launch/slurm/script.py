"""The batch script of a run: a pure function of the options and the processes."""

import re
import shlex
from dataclasses import dataclass
from typing import Annotated

from realhf.base.durations import DAY_S, YEAR_S
from realhf.base.errors import UserError
from realhf.base.options import Option, Options
from realhf.launch.devices import DEVICE_VARIABLE
from realhf.launch.process import AGAIN_ENDED, WORKER_INDEX_VARIABLE, Job, ProcessSpec
from realhf.launch.slurm.offer import seconds_of
from realhf.launch.slurm.sbatch_words import check_sbatch_words
from realhf.machine.gpus import VISIBLE
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
    gres = ":".join(["gpu", *([options.gpu_type] if options.gpu_type else []), str(job.workers_per_node)])
    gpus, no_gpus = ([], []) if options.cpu_only else ([f"--gres={gres}"], ["--gres=none"])
    # Without --exact steps wait for each other; with --mem=0 the first does not take all memory. Without --export=ALL
    # tasks of a job with --export=NONE have not even a PATH.
    every_step = ("--exact", "--mem=0", "--export=ALL")
    master_step = _srun(
        *every_step,
        *("--nodes=1", "--ntasks=1", "--cpus-per-task=1", '--nodelist="$first_host"'),
        *(*no_gpus, "--kill-on-bad-exit=1", *map(shlex.quote, options.srun_words)),
    )
    masters = [
        _MASTER.format(master_step=master_step, master_command=_command(process))
        for process in job.processes
        if process.name == MASTER
    ]
    worker_step = _srun(
        *every_step,
        *(f"--nodes={nodes}", f"--ntasks={len(workers)}"),
        *(f"--ntasks-per-node={job.workers_per_node}", f"--cpus-per-task={cpus}"),
        *gpus,  # without --gpu-bind=none: SLURM 22.05 would tell the tasks no devices at all; it is the default besides
        *("--kill-on-bad-exit=1", *map(shlex.quote, options.srun_words)),
    )
    check_step = _srun(*every_step, f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", *no_gpus)
    return _TEMPLATE.format(
        header="\n".join(f"#SBATCH {arg}" for arg in _job_args(options, job, nodes, gpus, cpus)),
        log=shlex.quote(str(job.directory.job_log)),
        script=shlex.quote(str(job.directory.script)),
        exits=shlex.quote(str(job.exits)),
        logs=shlex.quote(str(job.directory.logs)),
        environment="".join(f"export {name}={shlex.quote(value)}\n" for name, value in options.environment),
        setup="".join(map(_setup, options.setup_lines)),
        index_variable=WORKER_INDEX_VARIABLE,
        own_device=_CPU if options.cpu_only else _OWN_GPU,
        check_step=check_step,
        # In a container there may be another one.
        interpreter=shlex.quote("" if options.srun_words else workers[0].argv[0]),
        master="".join(masters),
        worker_step=worker_step,
        worker_command=_command(workers[0]),
        wait_for=_WAIT_FOR if masters else "",
        end=_END_OF_BOTH.format(end_timeout_s=round(options.end_timeout_s)) if masters else _END_OF_WORKERS,
        **_of_starts(options, job),
    )


def _of_starts(options: SlurmOptions, job: Job) -> dict[str, object]:
    """The values that the script needs where SLURM ends the job early, and starts it once more."""
    directory = job.directory
    return {
        "start_variable": START_VARIABLE,
        "start_id": shlex.quote(job.start_id),
        "start": shlex.quote(str(directory.start)),
        "all_exits": shlex.quote(str(directory.exits)),
        "stop": shlex.quote(str(directory.stop)),
        "status": shlex.quote(str(directory.status)),
        "goes_on": "true" if options.until_done else "false",
        "makes_ready": "true" if job.is_made_ready_there else "((${SLURM_RESTART_COUNT:-0} > 0))",
        "again": shlex.join(job.again) or ":",
        "again_ended": AGAIN_ENDED,
        "task_signals": _TASK_NOTICED if job.takes_notice else "trap : TERM",
        "ignores": 'trap "" TERM; ' if job.takes_notice else "",
        "job_signals": _JOB_NOTICED if job.takes_notice else "trap : TERM  # it ends when its steps have ended",
    }


def _job_args(options: SlurmOptions, job: Job, nodes: int, gpus: list[str], cpus: int) -> list[str]:
    args = [
        f"--job-name={job.name}",
        f"--nodes={nodes}",
        # A task for each CPU, from which each step takes as many as it needs. One more than the workers' gives the
        # master a place on the first node.
        f"--ntasks-per-node={job.workers_per_node * cpus + 1}",
        "--cpus-per-task=1",
        # Not --gpus-per-node: a step could then not refuse GPUs.
        *gpus,
        "--requeue" if options.until_done else "--no-requeue",
        f"--signal=B:USR1@{_notice_s(options)}",
        # SLURM would not start the script where it cannot write; the script finds out itself, and says so.
        "--output=/dev/null",
    ]
    for name in ("mem", "partition", "account", "time_limit", "nodelist", "exclude"):
        if value := getattr(options, name):
            args.append(f"--{name.removesuffix('_limit')}={value}")
    # The last word counts, and the job before waits for what the user names. One that has failed is not waited for.
    waits = [f"--dependency=afterok:{job.after}", "--kill-on-invalid-dep=yes"] if job.after else []
    return [*map(shlex.quote, args), *options.sbatch, *waits]


def _notice_s(options: SlurmOptions) -> int:
    longest = _DEFAULT_NOTICE_S if options.limit_s is None else min(_DEFAULT_NOTICE_S, options.limit_s / 4)
    return max(1, round(options.notice_s or longest))


def _setup(line: str) -> str:
    return f"{{ {line}\n}} || stop setup {shlex.quote(line)}\n"


def _srun(*args: str) -> str:
    return " \\\n    ".join(["srun", *args])


def _command(spec: ProcessSpec) -> str:
    # The start's id is exported by the script, since it is another one where SLURM starts the job once more.
    variables = [f"{name}={value}" for name, value in sorted(spec.env.items()) if name != START_VARIABLE]
    env = ["/usr/bin/env", *variables] if variables else []
    return shlex.join([*env, *spec.argv])


# Every task of a node may use all of the node's GPUs, and shows CUDA only the GPU with its own number. Where SLURM
# binds them (--gpus-per-task), a cgroup hides the others, and NCCL cannot open the memory of a neighbour's GPU. GPUs
# that only CUDA_VISIBLE_DEVICES hides stay reachable from CUDA 10.1 on (NCCL, src/transport/p2p.cc, p2pCanConnect).
_OWN_GPU = f"""\
    IFS=, read -ra gpus <<< "${{{VISIBLE}-}}"
    export {VISIBLE}="${{gpus[SLURM_LOCALID]-}}" {DEVICE_VARIABLE}=cuda:$SLURM_LOCALID"""
_CPU = f"""\
    export {VISIBLE}= {DEVICE_VARIABLE}=cpu:$SLURM_LOCALID"""

# SLURM sends SIGTERM to the steps alone as the notice of a preemption, to the batch script too when the job ends, and
# to a step when one of its tasks has failed. Only SIGUSR2 tells master and workers to end.
_TASK_NOTICED = """\
quit() { is_quit=1; kill -USR2 "$process" 2>/dev/null; }
terminated() { if grep -qsvx 0 "$REALHF_EXITS"/*; then quit; elif [ "$name" = master ]; then notice; fi; }
trap quit USR2
trap terminated TERM"""
_JOB_NOTICED = """\
terminated() {
    case $(timeout 10 scontrol show job --oneliner "$job") in
        *" JobState=RUNNING "*) notice ;;
        *) is_ended=1; kill -USR2 ${master-} ${workers-} ;;  # srun passes it on to the tasks
    esac
}
trap terminated TERM"""

_MASTER = """\
first_host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

{master_step} \\
    /bin/bash -c "$task" master \\
    {master_command} &
master=$!
"""
_WAIT_FOR = """\
wait_for() {  # process, seconds
    local end=$((SECONDS + $2))
    while alive "$1" && ((SECONDS < end)); do sleep 0.2; done
}
"""
_END_OF_BOTH = """\
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
"""
_END_OF_WORKERS = """\
while alive "$workers"; do sleep 0.2; done
wait "$workers"
code=$?
"""

_TEMPLATE = """\
#!/bin/bash
{header}
run={script}
[ -d {logs} ] && exec >> {log} 2>&1
job=${{SLURM_ARRAY_JOB_ID:+${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID}}  # a number alone may mean the whole array
job=${{job:-$SLURM_JOB_ID}}
echo "job $job on $SLURM_JOB_NODELIST"

# Ends the job, and tells the launcher why by the job's comment: the run directory may not be there.
stop() {{  # kind, what
    echo "the job ends: $1 $2" >&2
    scontrol update JobId="$job" Comment="realhf-$1:$(base64 -w 0 <<< "$2")"
    exit 1
}}

export REALHF_STOP={stop}
notice='
notice() {{  # the job is about to end: by preemption, or its time limit
    [ -e "$REALHF_STOP" ] && return
    echo "{{\\"reason\\":\\"notice\\",\\"goes_on\\":{goes_on}}}" > "$REALHF_STOP.part" &&
        mv "$REALHF_STOP.part" "$REALHF_STOP"
}}'
eval "$notice"
is_ended=  # the job is about to be over
trap notice USR1

# What tasks need, also where the cluster passes no environment on.
{environment}{setup}set -u

# Whether every node sees this very run directory, and the interpreter.
look='
for try in 1 2 3 4 5; do [ -e "$0" ] && break; sleep 1; done
[ -e "$0" ] || echo "directory $SLURMD_NODENAME"
command -v "$1" > /dev/null || [ -z "$1" ] || echo "interpreter $SLURMD_NODENAME"
'
missing=$({check_step} \\
    /bin/bash -c "$look" "$run" {interpreter})
for kind in directory interpreter; do
    hosts=$(sed -n "s/^$kind //p" <<< "$missing" | sort -uV | paste -sd ,)
    [ -z "$hosts" ] || stop "$kind" "$(scontrol show hostlist "$hosts")"
done

# What each task runs. It leaves its exit code in a file, since srun's own tells neither which task
# failed first nor of a node that was lost. It writes its log itself: what passes through srun may
# come later than the exit code.
export REALHF_EXITS={exits} REALHF_LOGS={logs} {start_variable}={start_id}
if {makes_ready}; then  # SLURM has started the job once more, or the job plans its run
    {again}
    code=$?
    ((code == {again_ended})) && exit 0  # there is nothing left to do
    ((code == 0)) || exit "$code"
    {start_variable}=$(<{start})
    REALHF_EXITS={all_exits}/${start_variable}
    mkdir -p "$REALHF_EXITS"
fi
task="$notice"'
name=$0 is_quit=0
if [ "$name" = worker ]; then
    export {index_variable}=$SLURM_PROCID
    name=worker-$SLURM_PROCID
{own_device}
fi
{task_signals}
({ignores}exec "$@") >> "$REALHF_LOGS/$name.log" 2>&1 &
process=$!
while kill -0 "$process" 2>/dev/null; do wait "$process"; done  # a signal ends a wait
wait "$process"
code=$?
((is_quit && code)) && code=143  # as SIGTERM ends others
echo "$code" > "$REALHF_EXITS/.$name" && mv "$REALHF_EXITS/.$name" "$REALHF_EXITS/$name"
exit "$code"
'

{job_signals}
{master}
{worker_step} \\
    /bin/bash -c "$task" worker \\
    {worker_command} &
workers=$!

alive() {{ kill -0 "$1" 2>/dev/null; }}
{wait_for}first_failure() {{  # the exit code of the task that failed first, or else the code given
    local name code
    for name in $(ls -tr "$REALHF_EXITS"); do
        code=$(<"$REALHF_EXITS/$name")
        if ((code != 0)); then echo "$code"; return; fi
    done
    echo "$1"
}}

{end}((code == 0)) || code=$(first_failure "$code")  # srun's may be that of a task which it killed itself
if ((code == 0)) && [ -z "$is_ended" ] && grep -qs '"state":"requeued"' {status}; then
    scontrol requeue "$job" || echo "SLURM does not let the job start once more; resume the run" >&2
fi
exit "$code"
"""
