"""`realhf replan`: searches the plan of a run again, with the times that its calls really take."""

import argparse
import statistics
import sys
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from realhf.base.errors import UserError
from realhf.base.files import write_atomically
from realhf.dataflow.plan import ExecutionPlan, save_plan
from realhf.master.drift import WARM_UP, WINDOW, call_factors
from realhf.planning.cluster import Cluster
from realhf.planning.explain.explanation import explain
from realhf.planning.here import divided, hardware_here
from realhf.planning.planner import Planner
from realhf.planning.request import SearchBudget
from realhf.report.run_data import lines_under
from realhf.rundir.lines import read_lines, step_line
from realhf.rundir.paths import RunDirectory
from realhf.rundir.run import Run, load_run

DESCRIPTION = """Searches the plan of a run again: what every call was measured to take in the last steps, over what was
predicted for it, counts as a factor of all its options. Works while the run goes on, and changes nothing in it."""

EXAMPLE = """examples:
  realhf replan runs/mine --output better.json
  realhf run experiments/ppo.py --run-dir runs/mine --resume --plan better.json"""

# Budget of the search, a number of plans, if none is given.
EVALUATIONS = 20_000


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """What a search with measured times found.

    `factors` are measured over predicted seconds by call, of predictions without any; `present_s` and `plan`'s
    predicted_step_s are predictions of a step with them, under the present plan and under `plan`; `step_s` is a step as
    it was measured.
    """

    factors: dict[str, float]
    step_s: float
    present_s: float
    plan: ExecutionPlan


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the directory of a run, whatever its state")
    command.add_argument("--output", type=Path, help="write the plan there")
    command.add_argument("--json", type=Path, help="write the plan there with the factors and predictions")
    command.add_argument("--evaluations", type=int, metavar="N", help=f"budget of the search (default {EVALUATIONS:,})")
    command.add_argument("--seconds", type=float, metavar="S", help="budget of the search in seconds")


def execute(arguments: argparse.Namespace) -> int:
    budget = SearchBudget(evaluations=arguments.evaluations, seconds=arguments.seconds)
    directory = RunDirectory.open(arguments.run_dir)
    output, numbers = (path and path.absolute() for path in (arguments.output, arguments.json))
    found = propose(directory, budget)
    if output:
        save_plan(found.plan, output)
    if numbers:
        write_atomically(numbers, msgspec.json.encode(found))
    console = Console(width=None if sys.stdout.isatty() else 110)
    table = Table(title="measured / predicted", title_justify="left")
    table.add_column("call")
    table.add_column("factor", justify="right")
    for name, factor in found.factors.items():
        table.add_row(name, f"{factor:.3g}")
    console.print(table)
    console.print(
        f"with these: {found.present_s:.3g} s a step under the present plan, {found.plan.predicted_step_s:.3g} s under "
        "the best one found",
        highlight=False,
        soft_wrap=True,
    )
    return 0


def propose(directory: RunDirectory, budget: SearchBudget) -> Proposal:
    """The best plan found with the times that were measured under the present one.

    Raises:
        UserError: too few steps were made under it, or none of its calls has a prediction.
    """
    run = load_run(directory.experiment, directory.plan)
    lines = lines_under(run.plan, read_lines(directory.metrics, step_line).values)[WARM_UP:][-WINDOW:]
    measured = call_factors(lines)
    if not measured:
        raise UserError(f"{directory.metrics} has no times beside predictions yet; let the run make some steps")
    factors = {name: run.spec.call_factors.get(name, 1.0) * factor for name, factor in measured.items()}
    planner = planner_of(run, factors)
    present = planner.predict(run.plan)
    if budget == SearchBudget():
        budget = SearchBudget(evaluations=EVALUATIONS)
    result = planner.search(budget)
    best = planner.predict(result.plan)
    return Proposal(
        factors=factors,
        step_s=statistics.median(line["time_s"] for line in lines),
        present_s=present.step_s,
        plan=msgspec.structs.replace(best.plan, rationale=explain(planner.task, best, result)),
    )


def planner_of(run: Run, factors: dict[str, float]) -> Planner:
    """The planner of a run on the devices that it has, its calls' times scaled."""
    hardware = run.spec.hardware or divided(hardware_here(), run.spec.num_workers)
    cluster = Cluster(
        num_nodes=run.spec.num_workers // run.spec.devices_per_node,
        devices_per_node=run.spec.devices_per_node,
        device_memory_bytes=hardware.device_memory_bytes,
        hardware=hardware,
    )
    offload, saves = run.plan.offload, run.spec.saves
    return Planner(run.experiment, cluster, offload=offload, call_factors=factors, saves=saves)
