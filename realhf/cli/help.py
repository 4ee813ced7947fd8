"""The help of a command: its common options or all of them, the fields of the experiment, the launcher's options."""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import tyro

from realhf.api.experiment import SETTINGS_ATTRIBUTE, OptimizerConfig
from realhf.api.script.experiment import ScriptExperiment
from realhf.base.options import RANDOM_WEIGHTS, Common, Option, OptionField, declarations
from realhf.cli import parser
from realhf.cli.command import HELP, HELP_ALL, Command, launcher_heading
from realhf.cli.options import METAVARS, add_options, default_text
from realhf.experiments import ready_experiments
from realhf.launch.launcher import LAUNCHERS, find_launcher
from realhf.rundir.run import load_experiment_class

Names = tuple[str, ...]


def help_of(name: str, words: Sequence[str]) -> str:
    """The help that the words behind a command ask for. Raises UserError where they name an experiment or a launcher
    that there is not."""
    shown, asked = parser(name), parser(name)
    for action in asked._actions:
        action.required = False
    given, others = asked.parse_known_args([word for word in words if word not in (*HELP, HELP_ALL)])
    experiment: str | None = getattr(given, "experiment", None)
    launcher: str | None = getattr(given, "launcher", None)
    hidden = [launcher_heading(one) for one in LAUNCHERS]
    if experiment is not None:
        cls = load_experiment_class(experiment)
        launcher = launcher or getattr(cls, SETTINGS_ATTRIBUTE).launcher
        _describe(shown, experiment, cls)
        if any(word.partition("=")[0] == "--model" for word in others):
            hidden.append(RANDOM_WEIGHTS)
    if launcher is not None and launcher in LAUNCHERS:
        hidden.remove(launcher_heading(launcher))
    elif launcher:
        options = find_launcher(launcher, Path(experiment).parent if experiment else None).options_type
        add_options(shown, options, group=launcher_heading(launcher), shows_all=True)
    return shown.help_text(shows_all=HELP_ALL in words, without=hidden)


def _describe(command: Command, path: str, cls: type) -> None:
    """Adds the fields of the experiment in a file, and says what it is."""
    command.leave_out("experiment", "list")
    ready = next((one for one in ready_experiments() if str(one.path) == path), None)
    command.prog = f"{command.prog} {ready.name if ready else path}"
    about = (inspect.getdoc(cls) or "").partition("\n\n")[0]
    command.description = f"{ready.summary}\nNeeds {ready.needs}." if ready else about
    command.epilog = None
    for one in experiment_fields(cls):
        if not command.has(one.flag):
            command.add(one.flag, one.option, default_text(one), **_shown(one))


def _shown(one: OptionField) -> dict[str, Any]:
    """How the help shows the value of a field."""
    value, metavar = one.type, one.option.metavar
    if value is bool:
        return {"metavar": "{True,False}"} if one.default is None else {"action": "store_true"}
    if get_origin(value) is Literal:
        return {"choices": get_args(value)}
    if get_origin(value) is tuple:
        return {"metavar": metavar or f"{METAVARS.get(get_args(value)[0], 'VALUE')} ..."}
    return {"metavar": metavar or METAVARS.get(value, "VALUE")}


def experiment_fields(cls: type[Any]) -> Iterator[OptionField]:
    """The fields of an experiment's dataclass that a command line can set, by the names that tyro gives them. Those of
    optimizers are left out for models that the script only reads."""
    untrained = cls.untrained() if issubclass(cls, ScriptExperiment) else frozenset[str]()
    of_optimizer = {one.name for one in fields(OptimizerConfig)} | {"with_optimizer"}
    for path, one in _within(cls):
        if not (path[0] in untrained and path[-1] in of_optimizer):
            yield one


def _within(
    of: type[Any], values: Any = None, path: Names = (), names: Names = ()
) -> Iterator[tuple[Names, OptionField]]:
    """The fields of a dataclass and of those in it, each with its path. `values`: has their defaults, where it is not
    None. `names`: the parts of an option's name that come before theirs."""
    known = declarations(of)
    for one in fields(of):
        declared, about = known[one.name]
        if tyro.conf.Suppress in about:
            continue
        default = _default(one) if values is None else getattr(values, one.name)
        is_named = not any(getattr(argument, "name", None) == "" for argument in about)
        inner, outer = (*path, one.name), (*names, one.name.replace("_", "-")) if is_named else names
        if isinstance(declared, type) and is_dataclass(declared):
            yield from _within(declared, None if default is inspect.Parameter.empty else default, inner, outer)
            continue
        option = next((argument for argument in about if isinstance(argument, Option)), Common(""))
        heading = option.group or (path[0] if path else "fields")
        last = f"[no-]{outer[-1]}" if default is True else outer[-1]
        flag = f"--{'.'.join((*outer[:-1], last))}"
        yield inner, OptionField(flag=flag, type=declared, default=default, option=replace(option, group=heading))


def _default(one: Field[Any]) -> Any:
    if one.default_factory is not MISSING:
        return one.default_factory()
    return inspect.Parameter.empty if one.default is MISSING else one.default
