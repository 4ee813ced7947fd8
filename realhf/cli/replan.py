"""`realhf replan`: searches the plan of a run again, with the times that its calls really take."""

import argparse
from pathlib import Path

import msgspec

from realhf.base.files import write_atomically
from realhf.cli.options import options_of
from realhf.cli.output import table_of, wide_output
from realhf.dataflow.plan import save_plan
from realhf.lifecycle.replan import EVALUATIONS, propose
from realhf.planning.request import SearchBudget
from realhf.rundir.paths import RunDirectory

DESCRIPTION = """Searches the plan of a run again: what every call was measured to take in the last steps, over what was
predicted for it, counts as a factor of all its options. Works while the run goes on, and changes nothing in it."""

EXAMPLE = """examples:
  realhf replan runs/mine --output better.json
  realhf run experiments/ppo.py --run-dir runs/mine --resume --plan better.json"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the directory of a run, whatever its state")
    command.add_argument("--output", type=Path, help="write the plan there")
    command.add_argument("--json", type=Path, help="write the plan there with the factors and predictions")
    command.add_argument("--evaluations", type=int, metavar="N", help=f"budget of the search (default {EVALUATIONS:,})")
    command.add_argument("--seconds", type=float, metavar="S", help="budget of the search in seconds")


def execute(arguments: argparse.Namespace) -> int:
    budget = options_of(SearchBudget, arguments)
    directory = RunDirectory.open(arguments.run_dir)
    output, numbers = (path and path.absolute() for path in (arguments.output, arguments.json))
    found = propose(directory, budget)
    if output:
        save_plan(found.plan, output)
    if numbers:
        write_atomically(numbers, msgspec.json.encode(found))
    out, table = wide_output(), table_of("measured / predicted", "call", "factor")
    for name, factor in found.factors.items():
        table.add_row(name, f"{factor:.3g}")
    out.print(table)
    out.say(
        f"with these: {found.present_s:.3g} s a step under the present plan, {found.other_s:.3g} s under "
        "the best one found"
    )
    return 0
