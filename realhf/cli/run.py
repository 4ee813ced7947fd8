"""Runs an experiment: finds a plan, starts one master and one worker a device, and trains.
Any field of the experiment can be given as --field value: `realhf run grpo --help` shows those of GRPO.

examples:
  realhf run grpo --model ./Qwen2.5-1.5B --data train.jsonl --reward rewards.py:correct
  realhf run experiments/ppo.py --run-dir runs/mine --resume
  realhf run experiments/ppo.py --launcher slurm --nodes 2 --gpus-per-node 8
  realhf run experiments/sft.py --run-dir runs/sft --then experiments/ppo.py --model runs/sft
"""

import argparse
from pathlib import Path

from realhf.base.errors import UserError
from realhf.base.options import Common
from realhf.cli import THEN
from realhf.cli.command import Command
from realhf.cli.detach import detached, how_to_watch
from realhf.cli.options import add_experiment_arguments, add_options, options_of
from realhf.cli.output import Output
from realhf.cli.progress import shown
from realhf.cli.request import add_launcher, add_options_of_launchers, run_request
from realhf.cli.several import run_chain, run_in_job, run_sweep
from realhf.data.inputs import ACCEPT
from realhf.lifecycle.controller import preview, resume, start
from realhf.lifecycle.interruption import Detached
from realhf.lifecycle.new import new_run
from realhf.lifecycle.request import RecoveryRequest, ReplanRequest
from realhf.lifecycle.stages import SweepOptions
from realhf.lifecycle.unplanned import plans_in_job
from realhf.rundir.run import RunSpec


def add_arguments(command: Command) -> None:
    command.add(
        "--run-dir", Common("where everything is written (default runs/NAME-TIME)"), type=Path, metavar="FOLDER"
    )
    resume = "go on with the run in --run-dir, from its newest good checkpoint"
    command.add("--resume", Common(resume), action="store_true")
    command.add("--dry-run", Common("print what the launcher would start, and start nothing"), action="store_true")
    detach = "return once the run has started, or its SLURM job is in the queue"
    command.add("--detach", Common(detach), action="store_true")
    add_launcher(command)
    add_experiment_arguments(command)
    add_options(command, RecoveryRequest)
    add_options(command, RunSpec)
    add_options(command, ReplanRequest)
    add_options_of_launchers(command)
    # Only for the help: the words of a chain are parsed stage by stage.
    then = "another run, with its own options, after the one before has ended well; may be repeated"
    command.add(THEN, Common(then, group="several runs"), metavar="EXPERIMENT ...", default=argparse.SUPPRESS)
    add_options(command, SweepOptions)


def execute(arguments: argparse.Namespace) -> int:
    request, sweep = run_request(arguments), options_of(SweepOptions, arguments)
    is_chain = THEN in arguments.all_words
    if sweep.fields and is_chain:
        raise UserError("a stage of a chain is one run: give --seeds and --sweep without --then")
    if arguments.resume and (sweep.fields or is_chain):
        raise UserError("--resume goes on with one run; resume each by itself, without --then, --seeds and --sweep")
    if sweep.fields:
        return run_sweep(arguments, request, sweep)
    if is_chain:
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
