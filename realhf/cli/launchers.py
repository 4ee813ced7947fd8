"""`--launcher`, and the options of the launcher that it names."""

import argparse
from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol, get_args, get_type_hints

from realhf.launch.launcher import LAUNCHERS, Launcher, find_launcher, option_fields


class _Arguments(Protocol):
    """A parser, or a group of one."""

    def add_argument(self, name: str, **settings: Any) -> Any: ...


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
        launcher = find_launcher(name)
        if option_fields(launcher):
            _add(command.add_argument_group(f"--launcher {name}"), launcher, known=())


def launcher_of(arguments: argparse.Namespace) -> tuple[type[Launcher], Any]:
    """The launcher that a command line names, and its options. Those of one from elsewhere leave
    `arguments.overrides`.

    Raises:
        UserError: there is no such launcher, or an option's value is wrong.
    """
    launcher = find_launcher(arguments.launcher, Path(arguments.experiment).parent)
    if arguments.launcher not in LAUNCHERS:
        own = argparse.ArgumentParser(prog=f"realhf run --launcher {arguments.launcher}", allow_abbrev=False)
        _add(own, launcher, known=vars(arguments))
        _, arguments.overrides = own.parse_known_args(arguments.overrides, arguments)
    for name in LAUNCHERS:  # a wrong value is told whichever launcher it is for
        _options(find_launcher(name), arguments)
    return launcher, _options(launcher, arguments)


def _options(launcher: type[Launcher], arguments: argparse.Namespace) -> Any:
    given = {name: getattr(arguments, name) for name in option_fields(launcher)}
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return launcher.options_type(**options)


def _add(to: _Arguments, launcher: type[Launcher], known: Collection[str]) -> None:
    types = get_type_hints(launcher.options_type)
    for name, field in option_fields(launcher).items():
        if name in known:
            continue
        settings: dict[str, Any] = {"help": field.metadata["help"], "default": field.default}
        value, *_ = (*(one for one in get_args(types[name]) if one is not type(None)), types[name])
        if types[name] is bool:
            settings["action"] = "store_true"
        elif isinstance(field.default, tuple):
            settings |= {"action": "append", "metavar": "OPTION", "default": [*field.default]}
        else:
            settings["type"] = value
        to.add_argument(f"--{name.replace('_', '-')}", **settings)
