"""What `realhf run --recover auto` does when workers are lost: the plan for those that are left."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from realhf.base.errors import UserError
from realhf.cli.experiment import asked_again, plan_request
from realhf.cli.phases import Phases
from realhf.dataflow.plan import ExecutionPlan, check_plan, load_plan
from realhf.lifecycle.recover import Recovery
from realhf.lifecycle.shrink_rules import largest_fitting
from realhf.planning.model.hardware import Hardware
from realhf.planning.planner import plan_for
from realhf.planning.request import SearchBudget
from realhf.rundir.run import Run

# Budget of a search while a run waits for it, a number of plans, where the command line gives none.
EVALUATIONS = 20_000


def recovery_of(arguments: argparse.Namespace, next_run: Callable[[], Run]) -> Recovery:
    """What the command line wants done about failures; `check_recovery` has found it valid.

    `next_run`: see `Recovery`.
    """
    return Recovery(
        max_restarts=arguments.max_restarts if arguments.recover == "auto" else 0,
        min_workers=_min_workers(arguments, _fallback_plans(arguments)),
        plan_for_fewer=lambda run, num_workers: plan_for_fewer(arguments, run, num_workers),
        next_run=next_run,
    )


def check_recovery(arguments: argparse.Namespace, run: Run) -> None:
    """Raises UserError if --min-workers or a --fallback-plan does not fit the run."""
    plans = _fallback_plans(arguments)
    least, workers = _min_workers(arguments, plans), run.spec.num_workers
    if least is None:
        return
    if arguments.recover != "auto":
        raise UserError("--min-workers and --fallback-plan are for --recover auto; give it, or leave them out")
    if least > workers:
        raise UserError(f"--min-workers {least} is more than the run's {workers}; give {workers} or fewer")
    for path, plan in plans.items():
        if not least <= plan.num_devices < workers:
            raise UserError(
                f"--fallback-plan {path} is for {plan.num_devices} devices, which are not fewer than the run's "
                f"{workers} and at least {least}; make one with `realhf plan --num-workers N`, or change --min-workers"
            )
        if arguments.launcher == "slurm" and plan.num_devices % run.spec.devices_per_node:
            raise UserError(
                f"--fallback-plan {path} is for {plan.num_devices} devices, which are no whole nodes of "
                f"{run.spec.devices_per_node}; nodes are lost as a whole, so make one for fewer --nodes"
            )
        check_plan(plan, run.graph, run.settings.batch_size)


def plan_for_fewer(arguments: argparse.Namespace, run: Run, num_workers: int) -> tuple[ExecutionPlan, Hardware]:
    """The largest --fallback-plan for `num_workers` at most, else the best plan found for all of them.

    With what the plan is for: the hardware of the run, of which fewer workers may have more memory each.

    Raises:
        UserError: no plan fits.
    """
    plans = _fallback_plans(arguments)
    given = largest_fitting(list(plans.values()), num_workers)
    request, path = plan_request(arguments), None
    offload, budget = run.plan.offload, request.budget
    if given is not None:
        path = next(path for path, plan in plans.items() if plan is given)
        offload = ()
        num_workers = given.num_devices
    elif budget == SearchBudget():
        budget = SearchBudget(evaluations=EVALUATIONS)
    per_node = run.spec.devices_per_node if arguments.launcher == "slurm" else num_workers
    devices = replace(
        request.devices,
        num_workers=None,
        nodes=num_workers // per_node,
        gpus_per_node=per_node,
        hardware=None,  # that of the run, with its memory
        memory_gb=None,
    )
    request = replace(request, devices=devices, plan=path, budget=budget, offload=offload)
    with Phases() as watch:
        plan, cluster = plan_for(run.experiment, asked_again(request, run.spec), watch)
    return plan, cluster.hardware


def _fallback_plans(arguments: argparse.Namespace) -> dict[Path, ExecutionPlan]:
    return {path: load_plan(path) for path in arguments.fallback_plan}


def _min_workers(arguments: argparse.Namespace, plans: dict[Path, ExecutionPlan]) -> int | None:
    least: int | None = arguments.min_workers
    return least or min((plan.num_devices for plan in plans.values()), default=None)
