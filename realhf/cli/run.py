"""`realhf run`: plan an experiment, start its processes, watch them, and say how it went."""

import argparse
import contextlib
import sys
import time
from pathlib import Path
from typing import Literal

from realhf.base.errors import RunError, UserError
from realhf.base.files import delete
from realhf.cli.devices import said_of_hardware
from realhf.cli.experiment import add_experiment_arguments
from realhf.cli.fewer import recovery_of
from realhf.cli.going_on import NOT_KEPT, going_on
from realhf.cli.interruption import Interruption
from realhf.cli.progress import Progress, print_summary
from realhf.cli.replanning import Replanner
from realhf.cli.runs import new_run, resumed_run
from realhf.launch.devices import gpus_for
from realhf.launch.launcher import MASTER, Launcher
from realhf.launch.site import LocalSite, Site, SlurmSite
from realhf.launch.slurm.launcher import SlurmLauncher
from realhf.launch.slurm.script import SlurmOptions, sbatch_text
from realhf.launch.start import prepare
from realhf.lifecycle.recover import note_start, run_to_end
from realhf.rundir.checkpoints import remove_unfinished
from realhf.rundir.events import note
from realhf.rundir.paths import RunDirectory
from realhf.rundir.run import Run
from realhf.rundir.status import Status, write_status

LAUNCHER_LOCK = "launcher"

DESCRIPTION = """Runs an experiment: finds a plan, starts one master and one worker a device, and trains.
Any field of the experiment can be given as --field value; `realhf run FILE --fields` lists them."""

EXAMPLE = """examples:
  realhf run experiments/ppo.py --steps 10 --ppo.kl-coef 0.02
  realhf run experiments/ppo.py --plan plan.json --run-dir runs/mine
  realhf run experiments/ppo.py --run-dir runs/mine --resume
  realhf run experiments/ppo.py --launcher slurm --nodes 2 --gpus-per-node 8"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    add_experiment_arguments(command)
    command.add_argument("--run-dir", type=Path, help="where everything is written (default runs/NAME-TIME)")
    command.add_argument("--launcher", choices=("local", "slurm"))
    command.add_argument("--record", nargs="+", metavar="KEY", help="write these keys' data to rollouts/")
    command.add_argument(
        "--replay", type=_absolute, metavar="FOLDER", help="a rollouts/ folder whose responses are taken, none drawn"
    )
    command.add_argument(
        "--verify-reallocations-every",
        type=int,
        metavar="STEPS",
        help="compare checksums of reallocated parameters every so many steps, beside the first time "
        "(default 100; 1: always, 0: never)",
    )
    command.add_argument(
        "--call-timeout-s", type=float, help="how long every call may take, whatever was predicted (default 600)"
    )
    command.add_argument(
        "--deadline-factor", type=float, help="how many times its predicted time a longer call may take (default 20)"
    )
    command.add_argument("--setup-timeout-s", type=float, help="longest the start may take (default 300)")
    command.add_argument("--network-interface", help="interface for gloo and NCCL (default: loopback on one machine)")
    command.add_argument(
        "--tensorboard", action="store_true", default=None, help="also write TensorBoard's files to tensorboard/"
    )
    command.add_argument(
        "--wandb", dest="wandb_project", metavar="PROJECT", help="also send metrics to a project of Weights & Biases"
    )
    _add_checkpoint_arguments(command)
    _add_replanning_arguments(command)
    slurm = command.add_argument_group("SLURM")
    slurm.add_argument("--partition")
    slurm.add_argument("--account")
    slurm.add_argument("--time-limit", help="as sbatch --time")
    slurm.add_argument("--nodelist", help="as sbatch --nodelist (default: that of @auto)")
    slurm.add_argument("--cpu-only", action="store_true", help="the nodes have no GPUs; ask for none")
    slurm.add_argument("--sbatch", action="append", metavar="OPTION", help="a further sbatch option")
    slurm.add_argument("--queue-timeout-s", type=float, help="longest to wait for the job to start")
    slurm.add_argument("--dry-run", action="store_true", help="print the sbatch text and submit nothing")
    command.set_defaults(**NOT_KEPT)


def _add_checkpoint_arguments(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("checkpoints and recovery")
    group.add_argument(
        "--checkpoint-every",
        dest="checkpoint_every_steps",
        type=int,
        metavar="STEPS",
        help="save every so many steps, beside the end",
    )
    group.add_argument(
        "--checkpoint-every-minutes", type=float, metavar="MINUTES", help="save about every so many minutes"
    )
    group.add_argument("--keep-checkpoints", type=int, metavar="N", help="keep the newest N (default: all)")
    group.add_argument(
        "--keep-best",
        metavar="STATISTIC",
        help="keep the checkpoint with its highest value too (min:STATISTIC: the lowest)",
    )
    group.add_argument(
        "--checkpoint-failures",
        type=int,
        metavar="N",
        help="go on when a checkpoint cannot be written, but not after more than N in a row (default 0)",
    )
    group.add_argument(
        "--recover",
        choices=("auto", "never"),
        help="auto: when a process dies or hangs, restart all from the newest good checkpoint (default never)",
    )
    group.add_argument("--max-restarts", type=int, metavar="K", help="of --recover auto, in all (default 3)")
    group.add_argument(
        "--min-workers",
        type=int,
        metavar="N",
        help="--recover auto goes on with fewer workers, N at least, where devices or nodes are lost "
        "(default: with --fallback-plan those of its smallest, else no fewer)",
    )
    group.add_argument(
        "--fallback-plan",
        type=Path,
        action="append",
        metavar="PLAN",
        help="take this plan.json where workers are lost and it fits, rather than search for one; may be repeated, "
        "the largest that fits is taken",
    )
    group.add_argument(
        "--resume", action="store_true", help="go on with the run in --run-dir, from its newest good checkpoint"
    )


def _add_replanning_arguments(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("measured times that leave the plan's predictions")
    group.add_argument(
        "--replan",
        choices=("off", "suggest", "switch"),
        help="suggest: search the plan again in the background, with the measured times, and say what it would gain; "
        "switch: also change to it at a checkpoint where that pays (default off: only say that times have drifted)",
    )
    group.add_argument(
        "--drift-threshold",
        type=float,
        metavar="X",
        help="say so when a call takes more than X times what was predicted, or less than 1/X of it (default 1.5)",
    )
    group.add_argument(
        "--switch-cost-s",
        type=float,
        metavar="S",
        help="what a change of plan costs, in seconds (default: as long as the start took)",
    )


def execute(arguments: argparse.Namespace) -> int:
    if arguments.resume:
        return _resume(arguments)
    run = new_run(arguments)
    directory = RunDirectory(_run_directory(arguments))
    if arguments.dry_run:
        job = SlurmSite(_slurm_options(arguments, run), directory)
        print(sbatch_text(job.options_of(run), job.processes(run), directory))
        return 0
    site = _site(arguments, run, directory)
    RunDirectory.create(directory.path)
    with directory.lock(LAUNCHER_LOCK):
        try:
            prepare(run, directory)
        except RunError:  # there is nothing that --resume could go on with
            with contextlib.suppress(OSError):
                delete(directory.path)
            raise
        note_start(run, directory, "started")
        return _carry_out(run, directory, site, arguments)


def _resume(arguments: argparse.Namespace) -> int:
    if arguments.run_dir is None:
        raise UserError("--resume goes on with a run that was begun: give its directory with --run-dir")
    if arguments.dry_run:
        raise UserError("--dry-run shows a new run's batch script; leave out --resume, or see launcher/job.sbatch")
    directory = RunDirectory.open(arguments.run_dir)
    with directory.lock(LAUNCHER_LOCK):
        with directory.lock(MASTER):  # of a job that outlived its launcher
            run, choice = resumed_run(arguments, directory)
            site = _site(arguments, run, directory)
            prepare(run, directory)
        note_start(run, directory, "resumed", choice)
        for step, reason in choice.damaged.items():
            print(f"the checkpoint after step {step} is passed over: {reason}", file=sys.stderr)
        print(f"the run goes on after step {run.spec.resume_step}", file=sys.stderr)
        return _carry_out(run, directory, site, arguments)


def _carry_out(run: Run, directory: RunDirectory, site: Site, arguments: argparse.Namespace) -> int:
    """Starts the processes of a run whose directory is ready, and returns the exit code when it has ended."""
    for line in said_of_hardware(run, arguments.plan):
        print(line, file=sys.stderr)
    started, steps = time.monotonic(), run.experiment.steps
    with Interruption() as interruption, Progress(directory, steps, run.spec.resume_step) as progress:
        replanner = Replanner(run, directory, arguments.replan, arguments.switch_cost_s, progress.say)

        def on_poll(launcher: Launcher) -> None:
            interruption.check()
            if isinstance(launcher, SlurmLauncher):
                progress.show_job(launcher.status())
            progress.update()
            replanner.poll()

        def on_restart(reason: str, again: Run) -> None:
            progress.restart(reason, again.spec.resume_step)
            progress.begin(again.spec.num_workers)
            replanner.started(again)

        progress.begin(run.spec.num_workers)
        try:
            run_to_end(
                run,
                directory,
                site,
                recovery_of(arguments, replanner.next_run),
                on_poll=on_poll,
                on_restart=on_restart,
            )
            note(directory.events, "ended", steps)
        except (KeyboardInterrupt, RunError, UserError) as error:
            # The last word, since the master may have been killed, or ended because somebody else was.
            with interruption.ignored():
                progress.update()
                is_interrupted = isinstance(error, KeyboardInterrupt)
                state: Literal["failed", "interrupted"] = "interrupted" if is_interrupted else "failed"
                note(directory.events, state, progress.step, str(error))
                error.add_note(going_on(run, directory, arguments, progress.step))
                message = "\n".join(filter(None, [str(error), *error.__notes__]))
                status = Status(state=state, step=progress.step, steps=steps, message=message)
                with contextlib.suppress(OSError):  # on a full disk: what went wrong is said below
                    remove_unfinished(directory.checkpoints)
                    write_status(directory.status, status)
            raise
        finally:
            replanner.stop()
            _write_report(directory)
    print_summary(directory, time.monotonic() - started)
    return 0


def _run_directory(arguments: argparse.Namespace) -> Path:
    name = f"{Path(arguments.experiment).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    return (arguments.run_dir or Path("runs") / name).absolute()


def _write_report(directory: RunDirectory) -> None:
    """Leaves a report of however much there was of the run; what it lacks must not hide how the run ended."""
    from realhf.report.page import write_report  # plotly takes a while to import

    try:
        write_report(directory)
    except (UserError, OSError) as error:
        print(f"no report: {error}", file=sys.stderr)


def _absolute(text: str) -> str:
    return str(Path(text).resolve())


def _site(arguments: argparse.Namespace, run: Run, directory: RunDirectory) -> Site:
    if arguments.launcher == "local":
        return LocalSite(directory, gpus_for(run.spec.num_workers, run.spec.avoided))
    return SlurmSite(_slurm_options(arguments, run), directory)


def _slurm_options(arguments: argparse.Namespace, run: Run) -> SlurmOptions:
    return SlurmOptions(
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
