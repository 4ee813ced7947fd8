"""The help of a command: its common options or all of them, the fields of the experiment, the launcher's options."""

import inspect
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from realhf.api.experiment import SETTINGS_ATTRIBUTE
from realhf.api.fields import as_typed, experiment_fields
from realhf.base.options import RANDOM_WEIGHTS, OptionField
from realhf.cli import WITH_EXPERIMENT, parser
from realhf.cli.command import HELP, HELP_ALL, Command, launcher_heading
from realhf.cli.options import METAVARS, add_options, default_text
from realhf.experiments import ready_experiments
from realhf.launch.launcher import LAUNCHERS, find_launcher
from realhf.rundir.run import load_experiment_class


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
        if name in WITH_EXPERIMENT:
            _describe(shown, experiment, cls)
        _add_fields(shown, cls)
        if name not in WITH_EXPERIMENT or any(word.partition("=")[0] == "--model" for word in others):
            hidden.append(RANDOM_WEIGHTS)
    if launcher is not None and launcher in LAUNCHERS:
        hidden.remove(launcher_heading(launcher))
    elif launcher:
        options = find_launcher(launcher, Path(experiment).parent if experiment else None).options_type
        add_options(shown, options, group=launcher_heading(launcher), shows_all=True)
    return shown.help_text(shows_all=HELP_ALL in words, without=hidden)


def _describe(command: Command, path: str, cls: type) -> None:
    """Says what the experiment in a file is."""
    command.leave_out("experiment", "list")
    ready = next((one for one in ready_experiments() if str(one.path) == path), None)
    command.prog = f"{command.prog} {ready.name if ready else path}"
    about = (inspect.getdoc(cls) or "").partition("\n\n")[0]
    command.description = f"{ready.summary}\nNeeds {ready.needs}." if ready else about
    command.epilog = None


def _add_fields(command: Command, cls: type) -> None:
    for one in experiment_fields(cls):
        if not command.has(one.flag):
            option = replace(one.option, documentation=as_typed(one.option.documentation, cls))
            command.add(one.flag, option, default_text(one), **_shown(one))


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
