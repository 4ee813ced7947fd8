"""`realhf run`: plan an experiment, start its processes, watch them, and say how it went."""

import argparse
import time
from pathlib import Path

from realhf.base.errors import UserError
from realhf.cli.experiment import add_experiment_arguments, plan_request
from realhf.cli.launchers import add_launcher_arguments, launcher_of
from realhf.cli.progress import Progress, print_summary
from realhf.lifecycle.controller import preview, resume, start
from realhf.lifecycle.new import new_run
from realhf.lifecycle.request import SPEC_OPTIONS, RecoveryRequest, ReplanRequest, RunRequest

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
    add_launcher_arguments(command)
    command.add_argument(
        "--dry-run", action="store_true", help="print what the launcher would start, and start nothing"
    )


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
        default="never",
        help="auto: when a process dies or hangs, restart all from the newest good checkpoint (default never)",
    )
    group.add_argument("--max-restarts", type=int, default=3, metavar="K", help="of --recover auto, in all (default 3)")
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
        default=[],
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
        default="off",
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
    request = run_request(arguments)
    if arguments.resume and arguments.dry_run:
        raise UserError("--dry-run shows a new run's batch script; leave out --resume, or see launcher/job.sbatch")
    with Progress() as progress:
        if not arguments.resume:
            run = new_run(request, progress.search)
            if arguments.dry_run:
                print(preview(run, request))
                return 0
        began = time.monotonic()
        directory = resume(request, progress) if arguments.resume else start(run, request, progress)
    print_summary(directory, time.monotonic() - began)
    return 0


def run_request(arguments: argparse.Namespace) -> RunRequest:
    """What the command line asks for. Raises UserError for a number out of its range."""
    options = {name: getattr(arguments, name) for name in SPEC_OPTIONS}
    launcher, launcher_options = launcher_of(arguments)  # it takes its own options from the overrides
    return RunRequest(
        experiment=arguments.experiment,
        fields=tuple(arguments.overrides),
        run_dir=arguments.run_dir,
        plan=plan_request(arguments),
        launcher=launcher,
        launcher_options=launcher_options,
        network_interface=arguments.network_interface,
        spec_options={name: tuple(value) if isinstance(value, list) else value for name, value in options.items()},
        recovery=RecoveryRequest(
            recover=arguments.recover,
            max_restarts=arguments.max_restarts,
            min_workers=arguments.min_workers,
            fallback_plans=tuple(arguments.fallback_plan),
        ),
        replan=ReplanRequest(mode=arguments.replan, switch_cost_s=arguments.switch_cost_s),
        words=tuple(arguments.words),
    )


def _absolute(text: str) -> str:
    return str(Path(text).resolve())
