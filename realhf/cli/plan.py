"""`realhf plan`: what a run would cost and where its calls would run, without running it."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from realhf.api.experiment import models_of
from realhf.base.errors import UserError
from realhf.base.files import write_atomically
from realhf.cli.experiment import add_experiment_arguments, plan_request
from realhf.cli.phases import Phases
from realhf.cli.plan_tables import (
    CaseResult,
    alternatives_table,
    case_table,
    comparison_table,
    plan_table,
    problems,
    setting_text,
)
from realhf.dataflow.plan import ExecutionPlan, load_plan, save_plan
from realhf.lifecycle.experiment import experiment_of
from realhf.planning.cluster import Cluster
from realhf.planning.clusters import cluster_of, parse_clusters
from realhf.planning.explain.analysis import analyse, generates_apart
from realhf.planning.explain.comparison import GIVEN, SEARCHED, Candidate, Comparison, certificate_of, compare, summary
from realhf.planning.model.descriptions import DTYPE_BYTES
from realhf.planning.model.features import FEATURES
from realhf.planning.planner import Planner
from realhf.planning.presets import evaluate_preset
from realhf.planning.problem.dump import planned_file, simple_file
from realhf.planning.problem.file import problem_bytes
from realhf.planning.request import PlanRequest
from realhf.planning.search import SearchResult
from realhf.planning.what_if import WhatIf, parse_model_types

DESCRIPTION = "Searches the execution plan of an experiment and prints it. Needs no GPU and starts no worker."

EXAMPLE = """examples:
  realhf plan experiments/ppo.py --num-workers 4
  realhf plan experiments/ppo.py --nodes 2 --gpus-per-node 8 --hardware h100 --output plan.json
  realhf plan experiments/ppo.py --plan plan.json
  realhf plan experiments/ppo.py --cluster h100-16x8 --actor llama3-70b --critic llama3-7b --compare
  realhf plan experiments/ppo.py --cluster h100-4x8,h200-4x8 --actor llama3-70b --critic llama3-7b
  realhf plan --osdp llama7b --devices 8 --memory-gb 40    (one model's operators: `realhf plan --osdp MODEL --help`)"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    add_experiment_arguments(command)
    command.add_argument("--output", type=Path, help="write the plan to this file")
    command.add_argument(
        "--compare", action="store_true", help="compare with rule-made plans, and say why not otherwise"
    )
    command.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to this file")
    command.add_argument("--html", type=Path, metavar="FILE", help="write a page with timeline, memory and comparison")
    command.add_argument(
        "--dump-problem",
        type=Path,
        metavar="FILE",
        help="write what is searched as a planning problem, too",
    )
    command.add_argument(
        "--dump-version",
        type=int,
        choices=(1, 2),
        default=2,
        help="format of that file: planning-problem/2 is exact (default), /1 a simpler problem for other searchers",
    )
    what_if = command.add_argument_group("what if (the experiment stays as it is; no data set is read)")
    what_if.add_argument(
        "--cluster", help="HARDWARE-NODESxDEVICES (h100-16x8) or a .yaml file; several with commas are compared"
    )
    what_if.add_argument(
        "--actor", metavar="ARCH", help="architecture of actor and reference (llama3-70b, config.json)"
    )
    what_if.add_argument("--critic", metavar="ARCH", help="architecture of critic and reward model")
    what_if.add_argument(
        "--model-type", metavar="NAME=ARCH", action="append", default=[], help="architecture of one model"
    )
    what_if.add_argument("--prompt-tokens", type=int, help="length of the prompts (1024 with other architectures)")
    what_if.add_argument("--new-tokens", type=int, help="length of the responses (1024 with other architectures)")
    what_if.add_argument("--batch-size", type=int, help="samples a step")
    what_if.add_argument("--dtype", choices=list(DTYPE_BYTES), help="of all models (bfloat16 with other architectures)")
    what_if.add_argument(
        "--staleness",
        default="0",
        metavar="K",
        help="rollouts may use weights K updates older (default 0); several with commas are compared",
    )
    what_if.add_argument(
        "--features",
        default="",
        metavar="NAMES",
        help=f"plan for an engine with these as well, or with no- before the name without: {', '.join(FEATURES)}",
    )


def execute(arguments: argparse.Namespace) -> int:
    request = plan_request(arguments)
    experiment = experiment_of(arguments.experiment, arguments.overrides)
    given = load_plan(arguments.plan) if arguments.plan else None
    clusters = _clusters(arguments, request, given.num_devices if given else None)
    stalenesses = _stalenesses(arguments.staleness)
    what_if = _what_if(arguments, experiment, stalenesses[0])
    console = Console()
    if len(clusters) > 1 or len(stalenesses) > 1:
        both = len(clusters) > 1 and len(stalenesses) > 1
        if given or arguments.compare or arguments.html or arguments.output or arguments.dump_problem or both:
            raise UserError(
                "several clusters or values of --staleness are compared by their searched plans alone: give one of "
                "each with --plan, --compare, --html, --output or --dump-problem, and several of one kind at a time"
            )
        cases = {name: (cluster, what_if) for name, cluster in clusters.items()}
        if len(stalenesses) > 1:
            [cluster] = clusters.values()
            cases = {f"staleness {k}": (cluster, replace(what_if, staleness=k)) for k in stalenesses}
        _compare_cases(console, arguments, request, experiment, cases)
        return 0
    [cluster] = clusters.values()
    planner = Planner(experiment, cluster, what_if=what_if, offload=request.offload)
    task = planner.task
    console.print(setting_text(task), highlight=False, soft_wrap=True)
    lacking = what_if.unlike(models_of(experiment).values())
    if lacking:
        console.print(
            f"what if: an engine with {', '.join(lacking)}; the engine is not so, and a run of this plan would take "
            "other time and memory than predicted",
            highlight=False,
            soft_wrap=True,
        )
    if arguments.dump_problem:
        _dump_problem(console, arguments, planner)
    result: SearchResult | None = None
    if given:
        prediction = planner.predict(given)
        if not prediction.fits:
            console.print(
                "warning: this plan does not fit into the memory of the devices", highlight=False, soft_wrap=True
            )
        candidate = Candidate(
            name=GIVEN, analysis=analyse(task, prediction), problem="" if prediction.fits else "memory"
        )
    else:
        with Phases() as watch:
            result = planner.search(request.budget, watch)
        _print_search(console, result)
        candidate = Candidate(name=SEARCHED, analysis=analyse(task, planner.predict(result.plan)))
    assert candidate.analysis is not None
    plan = candidate.analysis.prediction.plan
    console.print(plan_table(plan))
    for name, sharding in task.shardings(plan).items():
        console.print(f"{name}: {sharding}", highlight=False, soft_wrap=True)
    _print_totals(console, planner, candidate)
    if arguments.compare or arguments.html:
        with Phases() as watch:
            watch("comparison", "")
            comparison = compare(task, candidate, result)
    else:
        comparison = Comparison(
            task=task,
            plan=candidate,
            certificate=certificate_of(result) if result else None,
            search_trace=result.trace if result else (),
        )
    if comparison.certificate:
        console.print(f"certificate: {comparison.certificate}", highlight=False, soft_wrap=True)
    if arguments.compare:
        console.print(comparison_table(comparison))
        for line in problems(comparison):
            console.print(line, highlight=False, soft_wrap=True)
        console.print(alternatives_table(comparison))
    _write(console, arguments, comparison)
    return 0


def _clusters(arguments: argparse.Namespace, request: PlanRequest, given_devices: int | None) -> dict[str, Cluster]:
    """The cluster of --nodes and so on, or those of --cluster."""
    if arguments.cluster is None:
        return {"": cluster_of(request.devices, given_devices)}
    described = {
        "--nodes": arguments.nodes != 1,
        "--gpus-per-node": arguments.gpus_per_node is not None,
        "--num-workers": arguments.num_workers is not None,
        "--hardware": arguments.hardware is not None,
    }
    twice = [option for option, is_given in described.items() if is_given]
    if twice:
        raise UserError(f"--cluster {arguments.cluster} says it all; leave out {' and '.join(twice)}")
    return parse_clusters(arguments.cluster, arguments.memory_gb)


def _stalenesses(text: str) -> list[int]:
    try:
        return sorted({int(word[:20]) for word in text.split(",")})  # a number of 21 digits is too large
    except ValueError:
        raise UserError(f"--staleness {text} must be whole numbers, separated by commas") from None


def _what_if(arguments: argparse.Namespace, experiment: Any, staleness: int) -> WhatIf:
    return WhatIf(
        model_types=parse_model_types(
            experiment.rpcs, actor=arguments.actor, critic=arguments.critic, pairs=arguments.model_type
        ),
        prompt_tokens=arguments.prompt_tokens,
        new_tokens=arguments.new_tokens,
        batch_size=arguments.batch_size,
        dtype=arguments.dtype,
        staleness=staleness,
        features=tuple(name.strip() for name in arguments.features.split(",") if name.strip()),
    )


def _compare_cases(
    console: Console,
    arguments: argparse.Namespace,
    request: PlanRequest,
    experiment: Any,
    cases: dict[str, tuple[Cluster, WhatIf]],
) -> None:
    """One search a case; one in which nothing fits does not end the others."""
    results, summaries = [], {}
    fresher: ExecutionPlan | None = None
    for name, (cluster, what_if) in cases.items():
        planner = Planner(experiment, cluster, what_if=what_if, offload=request.offload)
        try:
            with Phases() as watch:
                found = planner.search(request.budget, watch)
        except UserError as error:
            results.append(CaseResult(name=name, analysis=None, problem=str(error)))
            summaries[name] = {"feasible": False, "problem": str(error)}
            continue
        prediction = planner.predict(found.plan)
        if what_if.staleness and fresher:  # a plan for fresher weights may run with staler ones, too
            prediction = min(prediction, planner.predict_in_best_order(fresher), key=lambda p: p.step_s)
        fresher = prediction.plan
        analysis = analyse(planner.task, prediction)
        apart = generates_apart(planner.graph, prediction.plan)
        results.append(CaseResult(name=name, analysis=analysis, generates_apart=apart))
        candidate = Candidate(name=SEARCHED, analysis=analysis)
        summaries[name] = summary(Comparison(task=planner.task, plan=candidate, certificate=certificate_of(found)))
    console.print(case_table(results))
    for result in results:
        if result.problem:
            console.print(f"{result.name}: {result.problem}", highlight=False, soft_wrap=True)
    if len({what_if.staleness for _, what_if in cases.values()}) > 1:
        first = next((result.name for result in results if result.generates_apart), None)
        words = f"from {first} on the" if first else "with none of these the"
        console.print(
            f"{words} fastest plan found generates and trains on devices of their own", highlight=False, soft_wrap=True
        )
    if arguments.json:
        _write_json(console, arguments.json, {"cases": summaries})


def _dump_problem(console: Console, arguments: argparse.Namespace, planner: Planner) -> None:
    make = planned_file if arguments.dump_version == 2 else simple_file
    file = make(planner.problem(), planner.graph, planner.cluster.devices_per_node)
    _write_file(console, arguments.dump_problem, problem_bytes(file))


def _print_search(console: Console, result: SearchResult) -> None:
    console.print(
        f"{result.evaluations} plans evaluated at {result.evaluations_per_s:,.0f} a second, out of "
        f"{' x '.join(str(n) for n in result.num_options.values())} options",
        highlight=False,
        soft_wrap=True,
    )


def _print_totals(console: Console, planner: Planner, candidate: Candidate) -> None:
    analysis = candidate.analysis
    assert analysis is not None
    source = (
        "measured layer timings" if planner.costs.profiled else "the analytic model (no profile; see `realhf profile`)"
    )
    console.print(f"predicted step: {analysis.step_s:.3f} s, from {source}", highlight=False, soft_wrap=True)
    console.print(
        f"{analysis.tokens_per_s:,.0f} tokens/s, {analysis.gpu_hours_per_million_tokens:.3g} GPU-hours per million "
        "tokens",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"limited by {analysis.limits}", highlight=False, soft_wrap=True)
    simple = evaluate_preset("heuristic", planner.task)
    if simple.prediction is None:
        words = "none is legal"
    else:
        step_s = simple.prediction.step_s
        words = f"{step_s:.3f} s, {step_s / analysis.step_s:.2f} x this one"
        words += f", but it {simple.problem}" if simple.problem else ""
    console.print(f"heuristic plan (all calls alike on all devices): {words}", highlight=False, soft_wrap=True)


def _write(console: Console, arguments: argparse.Namespace, comparison: Comparison) -> None:
    analysis = comparison.plan.analysis
    assert analysis is not None
    if arguments.output:
        save_plan(analysis.prediction.plan, arguments.output)
        console.print(f"written to {arguments.output}", highlight=False, soft_wrap=True)
    if arguments.json:
        _write_json(console, arguments.json, summary(comparison))
    if arguments.html:
        from realhf.report.plan_page import plan_page  # plotly is slow to import, and only this needs it

        _write_file(console, arguments.html, plan_page(comparison).encode())


def _write_json(console: Console, path: Path, content: dict[str, Any]) -> None:
    _write_file(console, path, json.dumps(msgspec.to_builtins(content), indent=2).encode() + b"\n")


def _write_file(console: Console, path: Path, content: bytes) -> None:
    try:
        write_atomically(path, content)
    except OSError as error:
        raise UserError(f"{path}: cannot write ({error.strerror}); give a file in a folder that exists") from None
    console.print(f"written to {path}", highlight=False, soft_wrap=True)
