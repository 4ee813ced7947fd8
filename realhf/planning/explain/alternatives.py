"""Why not otherwise: for each call of a plan, the best that a change of this call alone would give."""

from dataclasses import dataclass, replace

from realhf.dataflow.plan import CallPlan, ExecutionPlan
from realhf.planning.options import Option, call_options, option_of
from realhf.planning.problem.builder import build_problem
from realhf.planning.problem.native import native_problem
from realhf.planning.task import PlanningTask


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """The fastest other layout of `call` while all other calls stay; `step_s` is the step's time then.

    `planned_step_s` is the plan's, simulated in the same way (each call as soon as it can, no given order).
    None if no other layout of the call fits into memory.
    """

    call: str
    option: CallPlan | None
    step_s: float
    planned_step_s: float
    num_options: int
    num_too_large: int

    @property
    def slower_s(self) -> float:
        return self.step_s - self.planned_step_s


def best_alternatives(task: PlanningTask, plan: ExecutionPlan) -> list[Alternative]:
    """For each call: every other mesh and strategy of it is evaluated with the rest of the plan as it is."""
    return [_best(task, plan, name) for name in plan.calls]


def _best(task: PlanningTask, plan: ExecutionPlan, name: str) -> Alternative:
    chosen = {call: [option_of(entry)] for call, entry in plan.calls.items()}
    planned = chosen[name][0]
    options = [planned, *_others(task, name, planned)]
    native = native_problem(build_problem(replace(task, offload=plan.offload), {**chosen, name: options}))
    place = list(task.graph.calls).index(name)
    (planned_step_s, _), *evaluations = native.evaluate_all([0] * len(task.graph.calls), place)
    best, best_s, too_large = None, float("inf"), 0
    for option, (step_s, feasible) in zip(options[1:], evaluations, strict=True):
        if not feasible:
            too_large += 1
        elif step_s < best_s:
            best, best_s = option, step_s
    return Alternative(
        call=name,
        option=best.call_plan(predicted_s=task.call_models[name].seconds(best.layout.strategy, best.micro_batches))
        if best
        else None,
        step_s=best_s,
        planned_step_s=planned_step_s,
        num_options=len(options) - 1,
        num_too_large=too_large,
    )


def _others(task: PlanningTask, name: str, planned: Option) -> list[Option]:
    """All options in another layout."""
    options = call_options(task.graph.calls[name], task.batch_size, task.cluster)
    return [option for option in options if option.layout != planned.layout]
