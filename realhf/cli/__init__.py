"""The command line: `realhf COMMAND`, with the commands of `COMMANDS`."""

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence

import realhf
from realhf.base.errors import RunError, UserError
from realhf.base.shown import visible
from realhf.lifecycle.interruption import Stopped

COMMANDS = {
    "run": "plan an experiment, start its workers, and train",
    "status": "say where a run stands",
    "attach": "watch a run that another process has started",
    "stop": "end a run with a checkpoint",
    "plan": "find the fastest execution plan, or predict a given one",
    "replan": "search a run's plan again, with measured times",
    "search": "find the fastest plan of a planning problem given as a file",
    "profile": "measure this machine, once per model type",
    "convert": "convert a checkpoint from or to Hugging Face's format",
    "report": "write a run's report.html",
    "compare": "draw several runs in one page",
    "doctor": "check the installation and this machine",
}
OSDP = "--osdp"  # makes `realhf plan` one of a model's operators, with arguments of its own
THEN = "--then"  # of `realhf run`: what is behind it is another run, which begins when the one before has ended well
WITH_EXPERIMENT = ("run", "plan", "profile")  # options that they do not know are fields of the experiment


def parser(command: str | None = None, *, osdp: bool = False) -> argparse.ArgumentParser:
    """The parser with all commands. Only `command` has its arguments: the modules of the others are not imported.
    `osdp`: `plan` has the arguments of `plan --osdp`."""
    top = argparse.ArgumentParser(
        prog="realhf",
        description="Plans and runs reinforcement-learning training of language models.",
        epilog="example: realhf run experiments/ppo.py --steps 10",
    )
    top.add_argument("--version", action="version", version=f"realhf {realhf.__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        chosen = commands.add_parser(name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter)
        if name == command:
            module = importlib.import_module(f"realhf.cli.{'osdp' if osdp and name == 'plan' else name}")
            chosen.description, chosen.epilog = module.DESCRIPTION, module.EXAMPLE
            takes_fields = name in WITH_EXPERIMENT and not osdp
            chosen.allow_abbrev = not takes_fields
            chosen.set_defaults(execute=module.execute, takes_experiment_fields=takes_fields)
            module.add_arguments(chosen)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Its exit code: 0 all of it worked, 1 it failed, 2 the input was wrong, 130 interrupted;
    that of a process of the run which ended by itself with another one."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        command = next((word for word in words if word in COMMANDS), None)
        top = parser(command, osdp=any(word == OSDP or word.startswith(f"{OSDP}=") for word in words))
        # A chain is parsed stage by stage (`realhf.cli.several`).
        own = words[: words.index(THEN)] if command == "run" and THEN in words else words
        arguments, rest = top.parse_known_args(own)
        if rest and not arguments.takes_experiment_fields:
            top.error(f"unknown arguments: {' '.join(rest)}")
        arguments.overrides, arguments.words, arguments.all_words = rest, own, words
        code: int = arguments.execute(arguments)
        return code
    except (UserError, RunError, KeyboardInterrupt, Stopped) as error:
        if argv is None and isinstance(error, KeyboardInterrupt | Stopped):
            # This process ends now: a second Ctrl-C must not turn its exit code into a signal's.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        print_error(error)
        return returncode_of(error)


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
