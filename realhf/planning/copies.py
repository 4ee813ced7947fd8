"""Copies of parameters from where these already are: which calls of a found plan best take theirs from another call's
copy (`realhf.dataflow.copies`)."""

from collections.abc import Iterator, Mapping

from msgspec import structs

from realhf.dataflow.copies import takers_of
from realhf.dataflow.plan import ExecutionPlan
from realhf.dataflow.plan_checks import problem_of_copies, problem_of_order
from realhf.dataflow.rationale import Worth
from realhf.planning.predict import Prediction, predict, predict_in_best_order
from realhf.planning.task import PlanningTask

LEAST_GAIN = 1e-9  # part of a step


def with_best_copies(task: PlanningTask, prediction: Prediction) -> Prediction:
    """The plan with copies from other copies where its step gets shorter so and it fits: one choice after the other,
    the best first. Layouts stay as they are."""
    best = prediction
    while True:
        found = [best, *(there for copies in _more(task, best.plan) if (there := _predicted(task, best, copies)))]
        fastest = min(found, key=lambda each: each.step_s)
        if fastest.step_s >= best.step_s * (1 - LEAST_GAIN):
            return best
        best = fastest


def copies_worth(task: PlanningTask, prediction: Prediction) -> list[Worth]:
    """The gain from copies that serve several calls: the step time if each call fetched its own from home."""
    plan, found = prediction.plan, []
    for source in dict.fromkeys(plan.copies.values()):
        rest = {call: of for call, of in plan.copies.items() if of != source}
        there = predict_in_best_order(task, with_sources(plan, rest))
        feature = f"its copy serves {', '.join(takers_of(plan.copies, source))}"
        found.append(Worth(of=source, feature=feature, without_s=there.step_s if there.fits else None))
    return found


def with_sources(plan: ExecutionPlan, copies: Mapping[str, str]) -> ExecutionPlan:
    """The plan, without an order, in which the copies of these calls alone come from other calls' copies."""
    calls = {name: structs.replace(call, copy_from=copies.get(name)) for name, call in plan.calls.items()}
    for name in {*copies, *copies.values()}:  # of these copies no home gives its memory away
        calls[name] = structs.replace(calls[name], compute=structs.replace(calls[name].compute, in_place=None))
    return structs.replace(plan, calls=calls, order=())


def _more(task: PlanningTask, plan: ExecutionPlan) -> Iterator[dict[str, str]]:
    """The sources of a plan's copies with one more choice: a call whose copy is kept, for all others in its layout, and
    perhaps for one in another."""
    graph, copies = task.graph, plan.copies
    for model in graph.models:
        home = plan.layout(plan.home(graph, model))
        names = [name for name in graph.order if name in plan.calls and graph.calls[name].model_name == model]
        away = [name for name in names if plan.layout(name) != home]
        for place, source in enumerate(away):
            alike = {name: source for name in away[place + 1 :] if plan.layout(name) == plan.layout(source)}
            one_each = ({name: source} for name in away[place + 1 :] if name not in alike)
            for more in (alike, *(alike | other for other in one_each)):
                if source not in copies and any(copies.get(name) != of for name, of in more.items()):
                    yield copies | more


def _predicted(task: PlanningTask, known: Prediction, copies: Mapping[str, str]) -> Prediction | None:
    """The plan with these copies in the best order, or in the order that it has; None where it cannot run or does not
    fit."""
    plan = with_sources(known.plan, copies)
    if problem_of_copies(plan, task.graph):
        return None
    found = [predict_in_best_order(task, plan)]
    ordered = structs.replace(plan, order=known.plan.order)
    if not problem_of_order(ordered, task.graph):  # it may have the source of the next step before the last taker
        found.append(predict(task, ordered))
    return min((each for each in found if each.fits), key=lambda each: each.step_s, default=None)
