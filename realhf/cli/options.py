"""The options of requests (`realhf.base.options`) as arguments of a command; those that name an experiment."""

import argparse
import inspect
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin

from realhf.base.errors import UserError
from realhf.base.options import Common, Option, OptionField, options_in
from realhf.cli.command import Command
from realhf.cli.output import Output
from realhf.experiments import ready_experiments, ready_file
from realhf.planning.presets import PRESETS
from realhf.planning.request import DevicesRequest, Measured, PlanRequest, SearchBudget

T = TypeVar("T")

METAVARS = {int: "N", float: "X", Path: "FILE", str: "TEXT"}


def add_options(command: Command, of: type, *, group: str = "", shows_all: bool = False, **defaults: str) -> None:
    """Adds the options of a dataclass or Struct, under the heading `group` where one is given. `shows_all`: all of them
    are common. `defaults`: what the help says the command does without a field's option. Options that are not
    given leave nothing among the parsed arguments."""
    for name, one in options_in(of).items():
        kind = Common if shows_all else type(one.option)
        option = kind(one.option.documentation, group=group or one.option.group, range=one.option.range)
        said = defaults.get(name, default_text(one))
        command.add(one.flag, option, said, default=argparse.SUPPRESS, **_settings(one))


def _settings(one: OptionField) -> dict[str, Any]:
    """How argparse reads an option."""
    value, option = one.type, one.option
    settings: dict[str, Any] = {"required": one.default is inspect.Parameter.empty}
    if value is bool:
        return settings | {"action": "store_true"}
    if get_origin(value) is Literal:
        return settings | {"choices": get_args(value)}
    if get_origin(value) is tuple:
        value = get_args(value)[0]
        settings |= {"nargs": "+"} if option.is_list else {"action": "append"}
    return settings | {"type": value, "metavar": option.metavar or METAVARS[value]}


def default_text(one: OptionField) -> str:
    """The default of an option as the help shows it; empty if there is none, or its text names one."""
    default = one.default
    if default in (None, "", (), inspect.Parameter.empty) or default is False or "default" in one.option.documentation:
        return ""
    value = "on" if default is True else f"{default:g}" if isinstance(default, float) else default
    return f"default {value}"


def given_in(of: type, arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of a dataclass or Struct that the parsed arguments give, by field."""
    given = vars(arguments)
    found = {name: given[one.attribute] for name, one in options_in(of).items() if one.attribute in given}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


def options_of(of: type[T], arguments: argparse.Namespace, **others: Any) -> T:
    """The dataclass with its options from parsed arguments, and `others`. Raises UserError as the dataclass does."""
    return of(**given_in(of, arguments), **others)


def add_experiment_arguments(command: Command) -> None:
    """The arguments that name an experiment and the devices it may use."""
    add_experiment(command)
    add_planning(command)


def add_planning(command: Command) -> None:
    """The arguments that say which devices an experiment may use, and how its plan is found."""
    add_options(command, DevicesRequest)
    add_options(command, PlanRequest)
    add_options(command, SearchBudget, seconds="default: as long as the problem needs")
    rule = Option("take the plan of this rule instead of searching for one", group="plan")
    command.add("--rule", rule, choices=tuple(PRESETS))
    offload = "models that wait in host memory while nothing needs them: NAME,NAME, or none (default: as is searched)"
    command.add("--offload", Option(offload, group="plan"), metavar="MODELS")
    add_options(command, Measured)


def add_experiment(command: argparse.ArgumentParser) -> None:
    """The argument that names an experiment, and the list of the ready ones."""
    command.add_argument(
        "experiment",
        metavar="EXPERIMENT",
        type=_experiment_file,
        help="a ready experiment (--list), or a Python file with one under @auto",
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
            "all take --steps, --batch-size, --seed and more: see `realhf run NAME --help`",
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


def plan_request(arguments: argparse.Namespace) -> PlanRequest:
    """The request to the planner from the arguments of `add_experiment_arguments`. Raises UserError as `PlanRequest`
    does, and for two budgets."""
    offload = None
    if arguments.offload:
        offload = () if arguments.offload == "none" else tuple(arguments.offload.split(","))
    return options_of(
        PlanRequest,
        arguments,
        devices=options_of(DevicesRequest, arguments),
        rule=arguments.rule,
        budget=budget_of(arguments),
        offload=offload,
        measured=options_of(Measured, arguments),
    )


def budget_of(arguments: argparse.Namespace) -> SearchBudget:
    """The budget of a search. Raises UserError for two of them."""
    budget = options_of(SearchBudget, arguments)
    if budget.evaluations is not None and budget.seconds is not None:
        raise UserError("--evaluations and --seconds are two budgets of one search; give one of them")
    return budget
