"""`realhf run`: plan an experiment, start its processes, watch them, and say how it went."""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from realhf.api.errors import RunError, UserError
from realhf.api.plan import save_plan, write_atomically
from realhf.api.run import Run, RunSpec
from realhf.api.status import RunState, Status, write_status
from realhf.cli.experiment import add_experiment_arguments, build_experiment
from realhf.cli.interruption import Interruption
from realhf.cli.planning import has_gpus, plan_for
from realhf.cli.progress import Progress, print_summary
from realhf.engine.megatron_check import check_megatron
from realhf.master.trackers import check_trackers
from realhf.models.checkpoint_index import initial_optimizer_steps
from realhf.models.hugging_face_files import check_checkpoint
from realhf.scheduler.base import MASTER, Launcher, ProcessSpec, worker_name
from realhf.scheduler.local import LocalLauncher
from realhf.scheduler.run_directory import RunDirectory
from realhf.scheduler.sbatch import SlurmOptions, sbatch_text
from realhf.scheduler.slurm import SlurmLauncher
from realhf.scheduler.supervisor import supervise
from realhf.search.cluster import Cluster
from realhf.transport.keys import make_run_keys

DESCRIPTION = """Runs an experiment: finds a plan, starts one master and one worker a device, and trains.
Any field of the experiment can be given as --field value; `realhf run FILE --fields` lists them."""

EXAMPLE = """examples:
  realhf run experiments/ppo.py --steps 10 --ppo.kl-coef 0.02
  realhf run experiments/ppo.py --plan plan.json --run-dir runs/mine
  realhf run experiments/ppo.py --launcher slurm --nodes 2 --gpus-per-node 8"""


def add_command(commands: Any) -> None:
    command = commands.add_parser(
        "run",
        help="run an experiment",
        description=DESCRIPTION,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # what is not known here is a field of the experiment
    )
    add_experiment_arguments(command)
    command.add_argument("--run-dir", type=Path, help="where everything is written (default runs/NAME-TIME)")
    command.add_argument("--launcher", choices=("local", "slurm"), default="local")
    command.add_argument("--record", nargs="+", default=[], metavar="KEY", help="write these keys' data to rollouts/")
    command.add_argument("--replay", type=Path, help="a rollouts/ folder whose responses are taken, none drawn")
    command.add_argument("--checkpoint-every", type=int, metavar="STEPS", help="also save every so many steps")
    command.add_argument(
        "--verify-reallocations-every",
        type=int,
        default=100,
        metavar="STEPS",
        help="compare checksums of reallocated parameters every so many steps, beside the first time "
        "(default 100; 1: always, 0: never)",
    )
    command.add_argument("--call-timeout-s", type=float, default=600.0, help="longest a call may take (default 600)")
    command.add_argument(
        "--setup-timeout-s", type=float, default=300.0, help="longest the start may take (default 300)"
    )
    command.add_argument("--network-interface", help="interface for gloo and NCCL (default: loopback on one machine)")
    command.add_argument("--tensorboard", action="store_true", help="also write TensorBoard's files to tensorboard/")
    command.add_argument("--wandb", metavar="PROJECT", help="also send metrics to a project of Weights & Biases")
    slurm = command.add_argument_group("SLURM")
    slurm.add_argument("--partition")
    slurm.add_argument("--account")
    slurm.add_argument("--time-limit", help="as sbatch --time")
    slurm.add_argument("--nodelist", help="as sbatch --nodelist (default: that of @auto)")
    slurm.add_argument("--cpu-only", action="store_true", help="the nodes have no GPUs; ask for none")
    slurm.add_argument("--sbatch", action="append", default=[], metavar="OPTION", help="a further sbatch option")
    slurm.add_argument("--queue-timeout-s", type=float, default=86_400.0, help="longest to wait for the job to start")
    slurm.add_argument("--dry-run", action="store_true", help="print the sbatch text and submit nothing")
    command.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    experiment = build_experiment(arguments.experiment, arguments.overrides)
    num_rows = experiment.dataset.check()
    plan, cluster = plan_for(experiment, arguments)
    run = Run(_spec(arguments, experiment, cluster), experiment, plan)
    _check(run, num_rows)
    _check_backends(run, has_gpus=has_gpus() if arguments.launcher == "local" else not arguments.cpu_only)
    directory = RunDirectory(_run_directory(arguments))
    processes = _processes(run, directory, is_local=arguments.launcher == "local")
    if arguments.dry_run:
        print(sbatch_text(_slurm_options(arguments, run), processes, directory))
        return 0
    RunDirectory.create(directory.path)
    write_atomically(directory.experiment, msgspec.json.format(msgspec.json.encode(run.spec), indent=2) + b"\n")
    save_plan(plan, directory.plan)
    make_run_keys(directory.keys, num_workers=run.spec.num_workers)
    write_status(directory.status, Status(state="starting", step=0, steps=experiment.steps))
    started = time.monotonic()
    launcher = _launcher(arguments, run, directory)
    with Interruption() as interruption, Progress(directory, experiment.steps) as progress:

        def on_poll() -> None:
            interruption.check()
            if isinstance(launcher, SlurmLauncher):
                progress.show_job(launcher.status())
            progress.update()

        try:
            supervise(launcher, processes, directory, on_poll)
        except (KeyboardInterrupt, RunError) as error:
            # The last word, since the master may have been killed, or ended because somebody else was.
            with interruption.ignored():
                progress.update()
                state: RunState = "failed" if isinstance(error, RunError) else "interrupted"
                write_status(
                    directory.status,
                    Status(state=state, step=progress.step, steps=experiment.steps, message=str(error)),
                )
            raise
        finally:
            _write_report(directory)
    print_summary(directory, time.monotonic() - started)
    return 0


def _spec(arguments: argparse.Namespace, experiment: Any, cluster: Cluster) -> RunSpec:
    interface = arguments.network_interface or ("lo" if arguments.launcher == "local" else None)
    return RunSpec(
        experiment_file=str(Path(arguments.experiment).resolve()),
        experiment_class=type(experiment).__name__,
        values=msgspec.to_builtins(experiment),
        working_directory=os.getcwd(),
        num_workers=cluster.num_devices,
        devices_per_node=cluster.devices_per_node,
        record=tuple(arguments.record),
        replay=str(arguments.replay.resolve()) if arguments.replay else None,
        checkpoint_every_steps=arguments.checkpoint_every,
        verify_reallocations_every=arguments.verify_reallocations_every,
        call_timeout_s=arguments.call_timeout_s,
        setup_timeout_s=arguments.setup_timeout_s,
        network_interface=interface,
        tensorboard=arguments.tensorboard,
        wandb_project=arguments.wandb,
    )


def _check(run: Run, num_rows: int) -> None:
    """Everything about a run that can be wrong, found before a process starts."""
    run.check()
    check_trackers(run.spec)
    if num_rows < run.settings.batch_size:
        raise UserError(f"the data set has {num_rows} rows, fewer than batch_size={run.settings.batch_size}; add rows")
    for name, setup in run.models.items():  # looked up once here: a checkpoint that does not fit is found now
        if setup.checkpoint is not None:
            check_checkpoint(setup.checkpoint, run.graph.models[name], setup.new_head)
            initial_optimizer_steps(setup)
    if run.evaluation:
        rows = run.evaluation.dataset.check()
        if rows % run.evaluation.batch_size:
            raise UserError(
                f"the evaluation's batch_size={run.evaluation.batch_size} does not divide its {rows} rows; "
                "change either"
            )
    if run.spec.replay and not Path(run.spec.replay).is_dir():
        raise UserError(f"--replay {run.spec.replay}: no such folder; give RUN_DIR/rollouts of a run with --record")
    if run.experiment.steps < 1:
        raise UserError(f"steps={run.experiment.steps} must be at least 1")


def _check_backends(run: Run, has_gpus: bool) -> None:
    """As the workers will at their start."""
    for name, setup in run.models.items():
        if setup.compute.backend == "megatron" and setup.optimizer is not None:
            check_megatron(run.graph.models[name], run.homes[name].strategy, "cuda" if has_gpus else "cpu")


def _run_directory(arguments: argparse.Namespace) -> Path:
    name = f"{Path(arguments.experiment).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    return (arguments.run_dir or Path("runs") / name).absolute()


def _processes(run: Run, directory: RunDirectory, is_local: bool) -> list[ProcessSpec]:
    """The master and one worker a device."""
    env = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "PYTHONUNBUFFERED": "1"}
    host = ("127.0.0.1",) if is_local else ()
    master = ProcessSpec(
        name=MASTER,
        argv=(sys.executable, "-m", "realhf.master", str(directory.path), *host),
        env=env,
        log_path=directory.log(MASTER),
    )
    workers = [
        ProcessSpec(
            name=worker_name(i),
            argv=(sys.executable, "-m", "realhf.worker", str(directory.path)),
            # Under SLURM each task is shown its own GPU; here the launcher does that. Without GPUs it means nothing.
            env={**env, "CUDA_VISIBLE_DEVICES": str(i)} if is_local else env,
            log_path=directory.log(worker_name(i)),
        )
        for i in range(run.spec.num_workers)
    ]
    return [master, *workers]


def _write_report(directory: RunDirectory) -> None:
    """Leaves a report of however much there was of the run; what it lacks must not hide how the run ended."""
    from realhf.report.page import write_report  # plotly takes a while to import

    try:
        write_report(directory)
    except (UserError, OSError) as error:
        print(f"no report: {error}", file=sys.stderr)


def _launcher(arguments: argparse.Namespace, run: Run, directory: RunDirectory) -> Launcher:
    if arguments.launcher == "local":
        return LocalLauncher()
    return SlurmLauncher(_slurm_options(arguments, run), directory)


def _slurm_options(arguments: argparse.Namespace, run: Run) -> SlurmOptions:
    return SlurmOptions(
        nodes=arguments.nodes,
        workers_per_node=run.spec.devices_per_node,
        with_gpus=not arguments.cpu_only,
        job_name=f"realhf-{Path(arguments.experiment).stem}",
        partition=arguments.partition,
        account=arguments.account,
        time_limit=arguments.time_limit,
        nodelist=arguments.nodelist or run.settings.nodelist,
        extra_args=tuple(arguments.sbatch),
        queue_timeout_s=arguments.queue_timeout_s,
    )
