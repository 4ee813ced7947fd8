"""The best plans for several clusters, or for several values of staleness, side by side."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from realhf.base.errors import UserError
from realhf.planning.explain.analysis import generates_apart
from realhf.planning.explain.comparison import Comparison, describe
from realhf.planning.predict import predict, predict_in_best_order
from realhf.planning.search import SearchResult
from realhf.planning.task import PlanningTask


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """The best plan of one case. `problem` says why there is none.

    `generates_apart`: generation and training of a model have no device in common.
    """

    name: str
    found: Comparison | None
    problem: str = ""
    generates_apart: bool = False


def solve_cases(tasks: Mapping[str, PlanningTask], search: Callable[[PlanningTask], SearchResult]) -> list[CaseResult]:
    """One search for each task. A task for which nothing fits does not end the others.

    Tasks on one cluster come in the order of their staleness: the plan of one counts for the next one, too, in the
    order that is the fastest there.
    """
    is_one_cluster = len({task.cluster for task in tasks.values()}) == 1
    results = []
    fresher = None
    for name, task in tasks.items():
        try:
            result = search(task)
        except UserError as error:
            results.append(CaseResult(name=name, found=None, problem=str(error)))
            continue
        prediction = predict(task, result.plan)
        if is_one_cluster and fresher:
            in_flight = task.max_steps_in_flight
            plan = msgspec.structs.replace(fresher, order=(), max_steps_in_flight=in_flight, predicted_step_s=None)
            prediction = min(prediction, predict_in_best_order(task, plan), key=lambda each: each.step_s)
        fresher = prediction.plan
        apart = generates_apart(task.graph, prediction.plan)
        results.append(CaseResult(name=name, found=describe(task, prediction, result), generates_apart=apart))
    return results
