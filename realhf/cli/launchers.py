"""`--launcher`, and the options of the launcher that it names."""

import argparse
from pathlib import Path
from typing import Any

from realhf.base.options import options_in
from realhf.cli.options import add_options, options_of
from realhf.launch.launcher import LAUNCHERS, Launcher, find_launcher


def add_launcher_arguments(command: argparse.ArgumentParser) -> None:
    """`--launcher`, and a group of options for each launcher of the package."""
    names = ", ".join(LAUNCHERS)
    command.add_argument(
        "--launcher",
        metavar="NAME",
        default="local",
        help=f"what starts the processes: {names} or one of your own, MODULE:CLASS or FILE.py:CLASS (default local)",
    )
    for name in LAUNCHERS:
        if options_in(options := find_launcher(name).options_type):
            add_options(command.add_argument_group(f"--launcher {name}"), options)


def launcher_of(arguments: argparse.Namespace) -> tuple[type[Launcher], Any]:
    """The launcher that a command line names, and its options. Those of one from elsewhere leave
    `arguments.overrides`.

    Raises:
        UserError: there is no such launcher, or an option's value is wrong.
    """
    launcher = find_launcher(arguments.launcher, Path(arguments.experiment).parent)
    if arguments.launcher not in LAUNCHERS:
        own = argparse.ArgumentParser(prog=f"realhf run --launcher {arguments.launcher}", allow_abbrev=False)
        add_options(own, launcher.options_type, known=vars(arguments))
        _, arguments.overrides = own.parse_known_args(arguments.overrides, arguments)
    for name in LAUNCHERS:  # a wrong value is told whichever launcher it is for
        options_of(find_launcher(name).options_type, arguments)
    return launcher, options_of(launcher.options_type, arguments)
