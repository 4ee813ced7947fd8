"""A broken run goes on without the workers to blame: elsewhere, or with fewer workers under another plan."""

from collections.abc import Iterable
from dataclasses import replace

from realhf.base.errors import RunError, UserError
from realhf.dataflow.plan import ExecutionPlan
from realhf.launch.launcher import Launcher
from realhf.lifecycle.replan import or_default
from realhf.lifecycle.request import RunRequest
from realhf.planning.model.hardware import Hardware
from realhf.planning.planner import plan_for
from realhf.planning.request import Watch
from realhf.rundir.run import Run

# Failures in a row, no new step between them, for which a worker is blamed before the run goes on without it.
FAILURES = 2


class Suspects:
    """Counts for every worker the failures it was blamed for in a row, without a new step between them. A run that
    changes its workers, and so the meaning of their numbers, takes another."""

    def __init__(self) -> None:
        self._furthest = -1
        self._failures: dict[int, int] = {}

    def failed(self, steps: int, workers: Iterable[int], num_workers: int) -> frozenset[int]:
        """The workers to go on without, after a failure behind `steps` steps for which `workers` are to blame.
        Where all `num_workers` of the run are to blame it is the fault of none of them."""
        before = {} if steps > self._furthest else self._failures
        self._failures = {worker: before.get(worker, 0) + 1 for worker in workers}
        self._furthest = max(self._furthest, steps)
        found = frozenset(worker for worker, count in self._failures.items() if count >= FAILURES)
        return found if len(found) < num_workers else frozenset()


def elsewhere(
    run: Run, request: RunRequest, launcher: Launcher, blamed: frozenset[int], error: RunError, watch: Watch
) -> Run | None:
    """The run without the places that are lost and those of the workers `blamed`, with fewer workers if there is no
    room for all; None where it can stay, or may not go on with fewer workers. Raises RunError, whose text begins with
    that of `error`, if there is room for too few or no plan for them."""
    least = request.recovery.least_workers
    if least is None:
        return None
    places = (launcher.place(worker) for worker in sorted(blamed))
    gone = {place for place in places if place is not None} | launcher.lost()
    avoided = frozenset(run.spec.avoided) | gone
    room = launcher.room(avoided)
    moved = run.changed(avoided=tuple(sorted(avoided)))
    if room >= run.spec.num_workers:  # a cluster has other nodes
        return moved if gone else None
    if room < least:
        raise RunError(
            f"{error}\nthere is room for {room} workers, fewer than --min-workers {least}: without "
            f"{', '.join(sorted(avoided)) or 'the nodes that are down'}; repair these, and go on with --resume "
            f"--num-workers {run.spec.num_workers}"
        ) from error
    try:
        plan, hardware = plan_for_fewer(run, request, room, watch)
    except UserError as no_plan:
        raise RunError(f"{error}\nno plan for the {room} workers that there is room for: {no_plan}") from error
    per_node = min(run.spec.devices_per_node, plan.num_devices) if launcher.is_remote else plan.num_devices
    return moved.changed(plan, num_workers=plan.num_devices, devices_per_node=per_node, hardware=hardware)


def plan_for_fewer(run: Run, request: RunRequest, num_workers: int, watch: Watch) -> tuple[ExecutionPlan, Hardware]:
    """The largest fallback plan for `num_workers` at most, else the best plan found for all of them, and its hardware:
    the run's, where fewer workers may have more memory each. Raises UserError if no plan fits."""
    fitting = [(path, plan) for path, plan in request.recovery.plans.items() if plan.num_devices <= num_workers]
    path, given = max(fitting, key=lambda one: one[1].num_devices, default=(None, None))
    num_workers = given.num_devices if given else num_workers
    per_node = run.spec.devices_per_node if request.launcher.is_remote else num_workers
    wanted = request.plan_request(run.spec)
    devices = replace(wanted.devices, num_workers=None, nodes=num_workers // per_node, gpus_per_node=per_node)
    devices = replace(devices, hardware=None, memory_gb=None)  # those of the run
    offload = () if path else run.plan.offload
    rule = None if path else wanted.rule
    # Copies for stale rollouts are models of the run, and in its checkpoints.
    wanted = replace(wanted, staleness=run.plan.staleness, staleness_up_to=0)
    wanted = replace(wanted, devices=devices, plan=path, rule=rule, budget=or_default(wanted.budget), offload=offload)
    plan, cluster = plan_for(run.experiment, wanted, watch)
    return plan, cluster.hardware
