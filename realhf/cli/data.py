"""Lists the tasks that make data without a file, or shows one: its options and their defaults, and the first question
with its answer, under the options that the name gives.

examples:
  realhf data --list
  realhf data reasoning-gym:chain_sum
  realhf data reasoning-gym:chain_sum:max_terms=3,max_digits=2
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator

from rich.table import Table

from realhf.base.errors import UserError
from realhf.cli.output import Output, table_of
from realhf.data.tasks import CODE, FORM, OF_ALL, REASONING, parts_of, records_of, rewards_of
from realhf.rewards import reasoning


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("task", metavar="TASK", nargs="?", help=f"{FORM}, or {CODE}")
    command.add_argument("--list", action="store_true", help="show the tasks")


def execute(arguments: argparse.Namespace) -> int:
    if arguments.list == (arguments.task is not None):
        raise UserError(f"give a task, {FORM} or {CODE}, or --list, which shows all")
    lines = _tasks() if arguments.list else _task(arguments.task)
    out = Output()
    for line in lines:
        out.say(line) if isinstance(line, str) else out.print(line)
    return 0


def _tasks() -> Iterator[str]:
    """The tasks by kind, and those that are refused."""
    kinds = defaultdict(list)
    for task in sorted(reasoning.tasks().keys() - reasoning.REFUSED.keys()):
        kinds[reasoning.category(task)].append(task)
    width = max(map(len, (*kinds, *reasoning.REFUSED)))
    yield from (f"{REASONING}:TASK, questions with one answer, by kind:", "")
    yield from (f"  {kind:{width}}  {', '.join(names)}" for kind, names in sorted(kinds.items()))
    yield from ("", "not to be trained on:", "")
    yield from (f"  {task:{width}}  {reason}" for task, reason in reasoning.REFUSED.items())
    yield from ("", f"{CODE}, 164 Python functions to complete, scored by their unit tests; for evaluation")
    yield from ("", f"`realhf data {REASONING}:TASK` shows a task's options, and a question with its answer")


def _task(name: str) -> Iterator[str | Table]:
    """The options of a task, its reward, and its first question."""
    if not rewards_of(name):
        raise UserError(f"{name!r} is no task; give {FORM}, or {CODE} (`realhf data --list` shows all)")
    first = next(records_of(name))
    if name != CODE:
        part, *others = parts_of(name)
        if others:
            raise UserError(f"{name}: {len(others) + 1} tasks; one is shown at a time, so give one of them")
        options = {**OF_ALL, **reasoning.defaults(part.task)}
        rows = ((option, reasoning.shown(value)) for option, value in options.items())
        yield table_of("", "option", "default", rows=rows, words=2)
    yield f"reward where none is given: --reward {rewards_of(name)[0]}"
    yield from ("", "a question:", *_indented(first["prompt"]))
    yield from ("its answer:", *_indented(first["answer"]))


def _indented(text: str) -> Iterator[str]:
    return (f"  {line}" for line in text.splitlines())
