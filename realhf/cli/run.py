"""`realhf run`: plan an experiment, start its processes, watch them, and say how it went."""

import argparse
from pathlib import Path

from realhf.base.errors import UserError
from realhf.base.options import options_in
from realhf.cli import THEN
from realhf.cli.detach import detached, how_to_watch
from realhf.cli.options import add_experiment_arguments, add_options, options_of
from realhf.cli.output import Output
from realhf.cli.progress import shown
from realhf.cli.request import run_request
from realhf.cli.several import run_chain, run_in_job, run_sweep
from realhf.data.inputs import ACCEPT
from realhf.launch.launcher import LAUNCHERS, find_launcher
from realhf.lifecycle.controller import preview, resume, start
from realhf.lifecycle.interruption import Detached
from realhf.lifecycle.new import new_run
from realhf.lifecycle.request import CheckpointOptions, RecoveryRequest, ReplanRequest, RunOptions
from realhf.lifecycle.stages import SweepOptions
from realhf.lifecycle.unplanned import plans_in_job

DESCRIPTION = """Runs an experiment: finds a plan, starts one master and one worker a device, and trains.
Any field of the experiment can be given as --field value; `realhf run FILE --fields` lists them."""

EXAMPLE = """examples:
  realhf run grpo --model ./Qwen2.5-1.5B --data train.jsonl --reward rewards.py:correct
  realhf run experiments/ppo.py --steps 10 --ppo.kl-coef 0.02
  realhf run experiments/ppo.py --plan plan.json --run-dir runs/mine
  realhf run experiments/ppo.py --run-dir runs/mine --resume
  realhf run experiments/ppo.py --launcher slurm --nodes 2 --gpus-per-node 8
  realhf run experiments/sft.py --run-dir runs/sft --then experiments/ppo.py --model runs/sft
  realhf run experiments/ppo.py --seeds 4 --sweep ppo.kl-coef=0.01,0.1"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    add_experiment_arguments(command)
    command.add_argument("--run-dir", type=Path, help="where everything is written (default runs/NAME-TIME)")
    add_options(command, RunOptions)
    recovery = command.add_argument_group("checkpoints and recovery")
    add_options(recovery, CheckpointOptions)
    add_options(recovery, RecoveryRequest)
    recovery.add_argument(
        "--resume", action="store_true", help="go on with the run in --run-dir, from its newest good checkpoint"
    )
    add_options(command.add_argument_group("measured times that leave the plan's predictions"), ReplanRequest)
    names = ", ".join(LAUNCHERS)
    command.add_argument(
        "--launcher",
        metavar="NAME",
        help=f"what starts the processes: {names} or one of your own, MODULE:CLASS or FILE.py:CLASS (default: that of "
        "@auto, else local)",
    )
    for name in LAUNCHERS:
        if options_in(options := find_launcher(name).options_type):
            add_options(command.add_argument_group(f"--launcher {name}"), options)
    command.add_argument(
        "--detach",
        action="store_true",
        help="leave the run alone once it has started: a SLURM job in its queue, a local run without this terminal",
    )
    several = command.add_argument_group("several runs")
    # Only for the help: the words of a chain are parsed stage by stage.
    several.add_argument(
        THEN,
        metavar="EXPERIMENT ...",
        default=argparse.SUPPRESS,
        help="another run, with its own options, that begins when the one before has ended well; may be repeated",
    )
    add_options(several, SweepOptions)
    command.add_argument(
        "--dry-run", action="store_true", help="print what the launcher would start, and start nothing"
    )


def execute(arguments: argparse.Namespace) -> int:
    request, sweep = run_request(arguments), options_of(SweepOptions, arguments)
    if sweep.fields and THEN in arguments.all_words:
        raise UserError("a stage of a chain is one run: give --seeds and --sweep without --then")
    if sweep.fields:
        return run_sweep(arguments, request, sweep)
    if THEN in arguments.all_words:
        return run_chain(arguments, request)
    if arguments.detach and not request.launcher.is_remote:
        return detached(request.words, request.run_dir)
    if request.launcher.queues and not arguments.resume and plans_in_job(request):
        return run_in_job(arguments, request)
    if request.recovery.accept_changed_inputs and not arguments.resume:
        raise UserError(f"{ACCEPT} is for a run that goes on; give --resume too, or leave it out")
    if arguments.resume and arguments.dry_run:
        raise UserError("--dry-run shows a new run's batch script; leave out --resume, or see launcher/job.sbatch")
    if not arguments.dry_run:
        request.launcher(request.launcher_options).check()
    try:
        with shown(request) as listener:
            if arguments.resume:
                resume(request, listener)
                return 0
            run = new_run(request, listener.search)
            if arguments.dry_run:
                print(preview(run, request))
            else:
                start(run, request, listener)
    except Detached:
        Output(stderr=True).say(how_to_watch(request.run_dir))
    return 0
