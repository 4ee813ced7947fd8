"""Finds the fastest plan of a planning problem (a file of the format planning-problem/1, or
/2 as `realhf plan --dump-problem` writes it) and proves how
far from the best it can be. Ends early when the plan is proven optimal. With --evaluations instead of --seconds the
plan depends on nothing but the file, the seed and that number.

example:
  realhf search problem.json --seconds 10 --seed 1 --threads 2 --json found.json
"""

import argparse
import math
from pathlib import Path
from typing import Any

from realhf.cli.command import Command
from realhf.cli.options import add_options, budget_of, options_of
from realhf.cli.output import output_beside, table_of
from realhf.geometry.layout import DeviceMesh
from realhf.planning.certificate import Certificate
from realhf.planning.model.hardware import GIB
from realhf.planning.problem.file import load_problem
from realhf.planning.problem.native import Found, SearchRequest, native_problem, search_problem
from realhf.planning.problem.tables import Problem
from realhf.planning.request import SearchBudget

DEFAULT_SECONDS = 10.0


def add_arguments(command: Command) -> None:
    command.add_argument("file", type=Path, metavar="FILE", help="the problem: a planning-problem/1 or /2 JSON file")
    add_options(command, SearchBudget, group="options", shows_all=True, seconds=f"default {DEFAULT_SECONDS:g}")
    add_options(command, SearchRequest, shows_all=True)
    command.add_argument(
        "--moves",
        choices=("all", "single"),
        default="all",
        help="single: Metropolis-Hastings that changes one call at a time and nothing else, without a proof",
    )
    command.add_argument(
        "--json",
        type=Path,
        metavar="OUT",
        help="write the result to this file (-: standard output, and all else to standard error)",
    )


def execute(arguments: argparse.Namespace) -> int:
    budget = budget_of(arguments)
    is_single = arguments.moves == "single"
    if budget == SearchBudget():
        budget = SearchBudget(seconds=DEFAULT_SECONDS)
    request = options_of(SearchRequest, arguments, budget=budget, single_moves=is_single, proves=not is_single)
    out, problem = output_beside(arguments.json), load_problem(arguments.file)
    found = search_problem(native_problem(problem), request)
    result = as_json(problem, found, request.seed)
    if arguments.json:
        out.write_json(arguments.json, result)
    table = table_of("plan", "call", "option", "devices", "strategy", "s")
    for call, number in zip(problem.calls, found.choice, strict=True):
        option = call.options[number]
        seconds = f"{option.time_s * problem.unit_us / 1e6:.3f}"
        table.add_row(call.name, str(number), DeviceMesh(*option.devices).text, option.strategy, seconds)
    out.print(table)
    best_s, lower_bound_us = result["us_per_step"] / 1e6, result["lower_bound_us"]
    bound_s = math.inf if lower_bound_us is None else lower_bound_us / 1e6
    certificate = Certificate(cost_s=best_s, lower_bound_s=bound_s, proven=found.proven, feasible=found.feasible)
    out.say(
        f"best        {best_s:.6f} s a step",
        f"lower bound {bound_s:.6f} s: {certificate}",
        f"memory      {result['peak_bytes'] / GIB:.2f} of {problem.device_memory_bytes / GIB:.2f} GiB on the fullest "
        "device",
        f"evaluations {found.all_evaluations:,} in {found.seconds:.2f} s "
        f"({found.full_evaluations:,} to the end, {found.early_rejections:,} rejected early)",
    )
    return 0


def as_json(problem: Problem, found: Found, seed: int) -> dict[str, Any]:
    """The content of `--json`: the best plan found and a bound on all plans.

    `lower_bound_us` is None if it is proven that no plan fits into memory, which `proven` then stands for.
    """
    nothing_fits = found.proven and not found.feasible
    return {
        "plan": dict(zip([call.name for call in problem.calls], found.choice, strict=True)),
        "us_per_step": found.step_s * problem.unit_us,
        "peak_bytes": int(found.peak_bytes),
        "feasible": found.feasible,
        "lower_bound_us": None if nothing_fits else found.lower_bound_s * problem.unit_us,
        "proven": found.proven,
        "evaluations": found.all_evaluations,
        "evaluations_per_s": found.all_evaluations / max(found.seconds, 1e-9),
        "full_evaluations": found.full_evaluations,
        "early_rejections": found.early_rejections,
        "seconds": found.seconds,
        "seed": seed,
        "trace": [(at_s, cost * problem.unit_us) for at_s, cost in found.trace],
    }
