"""`realhf run`: plan an experiment, start its processes, watch them, and say how it went."""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from realhf.api.experiment import SETTINGS_ATTRIBUTE, AutoSettings
from realhf.base.errors import UserError
from realhf.base.options import Common
from realhf.cli import THEN
from realhf.cli.command import Command, launcher_heading
from realhf.cli.detach import detached, how_to_watch
from realhf.cli.options import add_experiment_arguments, add_options, given_in, options_of, plan_request
from realhf.cli.progress import Progress, print_summary
from realhf.cli.stages import SweepOptions
from realhf.data.inputs import ACCEPT
from realhf.launch.launcher import LAUNCHERS, Launcher, find_launcher
from realhf.lifecycle.controller import default_run_directory, preview, resume, start
from realhf.lifecycle.interruption import Detached
from realhf.lifecycle.new import new_run
from realhf.lifecycle.queued import plans_in_job
from realhf.lifecycle.request import RecoveryRequest, ReplanRequest, RunRequest
from realhf.rundir.run import RunSpec, load_experiment_class

DESCRIPTION = """Runs an experiment: finds a plan, starts one master and one worker a device, and trains.
Any field of the experiment can be given as --field value: `realhf run grpo --help` shows those of GRPO."""

EXAMPLE = """examples:
  realhf run grpo --model ./Qwen2.5-1.5B --data train.jsonl --reward rewards.py:correct
  realhf run experiments/ppo.py --run-dir runs/mine --resume
  realhf run experiments/ppo.py --launcher slurm --nodes 2 --gpus-per-node 8
  realhf run experiments/sft.py --run-dir runs/sft --then experiments/ppo.py --model runs/sft"""


def add_arguments(command: Command) -> None:
    command.add(
        "--run-dir", Common("where everything is written (default runs/NAME-TIME)"), type=Path, metavar="FOLDER"
    )
    resume = "go on with the run in --run-dir, from its newest good checkpoint"
    command.add("--resume", Common(resume), action="store_true")
    command.add("--dry-run", Common("print what the launcher would start, and start nothing"), action="store_true")
    detach = "return once the run has started, or its SLURM job is in the queue"
    command.add("--detach", Common(detach), action="store_true")
    launcher = (
        f"what starts the processes: {', '.join(LAUNCHERS)}, MODULE:CLASS or FILE.py:CLASS (default: that of @auto, "
        "else local); `--launcher slurm --help` shows SLURM's options"
    )
    command.add("--launcher", Common(launcher, group="devices"), metavar="NAME")
    add_experiment_arguments(command)
    add_options(command, RecoveryRequest)
    add_options(command, RunSpec)
    add_options(command, ReplanRequest)
    for name in LAUNCHERS:
        add_options(command, find_launcher(name).options_type, group=launcher_heading(name), shows_all=True)
    # Only for the help: the words of a chain are parsed stage by stage.
    then = "another run, with its own options, after the one before has ended well; may be repeated"
    command.add(THEN, Common(then, group="several runs"), metavar="EXPERIMENT ...", default=argparse.SUPPRESS)
    add_options(command, SweepOptions)


def execute(arguments: argparse.Namespace) -> int:
    from realhf.cli import several  # which imports this module

    request = run_request(arguments)
    is_sweep, is_chain = bool(options_of(SweepOptions, arguments).fields), THEN in arguments.all_words
    if is_sweep and is_chain:
        raise UserError("a stage of a chain is one run: give --seeds and --sweep without --then")
    if is_sweep or is_chain:
        return several.run_sweep(arguments, request) if is_sweep else several.run_chain(arguments, request)
    if arguments.detach and not request.launcher.is_remote:
        assert request.run_dir is not None
        return detached(request.words, request.run_dir)
    if several.is_queued(request) and not arguments.resume and plans_in_job(request):
        return several.run_in_job(request, leaves=arguments.detach, is_shown=arguments.dry_run)
    if request.recovery.accept_changed_inputs and not arguments.resume:
        raise UserError(f"{ACCEPT} is for a run that goes on; give --resume too, or leave it out")
    if arguments.resume and arguments.dry_run:
        raise UserError("--dry-run shows a new run's batch script; leave out --resume, or see launcher/job.sbatch")
    if not arguments.dry_run:
        request.launcher(request.launcher_options).check()
    with Progress(has_bar=not request.launcher.uses_terminal) as progress:
        if not arguments.resume:
            run = new_run(request, progress.search)
            if arguments.dry_run:
                print(preview(run, request))
                return 0
        began = time.monotonic()
        try:
            directory = resume(request, progress) if arguments.resume else start(run, request, progress)
        except Detached:
            progress.say(how_to_watch(request.run_dir))
            return 0
    print_summary(directory, time.monotonic() - began)
    return 0


def run_request(arguments: argparse.Namespace) -> RunRequest:
    """What the command line asks for. Raises UserError for a number out of its range."""
    if arguments.detach and arguments.run_dir is None:  # it is named at the end
        arguments.run_dir = default_run_directory(arguments.experiment)
    take_place_of_auto(arguments)
    launcher, launcher_options = launcher_of(arguments)  # it takes its own options from the overrides
    return RunRequest(
        experiment=arguments.experiment,
        fields=tuple(arguments.overrides),
        run_dir=arguments.run_dir,
        plan=plan_request(arguments),
        launcher=launcher,
        launcher_options=launcher_options,
        spec=given_in(RunSpec, arguments),
        recovery=options_of(RecoveryRequest, arguments),
        replan=options_of(ReplanRequest, arguments),
        words=tuple(arguments.words),
        detached=arguments.detach,
    )


def request_of_words(words: Sequence[str]) -> RunRequest:
    """What a command line of `realhf run` asked for, given in its working directory."""
    from realhf.cli import parser  # which imports this module

    arguments, others = parser("run").parse_known_args(words[1:])
    arguments.overrides, arguments.words = others, words
    return run_request(arguments)


def take_place_of_auto(arguments: argparse.Namespace) -> None:
    """Has the launcher, the nodes and their devices be those of `@auto`, as far as the command line says nothing else.
    A run that is resumed, or has a plan, has its devices."""
    settings = AutoSettings(batch_size=1)
    if Path(arguments.experiment).is_file():
        settings = getattr(load_experiment_class(arguments.experiment), SETTINGS_ATTRIBUTE)
    if arguments.launcher is None:
        arguments.launcher = settings.launcher or "local"
    given = {word.partition("=")[0] for word in arguments.words}
    is_elsewhere = settings.launcher not in (None, arguments.launcher)
    if is_elsewhere or arguments.resume or given & {"--plan", "--num-workers"}:
        return
    if settings.nodes is not None and "--nodes" not in given:
        arguments.nodes = settings.nodes
    if settings.gpus_per_node is not None and "--gpus-per-node" not in given:
        arguments.gpus_per_node = settings.gpus_per_node


def launcher_of(arguments: argparse.Namespace) -> tuple[type[Launcher], Any]:
    """The launcher that a command line names, and its options. Those of one from elsewhere leave
    `arguments.overrides`. Raises UserError if there is no such launcher, or an option's value is wrong."""
    launcher = find_launcher(arguments.launcher, Path(arguments.experiment).parent)
    if arguments.launcher not in LAUNCHERS:
        own = Command(f"run --launcher {arguments.launcher}", takes_fields=True)
        add_options(own, launcher.options_type)
        _, arguments.overrides = own.parse_known_args(arguments.overrides, arguments)
    for name in LAUNCHERS:  # a wrong value is told whichever launcher it is for
        options_of(find_launcher(name).options_type, arguments)
    return launcher, options_of(launcher.options_type, arguments)
