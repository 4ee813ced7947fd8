"""From the words of `realhf run` to what they ask for."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from realhf.api.experiment import SETTINGS_ATTRIBUTE, AutoSettings
from realhf.base.options import Common
from realhf.cli import parser
from realhf.cli.command import Command, launcher_heading
from realhf.cli.options import add_options, given_in, options_of, plan_request
from realhf.launch.launcher import LAUNCHERS, Launcher, find_launcher
from realhf.lifecycle.request import RecoveryRequest, ReplanRequest, RunRequest, default_run_directory
from realhf.rundir.run import RunSpec, load_experiment_class


def add_launcher(command: Command) -> None:
    """The option that names what starts the processes."""
    launcher = (
        f"what starts the processes: {', '.join(LAUNCHERS)}, MODULE:CLASS or FILE.py:CLASS (default: that of @auto, "
        "else local); `--launcher slurm --help` shows SLURM's options"
    )
    command.add("--launcher", Common(launcher, group="devices"), metavar="NAME")


def add_options_of_launchers(command: Command) -> None:
    """Their own options, which the help shows where one is chosen."""
    for name in LAUNCHERS:
        add_options(command, find_launcher(name).options_type, group=launcher_heading(name), shows_all=True)


def run_request(arguments: argparse.Namespace) -> RunRequest:
    """The request of a command line. Raises UserError for a number out of its range."""
    if arguments.detach and arguments.run_dir is None:  # it is named at the end
        arguments.run_dir = default_run_directory(arguments.experiment)
    _fill_in(arguments)
    launcher, launcher_options = _launcher_of(arguments)  # it takes its own options from the overrides
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
    """The request of an earlier command line of `realhf run`, from its working directory."""
    arguments, others = parser("run").parse_known_args(words[1:])
    arguments.overrides, arguments.words = others, words
    return run_request(arguments)


def _fill_in(arguments: argparse.Namespace) -> None:
    """Fills in the launcher, the nodes and their devices from `@auto`, unless the command line gives them. A run that
    is resumed, or has a plan, has its devices."""
    settings = AutoSettings(batch_size=1)
    if Path(arguments.experiment).is_file():
        settings = getattr(load_experiment_class(arguments.experiment), SETTINGS_ATTRIBUTE)
    if arguments.launcher is None:
        arguments.launcher = settings.launcher or "local"
    is_elsewhere = settings.launcher not in (None, arguments.launcher)
    if is_elsewhere or arguments.resume or "plan" in arguments or "num_workers" in arguments:
        return
    for name, value in (("nodes", settings.nodes), ("gpus_per_node", settings.gpus_per_node)):
        if value is not None and name not in arguments:
            setattr(arguments, name, value)


def _launcher_of(arguments: argparse.Namespace) -> tuple[type[Launcher], Any]:
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
