"""Chooses for every operator of a model whether data parallelism replicates it, shards only its
optimizer states (ZeRO-1) or shards all of it, so that training is fastest within the memory of a device;
exactly, with a proof. Needs no GPU. MODEL is a named architecture or the path of a Hugging Face config.json.

examples:
  realhf osdp llama3-7b --devices 8 --memory-gb 40
  realhf osdp llama3-7b --devices 64 --memory-gb 80 --batch 2 --recompute --json osdp.json
  realhf osdp path/to/config.json --devices 8 --memory-gb 16 --sequence-length 512
"""

import argparse
from pathlib import Path
from typing import Any

from rich.table import Table

from realhf.architecture.compute import MODES, Mode
from realhf.architecture.named import architecture
from realhf.base.options import Common
from realhf.cli.command import Command
from realhf.cli.options import add_options, options_of
from realhf.cli.output import Output, table_of
from realhf.geometry.parameters import parameter_count
from realhf.planning.model.hardware import GIB
from realhf.planning.model.osdp.problem import OsdpPlan
from realhf.planning.model.osdp.request import OsdpRequest, choose
from realhf.planning.model.osdp.table import COLUMNS, PLAN_COLUMNS, operator_rows, plan_rows


def add_arguments(command: Command) -> None:
    models = "llama3-7b, qwen3-8b, llama3-13b-critic, ..., or the path of a config.json"
    command.add_argument("model", metavar="MODEL", help=models)
    add_options(command, OsdpRequest, shows_all=True)
    modes = Common(f"modes to choose from (default {','.join(MODES)})")
    command.add("--modes", modes, default=",".join(MODES), metavar="MODES")
    command.add("--json", Common("also write the result to this file"), type=Path, metavar="FILE")


def execute(arguments: argparse.Namespace) -> int:
    request = options_of(OsdpRequest, arguments, model=arguments.model, modes=tuple(arguments.modes.split(",")))
    plan, uniform = choose(request)
    out = Output()
    out.say(
        f"{request.model}: {parameter_count(architecture(request.model)):,} parameters on {request.devices} x "
        f"{request.hardware}, samples of {request.sequence_length} tokens, {request.dtype}"
    )
    out.print(comparison_table(plan, uniform), operators_table(plan))
    gap = plan.seconds_per_sample / plan.lower_bound_s - 1
    verdict = "proven: no other choice is faster" if plan.proven else f"no choice is more than {gap:.2e} faster"
    out.say(f"{verdict}; found in {1e3 * plan.search_s:.1f} ms")
    if arguments.json:
        out.write_json(arguments.json, as_json(plan, uniform))
    return 0


def comparison_table(plan: OsdpPlan, uniform: dict[Mode, OsdpPlan | None]) -> Table:
    """The chosen plan beside the plans with one mode for all operators."""
    limit = plan.problem.memory_bytes / GIB
    columns = [f"GiB of {limit:g}" if column == "GiB" else column for column in PLAN_COLUMNS]
    return table_of("operator-sharded data parallelism", *columns, rows=plan_rows(plan, uniform))


def operators_table(plan: OsdpPlan) -> Table:
    """The operators with their modes, communication and memory; those of layers that are alike in one row."""
    slices = max((op.slices for op in plan.problem.operators), default=1)
    title = "whole operators" if slices == 1 else f"operators, large ones in {slices} slices"
    return table_of(title, *COLUMNS, rows=(row.cells for row in operator_rows(plan)), words=2)


def as_json(plan: OsdpPlan, uniform: dict[Mode, OsdpPlan | None]) -> dict[str, Any]:
    """The content of `--json`; `slices` has the number of slices in each mode for every operator by name."""

    def totals(some: OsdpPlan) -> dict[str, Any]:
        names = ("batch", "step_s", "communication_s", "samples_per_s", "memory_bytes")
        return {name: getattr(some, name) for name in names}

    return {
        **totals(plan),
        "memory_limit_bytes": plan.problem.memory_bytes,
        "num_devices": plan.problem.links.num_devices,
        "lower_bound_s_per_sample": plan.lower_bound_s,
        "proven": plan.proven,
        "search_s": plan.search_s,
        "slices": {
            op.name: dict(zip(plan.problem.modes, row, strict=True))
            for op, row in zip(plan.problem.operators, plan.slices, strict=True)
        },
        "uniform": {mode: totals(other) if other else None for mode, other in uniform.items()},
    }
