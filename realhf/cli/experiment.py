"""From the words of a command line to an experiment, and to what is asked of the planner."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import tyro

from realhf.base.errors import UserError
from realhf.planning.request import DevicesRequest, PlannedHardware, PlanRequest, SearchBudget
from realhf.rundir.run import RunSpec, load_experiment_class, saved_experiment

FIELDS_OPTION = "--fields"


def add_experiment_arguments(command: argparse.ArgumentParser) -> None:
    """The arguments that name an experiment and the devices it may use."""
    command.add_argument("experiment", help="a Python file with one dataclass under @auto")
    command.add_argument("--plan", type=Path, help="take this plan.json instead of searching for one")
    command.add_argument("--num-workers", type=int, help="devices to use (default: the GPUs here, else the CPU cores)")
    command.add_argument("--nodes", type=int, default=1, help="number of nodes (default 1)")
    command.add_argument("--gpus-per-node", type=int, help="devices a node (default: --num-workers / --nodes)")
    budget = command.add_mutually_exclusive_group()
    budget.add_argument(
        "--evaluations", type=int, metavar="N", help="budget of the plan search, a number of plans; reproducible"
    )
    budget.add_argument(
        "--seconds", type=float, metavar="S", help="budget of the plan search in seconds, on all cores of this machine"
    )
    command.add_argument("--hardware", help="a hardware description, such as h100 or cpu (default: this machine)")
    command.add_argument(
        "--memory-gb", type=float, help="memory of a device in GiB (default: a GPU's, or the share of this machine's)"
    )
    command.add_argument(
        "--offload", metavar="MODELS", help="models that wait in host memory while nothing needs them: NAME,NAME"
    )


def plan_request(arguments: argparse.Namespace) -> PlanRequest:
    """What the arguments of `add_experiment_arguments` and --launcher ask of the planner.

    Raises:
        UserError: a number is out of its range, or --offload is given beside --plan.
    """
    return PlanRequest(
        devices=DevicesRequest(
            num_workers=arguments.num_workers,
            nodes=arguments.nodes,
            gpus_per_node=arguments.gpus_per_node,
            hardware=arguments.hardware,
            memory_gb=arguments.memory_gb,
            place={"local": "here", "slurm": "nodes", None: None}[arguments.launcher],
            cpu_only=arguments.cpu_only,
        ),
        plan=arguments.plan,
        budget=SearchBudget(evaluations=arguments.evaluations, seconds=arguments.seconds),
        offload=tuple(arguments.offload.split(",")) if arguments.offload else (),
    )


def asked_again(request: PlanRequest, saved: RunSpec) -> PlanRequest:
    """The request for a saved run: with its hardware and the measured factors of its calls."""
    planned = PlannedHardware(saved.hardware, saved.num_workers) if saved.hardware else None
    return replace(
        request,
        devices=replace(request.devices, planned=planned),
        saves=request.saves or saved.saves,
        call_factors=saved.call_factors,
    )


def build_experiment(path: str, overrides: list[str], saved: RunSpec | None = None) -> Any:
    """The experiment of a file with its fields set from `--field value` words; the others have their defaults, or the
    values of a `saved` run.

    A wrong word is explained and ends the process with 2; `--fields` lists all fields and ends it with 0.

    Raises:
        UserError: the file has no such class, or `saved` is of another one.
    """
    cls = load_experiment_class(path)
    prog = f"realhf COMMAND {path}"
    if FIELDS_OPTION in overrides:
        tyro.cli(cls, args=["--help"], prog=prog, config=(tyro.conf.AvoidSubcommands,))
    start = {} if saved is None else {"default": _saved_experiment(path, cls, saved)}
    return tyro.cli(cls, args=overrides, prog=prog, config=(tyro.conf.AvoidSubcommands,), add_help=False, **start)


def _saved_experiment(path: str, cls: type[Any], saved: RunSpec) -> Any:
    if cls.__name__ != saved.experiment_class:
        raise UserError(
            f"{path} has the experiment {cls.__name__}, the run is one of {saved.experiment_class} in "
            f"{saved.experiment_file}; give that file"
        )
    return saved_experiment(saved, cls, path)
