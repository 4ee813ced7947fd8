"""The arguments that name an experiment, and what they ask of the planner."""

import argparse
from pathlib import Path

from realhf.cli.options import add_options, options_of
from realhf.planning.request import DevicesRequest, PlanRequest, SearchBudget


def add_experiment_arguments(command: argparse.ArgumentParser) -> None:
    """The arguments that name an experiment and the devices it may use."""
    command.add_argument("experiment", help="a Python file with one dataclass under @auto")
    command.add_argument("--plan", type=Path, help="take this plan.json instead of searching for one")
    add_options(command, DevicesRequest)
    add_options(command.add_mutually_exclusive_group(), SearchBudget)
    command.add_argument(
        "--offload", metavar="MODELS", help="models that wait in host memory while nothing needs them: NAME,NAME"
    )


def plan_request(arguments: argparse.Namespace) -> PlanRequest:
    """What the arguments of `add_experiment_arguments` ask of the planner.

    Raises:
        UserError: a number is out of its range, or --offload is given beside --plan.
    """
    return PlanRequest(
        devices=options_of(DevicesRequest, arguments),
        plan=arguments.plan,
        budget=options_of(SearchBudget, arguments),
        offload=tuple(arguments.offload.split(",")) if arguments.offload else (),
    )
