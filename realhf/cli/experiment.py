"""The arguments that name an experiment, and what they ask of the planner."""

import argparse
from pathlib import Path

from realhf.planning.request import DevicesRequest, PlanRequest, SearchBudget


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
    """What the arguments of `add_experiment_arguments` ask of the planner.

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
        ),
        plan=arguments.plan,
        budget=SearchBudget(evaluations=arguments.evaluations, seconds=arguments.seconds),
        offload=tuple(arguments.offload.split(",")) if arguments.offload else (),
    )
