"""Measured times of a run's calls: its plan is searched again with them, a change to it pays or not, and they are kept
beside the profiles that predicted them, for the plans of later runs."""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import msgspec

from realhf.api.computation import check_given
from realhf.base.errors import UserError
from realhf.dataflow.plan import ExecutionPlan
from realhf.master.drift import WARM_UP, WINDOW, call_factors, changed_shares
from realhf.planning.explain.comparison import describe, explain
from realhf.planning.here import divided, hardware_here
from realhf.planning.model.cluster import Cluster
from realhf.planning.model.experience import RunTimes, SeenCall, digest_of, save_run_times
from realhf.planning.model.profile import profile_path
from realhf.planning.model.timings import ProfiledTimings
from realhf.planning.planner import search_for, task_of
from realhf.planning.predict import predict
from realhf.planning.request import Measured, PlanRequest, SearchBudget
from realhf.planning.task import PlanningTask
from realhf.report.run_data import lines_under
from realhf.rundir.lines import read_lines, step_line
from realhf.rundir.paths import RunDirectory
from realhf.rundir.run import Run, load_run, refuse_program

# The budget of a search during a run, unless the request gives one.
EVALUATIONS = 20_000
# A step predicted to be shorter by less than this part is within what predictions are worth.
LEAST_GAIN = 0.05
# The fewest steps, besides those that warm up, after which times are kept.
FEWEST_STEPS = 3


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a search with measured times.

    `factors`: by call, measured seconds over those predicted without factors. `changed_shares`: by model, of the bytes
    of copies that get only what changed. `step_s`: a step as measured. `present_s`
    and `other_s`: predictions of a step with the factors, under the present plan and under `plan`.
    """

    factors: dict[str, float]
    changed_shares: dict[str, float] = {}
    step_s: float
    present_s: float
    other_s: float
    plan: ExecutionPlan

    @property
    def gain(self) -> float:
        """The part of a step that is saved. Both predictions are off in the same direction, so their ratio counts."""
        return 1 - self.other_s / self.present_s

    def gain_s(self, steps_left: int) -> float:
        """Seconds saved over the steps that are left, without the cost of the change."""
        return self.gain * self.step_s * steps_left

    def pays(self, steps_left: int, cost_s: float) -> bool:
        """Whether it gains enough, if no step is made for `cost_s` seconds."""
        return self.gain >= LEAST_GAIN and self.gain_s(steps_left) > cost_s

    def in_words(self, steps_left: int, cost_s: float) -> str:
        return (
            f"{self.other_s:.3g} s instead of {self.present_s:.3g} s a step; {steps_left} steps are left, of "
            f"{self.step_s:.3g} s each: gains {self.gain_s(steps_left):.3g} s, a change costs {cost_s:.3g} s"
        )


def propose(directory: RunDirectory, budget: SearchBudget) -> Proposal:
    """The best plan found with the times that were measured under the present one. Changes nothing in the run.
    Raises UserError where too few steps were made under it, or none of its calls has a prediction."""
    run = load_run(directory)
    refuse_program(run.spec, "realhf replan")
    lines = lines_under(run.plan, read_lines(directory.metrics, step_line).values)[WARM_UP:][-WINDOW:]
    measured = call_factors(lines)
    if not measured:
        raise UserError(f"{directory.metrics} has no times beside predictions yet; let the run make some steps")
    factors = {name: run.spec.call_factors.get(name, 1.0) * factor for name, factor in measured.items()}
    models = {name: call.model_name for name, call in run.experiment.graph.model_calls.items()}
    shares = {**run.spec.changed_shares, **changed_shares(lines, models)}
    task = planned_task(run, factors, shares)
    check_given(run.plan, run.experiment, task.graph, task.batch_size, task.cluster.num_devices)
    present = predict(task, run.plan)
    result = search_for(task, or_default(budget))
    return Proposal(
        factors=factors,
        changed_shares=shares,
        step_s=statistics.median(line["time_s"] for line in lines),
        present_s=present.step_s,
        other_s=result.prediction.step_s,
        plan=explain(describe(task, result)),
    )


def or_default(budget: SearchBudget) -> SearchBudget:
    """The budget, or one of `EVALUATIONS` where it says nothing."""
    return SearchBudget(evaluations=EVALUATIONS) if budget == SearchBudget() else budget


def planned_task(
    run: Run, factors: dict[str, float], shares: Mapping[str, float] | None = None, *, ignores_runs: bool = False
) -> PlanningTask:
    """The planning of a run on the devices that it has, its calls' times scaled; with the
    `shares` of copies that change (None: those that it was planned with); with what finished runs measured, if
    the run was planned so, unless `ignores_runs`."""
    hardware = run.spec.hardware or divided(hardware_here(), run.spec.num_workers)
    per_node = run.spec.devices_per_node
    cluster = Cluster(num_nodes=run.spec.num_workers // per_node, devices_per_node=per_node, hardware=hardware)
    measured = Measured(
        call_factors=factors,
        changed_shares=run.spec.changed_shares if shares is None else shares,
        ignores_runs=ignores_runs or run.spec.ignores_runs,
    )
    request = PlanRequest(
        offload=run.plan.offload, saves=run.spec.saves, staleness=run.plan.staleness, measured=measured
    )
    return task_of(run.experiment, cluster, request)


def keep_times(run: Run, directory: RunDirectory) -> None:
    """Writes, for each profile that predicted calls of the run's last plan, what these calls took. Nothing after
    too few steps. Raises UserError where the metrics or a profile cannot be read."""
    lines = lines_under(run.plan, read_lines(directory.metrics, step_line).values)[WARM_UP:]
    if len(lines) < FEWEST_STEPS:
        return
    task = planned_task(run, {}, ignores_runs=True)
    seen: dict[Path, list[SeenCall]] = defaultdict(list)
    for name, call in run.plan.calls.items():
        model = task.call_models[name].under(call.compute)
        seconds = [line["calls"][name]["seconds"] for line in lines if name in line["calls"]]
        if not seconds or min(seconds) <= 0 or not isinstance(model.timings, ProfiledTimings):
            continue
        shape = call.layout.strategy, call.micro_batches
        logarithms = [math.log(value) for value in seconds]
        spread = statistics.stdev(logarithms) if len(logarithms) > 1 else 0.0
        measured = model.timings.profile
        path = profile_path(
            measured.model, measured.dtype, task.cluster.hardware.name, reproducible=measured.reproducible
        )
        seen[path].append(
            SeenCall(
                interface=model.call.interface_type.value,
                option=model.option_text(*shape),
                log_ratio=statistics.median(logarithms) - math.log(model.seconds(*shape)),
                noise=spread * math.sqrt(math.pi / 2 / len(logarithms)),  # the standard error of a median
            )
        )
    name = str(directory.path.resolve())
    for path, calls in seen.items():
        save_run_times(RunTimes(run=name, profile=digest_of(path), calls=tuple(calls)), path)
