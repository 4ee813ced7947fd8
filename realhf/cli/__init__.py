"""The command line: `realhf COMMAND`, with the commands of `GROUPS`."""

import importlib
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial

import realhf
from realhf.base.errors import RunError, UserError
from realhf.base.shown import visible
from realhf.cli.command import HELP, HELP_ALL, Command
from realhf.lifecycle.interruption import Stopped

# The commands by what people want, each with a line for `realhf --help`. Each is a module of this folder.
GROUPS: Mapping[str, Mapping[str, str]] = {
    "use": {
        "run": "plan an experiment, start its workers, and train",
        "evaluate": "have models answer held-out prompts, and compare their scores",
        "status": "say where a run stands",
        "attach": "watch a run that another process has started",
        "stop": "end a run with a checkpoint",
        "report": "write a run's report.html",
        "compare": "draw several runs in one page",
        "verify": "execute a step of a run once more, and compare",
    },
    "prepare": {
        "doctor": "check the installation and this machine",
        "profile": "measure this machine, once per model type",
        "data": "list the tasks that make data without a file, or show one",
        "convert": "convert a checkpoint from or to Hugging Face's format",
    },
    "study": {
        "plan": "find the fastest execution plan, or predict a given one",
        "replan": "search a run's plan again, with measured times",
        "osdp": "choose which operators of a model data parallelism shards",
        "search": "find the fastest plan of a planning problem given as a file",
    },
}
COMMANDS = {name: summary for commands in GROUPS.values() for name, summary in commands.items()}
THEN = "--then"  # of `realhf run`: another run follows, which begins after this one has ended well
WITH_EXPERIMENT = ("run", "plan", "profile")  # name an experiment
# Options that they do not know are fields of the experiment; `evaluate` is one itself.
TAKES_FIELDS = (*WITH_EXPERIMENT, "evaluate")
# (command, option that had another name or place) -> what to write now.
RENAMED: Mapping[tuple[str, str], str] = {
    ("plan", "--osdp"): "realhf osdp MODEL",
    ("plan", "--dump-version"): "realhf plan EXPERIMENT --dump-problem FILE",
    **{(name, "--fields"): f"realhf {name} EXPERIMENT --help-all" for name in WITH_EXPERIMENT},
}


def parser(name: str) -> Command:
    """The parser of a command, for the words behind its name. The docstring of the command's module is its description
    and its examples in the help. No other command's module is imported."""
    module = importlib.import_module(f"realhf.cli.{name}")
    command = Command(name, takes_fields=name in TAKES_FIELDS)
    command.description, _, command.epilog = (module.__doc__ or "").partition("\n\n")
    module.add_arguments(command)
    command.end_with_help()
    return command


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Its exit code: 0 all of it worked, 1 it failed, 2 the input was wrong, 130 interrupted;
    another number if a process of the run ended by itself with it."""
    try:
        return _asked(list(sys.argv[1:] if argv is None else argv))()
    except (UserError, RunError, KeyboardInterrupt, Stopped) as error:
        if argv is None and isinstance(error, KeyboardInterrupt | Stopped):
            # This process ends now: a second Ctrl-C must not turn its exit code into a signal's.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        print_error(error)
        return returncode_of(error)


def _asked(words: list[str]) -> Callable[[], int]:
    """The command that the words ask for: call it for the exit code. Help is printed here."""
    name, *rest = words or [""]
    if name == "--version":
        print(f"realhf {realhf.__version__}")
        return lambda: 0
    if not name or name in (*HELP, HELP_ALL):
        print(_overview(), file=sys.stdout if name else sys.stderr)
        return lambda: 0 if name else 2
    if name not in COMMANDS:
        meant = "".join(f"; did you mean {one}?" for one in get_close_matches(name, COMMANDS, 1))
        raise UserError(f"{name!r} is no command of realhf; choose from {', '.join(COMMANDS)}{meant}")
    for old in (word.partition("=")[0] for word in rest):
        if (name, old) in RENAMED:
            raise UserError(f"`realhf {name} {old}` is no more; write: {RENAMED[name, old]}")
    if {*HELP, HELP_ALL} & {*rest}:
        from realhf.cli.help import help_of  # which imports this module

        print(help_of(name, rest), end="")
        return lambda: 0
    # A chain is parsed stage by stage (`realhf.cli.several`).
    own = rest[: rest.index(THEN)] if name == "run" and THEN in rest else rest
    command = parser(name)
    arguments, others = command.parse_known_args(own)
    if others and not command.takes_fields:
        command.error(f"unknown arguments: {' '.join(others)}")
    arguments.overrides, arguments.words, arguments.all_words = others, [name, *own], words
    return partial(importlib.import_module(f"realhf.cli.{name}").execute, arguments)


def _overview() -> str:
    """The commands, in their groups."""
    lines = ["usage: realhf COMMAND ...", "", "Plans and runs reinforcement-learning training of language models."]
    width = max(len(name) for name in COMMANDS)
    for group, commands in GROUPS.items():
        lines += ["", f"{group}:", *(f"  {name:{width}}  {summary}" for name, summary in commands.items())]
    lines += [
        "",
        "`realhf COMMAND --help` explains a command, `realhf run --list` the ready algorithms; `realhf --version`",
        "example: realhf run grpo --model ./Qwen2.5-1.5B --data train.jsonl --reward rewards.py:correct",
    ]
    return "\n".join(lines)


def returncode_of(error: BaseException) -> int:
    """The exit code of a command that has ended with one of the errors for users."""
    if isinstance(error, KeyboardInterrupt | Stopped):
        return 130
    return error.returncode if isinstance(error, RunError) else 2


def print_error(error: BaseException) -> None:
    """With the notes of the error behind it: what was saved, and how to go on."""
    is_end = isinstance(error, KeyboardInterrupt | Stopped)
    text = (str(error) or "interrupted") if is_end else f"error: {error}"
    print(*map(visible, (text, *getattr(error, "__notes__", ()))), sep="\n", file=sys.stderr)
