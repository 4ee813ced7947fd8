"""Searches the plan of a run again: what every call was measured to take in the last steps, over what was
predicted for it, counts as a factor of all its options. Works while the run goes on, and changes nothing in it.

examples:
  realhf replan runs/mine --output better.json
  realhf run experiments/ppo.py --run-dir runs/mine --resume --plan better.json
"""

import argparse
from pathlib import Path

import msgspec

from realhf.base.files import write_atomically
from realhf.cli.command import Command
from realhf.cli.options import add_options, budget_of
from realhf.cli.output import table_of, wide_output
from realhf.dataflow.plan import save_plan
from realhf.lifecycle.replan import EVALUATIONS, propose
from realhf.planning.request import SearchBudget
from realhf.rundir.paths import RunDirectory


def add_arguments(command: Command) -> None:
    command.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the directory of a run, whatever its state")
    command.add_argument("--output", type=Path, help="write the plan there")
    command.add_argument("--json", type=Path, help="write the plan there with the factors and predictions")
    add_options(command, SearchBudget, group="options", shows_all=True, evaluations=f"default {EVALUATIONS:,}")


def execute(arguments: argparse.Namespace) -> int:
    budget = budget_of(arguments)
    directory = RunDirectory.open(arguments.run_dir)
    output, numbers = (path and path.absolute() for path in (arguments.output, arguments.json))
    found = propose(directory, budget)
    if output:
        save_plan(found.plan, output)
    if numbers:
        write_atomically(numbers, msgspec.json.encode(found))
    out, rows = wide_output(), ((name, f"{factor:.3g}") for name, factor in found.factors.items())
    out.print(table_of("measured / predicted", "call", "factor", rows=rows))
    out.say(
        f"with these: {found.present_s:.3g} s a step under the present plan, {found.other_s:.3g} s under "
        "the best one found"
    )
    return 0
