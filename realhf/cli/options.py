"""The options of requests (`realhf.base.options`) as arguments of a command; those that name an experiment."""

import argparse
from collections.abc import Container
from dataclasses import MISSING, fields
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NoReturn, Protocol, TypeVar, get_args, get_origin, get_type_hints

from realhf.base.errors import UserError
from realhf.base.options import options_in
from realhf.cli.output import Output
from realhf.experiments import ready_experiments, ready_file
from realhf.planning.presets import PRESETS
from realhf.planning.request import DevicesRequest, Measured, PlanRequest, SearchBudget

T = TypeVar("T")


class Arguments(Protocol):
    """A parser, or a group of one."""

    def add_argument(self, name: str, **settings: Any) -> Any: ...


def add_options(to: Arguments, of: type, known: Container[str] = ()) -> None:
    """Adds the options of a dataclass, except those whose values are among the parsed arguments `known`."""
    types, defaults = get_type_hints(of), {one.name: one.default for one in fields(of)}
    for name, option in options_in(of).items():
        if option.attribute in known:
            continue
        value = next((one for one in get_args(types[name]) if NoneType in get_args(types[name])), types[name])
        settings: dict[str, Any] = {"help": option.help}
        settings |= {"required": True} if defaults[name] is MISSING else {"default": defaults[name]}
        if value is bool:
            settings["action"] = "store_true"
        elif get_origin(value) is Literal:
            settings["choices"] = get_args(value)
        elif get_origin(value) is tuple:
            settings |= {"type": get_args(value)[0], "metavar": option.metavar}
            settings |= (
                {"nargs": "+"} if defaults[name] is None else {"action": "append", "default": [*settings["default"]]}
            )
        else:
            settings |= {"type": value, "metavar": option.metavar}
        to.add_argument(option.flag, **settings)


def options_of(of: type[T], arguments: argparse.Namespace, **others: Any) -> T:
    """The dataclass with its options from parsed arguments, and `others`. Raises UserError as the dataclass does."""
    values = {name: getattr(arguments, option.attribute) for name, option in options_in(of).items()}
    return of(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}, **others)


def add_experiment_arguments(command: argparse.ArgumentParser) -> None:
    """The arguments that name an experiment and the devices it may use."""
    add_experiment(command)
    command.add_argument("--plan", type=Path, help="take this plan.json instead of searching for one")
    command.add_argument(
        "--rule", choices=tuple(PRESETS), help="take the plan of this rule instead of searching for one"
    )
    add_options(command, DevicesRequest)
    add_options(command, PlanRequest)
    add_options(command.add_mutually_exclusive_group(), SearchBudget)
    command.add_argument(
        "--offload",
        metavar="MODELS",
        help="models that wait in host memory while nothing needs them: NAME,NAME, or none (default: as is searched)",
    )
    command.add_argument(
        "--ignore-runs", action="store_true", help="predict without the times that finished runs have left"
    )


def add_experiment(command: argparse.ArgumentParser) -> None:
    """The argument that names an experiment, and the list of the ready ones."""
    command.add_argument(
        "experiment", type=_experiment_file, help="a ready experiment (--list), or a Python file with one under @auto"
    )
    command.add_argument(
        "--list", action=_ListExperiments, nargs=0, default=argparse.SUPPRESS, help="show the ready experiments"
    )


class _ListExperiments(argparse.Action):
    """Prints the ready experiments, and ends the command."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        found, out = ready_experiments(), Output()
        width = max(len(one.name) for one in found)
        for one in found:
            out.say(f"{one.name:{width}}  {one.summary}", f"{'':{width}}  needs {one.needs}", "")
        out.say(
            "all take --steps, --batch-size, --seed and more: `realhf run NAME --fields` lists them",
            f"to change an algorithm, copy its file and run the copy: cp {found[0].path.parent}/NAME.py mine.py",
        )
        parser.exit()


def _experiment_file(word: str) -> str:
    """The path of the experiment that a word names: a ready one, or a file. Raises UserError for any other word."""
    ready = ready_file(word)
    if ready is not None or word.endswith(".py") or Path(word).is_file():
        return str(ready or word)
    if Path(word).is_dir():
        raise UserError(
            f"{word} is a directory, where the experiment is to be named first: realhf run grpo --model {word} ... "
            "(`realhf run --list` shows the ready ones)"
        )
    names = [one.name for one in ready_experiments()]
    meant = "".join(f"; did you mean {name}?" for name in get_close_matches(word, names, 1))
    raise UserError(
        f"{word!r} is neither a ready experiment nor a Python file; the ready ones are {', '.join(names)}{meant}"
    )


def _offload(names: str | None) -> tuple[str, ...] | None:
    if not names:
        return None
    return () if names == "none" else tuple(names.split(","))


def plan_request(arguments: argparse.Namespace) -> PlanRequest:
    """What the arguments of `add_experiment_arguments` ask of the planner. Raises UserError as `PlanRequest` does."""
    return options_of(
        PlanRequest,
        arguments,
        devices=options_of(DevicesRequest, arguments),
        plan=arguments.plan,
        rule=arguments.rule,
        budget=options_of(SearchBudget, arguments),
        offload=_offload(arguments.offload),
        measured=Measured(ignores_runs=arguments.ignore_runs),
    )
