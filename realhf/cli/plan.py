"""Searches the execution plan of an experiment and prints it. Needs no GPU and starts no worker.

examples:
  realhf plan experiments/ppo.py --num-workers 4
  realhf plan experiments/ppo.py --nodes 2 --gpus-per-node 8 --hardware h100 --output plan.json
  realhf plan experiments/ppo.py --plan plan.json
  realhf plan experiments/ppo.py --num-workers 4 --rule colocate --output plan.json
  realhf plan experiments/ppo.py --cluster h100-16x8 --actor llama3-70b --critic llama3-7b --compare
  realhf plan experiments/ppo.py --cluster h100-4x8,h200-4x8 --actor llama3-70b --critic llama3-7b
"""

import argparse
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec

from realhf.base.errors import UserError
from realhf.base.options import Common, Option, Options
from realhf.cli.command import Command
from realhf.cli.options import add_experiment_arguments, add_options, options_of, plan_request
from realhf.cli.output import Output, Phases, output_beside
from realhf.cli.plan_tables import (
    alternatives_table,
    case_table,
    choice_lines,
    comparison_table,
    excluded_lines,
    plan_table,
    setting_text,
    totals,
    worth_lines,
)
from realhf.dataflow.plan import save_plan
from realhf.lifecycle.request import experiment_of
from realhf.planning.clusters import crowded_text
from realhf.planning.explain.comparison import Comparison, compare, describe, solve_cases, summary
from realhf.planning.planner import given_plan, search_for, tasks_of
from realhf.planning.problem.builder import build_problem
from realhf.planning.problem.file import PlannedFile, problem_bytes
from realhf.planning.request import PlanRequest
from realhf.planning.search import worthwhile_options
from realhf.planning.task import PlanningTask
from realhf.planning.what_if import WhatIf, WhatIfRequest


@dataclass(frozen=True, kw_only=True)
class PlanOutput(Options):
    """The output of `realhf plan`, and its files."""

    HEADING = "output"

    output: Annotated[Path | None, Common("write the plan to this file")] = None
    compare: Annotated[bool, Common("compare with rule-made plans, and say why not otherwise")] = False
    json: Annotated[
        Path | None, Common("write all numbers to this file (-: standard output, and all else to standard error)")
    ] = None
    html: Annotated[Path | None, Common("write a page with timeline, memory and comparison")] = None
    dump_problem: Annotated[Path | None, Option("also write the problem that is searched (planning-problem/2)")] = None


def add_arguments(command: Command) -> None:
    add_experiment_arguments(command)
    for options in (PlanOutput, WhatIfRequest, WhatIf):
        add_options(command, options)


def execute(arguments: argparse.Namespace) -> int:
    request = plan_request(arguments)
    asked = options_of(WhatIfRequest, arguments, given=options_of(WhatIf, arguments))
    wanted = options_of(PlanOutput, arguments)
    experiment, out = experiment_of(arguments.experiment, arguments.overrides), output_beside(wanted.json)
    case, *_ = asked.cases(experiment.calls)
    if case.reads_data:
        from realhf.lifecycle.new import check_experiment  # it imports what reads data, which the help does not need

        check_experiment(experiment, case.batch_size)
    tasks = tasks_of(experiment, request, asked)
    if len(tasks) > 1:
        compare_cases(out, request, tasks, wanted)
        return 0
    [task] = tasks.values()
    out.say(setting_text(task), *excluded_lines(task))
    if crowded := crowded_text(task.cluster.hardware, task.cluster.num_devices):
        out.say(crowded)
    lacking = case.unlike(experiment.setups.values())
    if lacking:
        out.say(
            f"what if: an engine with {', '.join(lacking)}; the engine is not so, and a run of this plan would take "
            "other time and memory than predicted"
        )
    if wanted.dump_problem:
        problem = build_problem(task, worthwhile_options(task))
        out.write(wanted.dump_problem, problem_bytes(PlannedFile.of(problem)))
    with Phases() as watch:
        plan = given_plan(experiment, task, request) or search_for(task, request.budget, watch)
    comparison = describe(task, plan)
    _print_plan(out, comparison)
    if wanted.compare or wanted.html:
        with Phases() as watch:
            watch("comparison", "")
            comparison = compare(comparison)
    if comparison.certificate:
        out.say(f"certificate: {comparison.certificate}")
    if wanted.compare:
        out.print(comparison_table(comparison))
        out.say(*(f"{preset.name}: {preset.problem}" for preset in comparison.presets if preset.problem))
        out.print(alternatives_table(comparison))
        out.say(*worth_lines(comparison))
    if wanted.output:
        save_plan(comparison.plan, wanted.output)
        out.say(f"written to {wanted.output}")
    if wanted.json:
        out.write_json(wanted.json, msgspec.to_builtins(summary(comparison)))
    if wanted.html:
        from realhf.report.plan_page import plan_page  # plotly is slow to import, and only this needs it

        out.write(wanted.html, plan_page(comparison).encode())
    return 0


def _print_plan(out: Output, comparison: Comparison) -> None:
    result, prediction = comparison.result, comparison.analysis.prediction
    if result:
        options = " x ".join(str(number) for number in result.num_options.values())
        rate = f"{result.evaluations} plans evaluated at {result.evaluations_per_s:,.0f} a second"
        out.say(f"{rate}, out of {options} options" if options else "no time was left to search: the best plan by rule")
    elif not prediction.fits:
        out.say("warning: this plan does not fit into the memory of the devices")
    out.print(plan_table(prediction.plan))
    out.say(*choice_lines(prediction.plan))
    out.say(*(f"{name}: {found}" for name, found in comparison.task.modes(prediction.plan).items()))
    out.say(*totals(comparison))


def compare_cases(out: Output, request: PlanRequest, tasks: dict[str, PlanningTask], wanted: PlanOutput) -> None:
    """Searches a plan for each task, and shows the plans side by side."""
    if replace(wanted, json=None) != PlanOutput() or request.plan or request.rule:
        raise UserError(
            "several clusters or values of --staleness are compared by their searched plans alone: give one of each "
            "with --plan, --rule, --compare, --html, --output or --dump-problem"
        )
    with Phases() as watch:
        results = solve_cases(tasks, partial(search_for, budget=request.budget, watch=watch))
    out.print(case_table(results))
    out.say(*(f"{name}: {found}" for name, found in results.items() if isinstance(found, UserError)))
    if len({task.cluster for task in tasks.values()}) == 1:  # the cases differ in staleness
        apart = (name for name, found in results.items() if not isinstance(found, UserError) and found.generates_apart)
        first = next(apart, None)
        words = f"from {first} on the" if first else "with none of these the"
        out.say(f"{words} fastest plan found generates and trains on devices of their own")
    if wanted.json:
        cases = {
            # Traces belong to the page of a single plan.
            name: {"feasible": False, "problem": str(found)}
            if isinstance(found, UserError)
            else summary(found) | {"search_trace": ()}
            for name, found in results.items()
        }
        out.write_json(wanted.json, msgspec.to_builtins({"cases": cases}))
