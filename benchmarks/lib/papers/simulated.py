"""The plans of a cell: searched, by rule, and of other systems."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lib.papers.cells import OPEN, Cell
from lib.papers.large import fewer_options
from lib.papers.plans import Planned, planned
from lib.papers.systems import SYSTEMS

from realhf.base.errors import UserError
from realhf.planning.mapping import Mapper
from realhf.planning.options import chosen
from realhf.planning.predict import predict_in_best_order
from realhf.planning.presets import evaluate_preset
from realhf.planning.problem.builder import build_problem
from realhf.planning.problem.native import SearchRequest, native_problem, search_problem
from realhf.planning.request import SearchBudget
from realhf.planning.search import search_plan
from realhf.planning.task import PlanningTask

SEED = 0
SEARCHED = "searched"


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """The plans of a cell by name; None: it does not fit or is not legal. `gap`: how far the searched plan can be from
    the best."""

    plans: Mapping[str, Planned | None]
    gap: float = 0.0

    def step_s(self, name: str = SEARCHED) -> float | None:
        plan = self.plans[name]
        return plan.step_s if plan else None

    def gain(self, name: str, over: str) -> float | None:
        """By which factor `name` is faster; None where one of them does not fit."""
        one, other = self.step_s(name), self.step_s(over)
        return other / one if one and other else None


Done = Mapping[Cell, Simulated]


def simulate_cell(cell: Cell) -> Simulated:
    """Searches from a fixed seed, and predicts."""
    task = cell.task()
    found = _searched(cell, task) if cell.searches else Simulated(plans={})
    mapper = Mapper(task)
    others = {name: SYSTEMS[name](cell) if name in SYSTEMS else _by_rule(cell, mapper, name) for name in cell.systems}
    return replace(found, plans={**found.plans, **others})


def _searched(cell: Cell, task: PlanningTask) -> Simulated:
    """The searched plan alone; on a `large` cluster among fewer options, which are computed as they are set up."""
    if cell.opens and not cell.large:
        task = replace(task, open_choices=dict.fromkeys(task.graph.models, OPEN))
    budget = SearchBudget(evaluations=cell.evaluations)
    try:
        if not cell.large:
            found = search_plan(replace(task, seed=SEED), budget)
            plan, gap = found.prediction, found.certificate.gap
            return Simulated(plans={SEARCHED: planned(cell, task, plan)}, gap=gap)
    except UserError:  # nothing fits
        return Simulated(plans={SEARCHED: None})
    options = fewer_options(task)
    if not all(options.values()):
        return Simulated(plans={SEARCHED: None})
    best = search_problem(native_problem(build_problem(task, options)), SearchRequest(budget=budget, seed=SEED))
    if not best.feasible:
        return Simulated(plans={SEARCHED: None})
    prediction = predict_in_best_order(task, task.plan(chosen(options, best.choice)))
    gap = max(best.step_s / best.lower_bound_s - 1, 0.0)
    return Simulated(plans={SEARCHED: planned(cell, task, prediction)}, gap=gap)


def _by_rule(cell: Cell, mapper: Mapper, name: str) -> Planned | None:
    rule = evaluate_preset(name, mapper.task, mapper).fitting
    return planned(cell, mapper.task, rule) if rule else None
