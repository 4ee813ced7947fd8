"""The search chooses how old the weights of rollouts are: no older than a shorter step is worth."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from experiments.ppo import PPOExperiment
from realhf.api.resolved import ResolvedExperiment
from realhf.base.errors import UserError
from realhf.dataflow.plan import ExecutionPlan
from realhf.planning import planner
from realhf.planning.certificate import Certificate
from realhf.planning.explain.comparison import describe, explain
from realhf.planning.model.cluster import Cluster
from realhf.planning.planner import WORTH_STALENESS, search_for, task_of
from realhf.planning.predict import predict
from realhf.planning.request import DevicesRequest, Measured, PlanRequest, SearchBudget, Watch
from realhf.planning.search import SearchResult, search_plan
from realhf.planning.task import PlanningTask
from tests.unit.lifecycle.requests import request_of
from tests.unit.planning.graphs import cpu_cluster

BUDGET = SearchBudget(evaluations=9000)
UNMEASURED = Measured(profiles=Path("nowhere"), ignores_runs=True)  # whatever was profiled here
# Long responses of few samples: generation takes as long on two devices as on one, and leaves the other to training.
SLOW_DECODING = PPOExperiment(batch_size=8, evaluate=False)
SLOW_DECODING = replace(SLOW_DECODING, ppo=replace(SLOW_DECODING.ppo, max_new_tokens=128))
SHORT = PPOExperiment(batch_size=128, evaluate=False)


def open_task(experiment: PPOExperiment, cluster: Cluster | None = None, **staleness: int) -> PlanningTask:
    """Of rollouts that are up to three steps stale, or as `staleness` says."""
    request = PlanRequest(offload=(), measured=UNMEASURED, **(staleness or {"staleness_up_to": 3}))
    return task_of(ResolvedExperiment(experiment), cluster or cpu_cluster(2), request)


@pytest.fixture(scope="module")
def chosen() -> tuple[PlanningTask, ExecutionPlan]:
    task = open_task(SLOW_DECODING)
    return task, explain(describe(task, search_for(task, BUDGET)))


def test_the_least_staleness_of_the_shortest_step(chosen: tuple[PlanningTask, ExecutionPlan]) -> None:
    """The oracle: each staleness searched by itself."""
    task, plan = chosen
    each = [open_task(SLOW_DECODING, staleness=k) for k in range(4)]
    steps = [search_plan(one, SearchBudget(evaluations=2250)).prediction.step_s for one in each]
    enough = min(steps) * (1 + WORTH_STALENESS)
    assert plan.staleness == next(k for k, step_s in enumerate(steps) if step_s <= enough) > 0
    assert steps[0] > 1.1 * steps[plan.staleness]
    assert plan.predicted_step_s == pytest.approx(steps[plan.staleness])
    assert plan.models.keys() == {"actor", "actor_rollout", "reward", "reference", "critic"}
    alone = task.of(plan)
    assert (alone.staleness, alone.more_stale) == (plan.staleness, ())
    assert predict(alone, plan).step_s == pytest.approx(plan.predicted_step_s)


def result_of(staleness: int, step_s: float) -> SearchResult:
    prediction: Any = SimpleNamespace(step_s=step_s, plan=SimpleNamespace(staleness=staleness))
    certificate = Certificate(cost_s=step_s, lower_bound_s=0.0, proven=False)
    return SearchResult(prediction=prediction, certificate=certificate, rules=(), evaluations=10)


@pytest.mark.parametrize(
    ("steps", "staleness", "fresher"),
    [
        ({0: 101.0, 1: 100.0}, 0, {}),  # by 1 % and no more
        ({0: 101.1, 1: 100.0}, 1, {0: 101.1}),
        ({0: 103.0, 1: 100.9, 2: 100.0, 3: 104.0}, 1, {0: 103.0}),
        ({0: 103.0, 1: 101.9, 2: 100.95, 3: 100.0}, 2, {0: 103.0, 1: 101.9}),  # each within 1 % of the next: no matter
        ({0: 100.0, 1: 120.0}, 0, {}),
        ({2: 105.0, 3: 100.0}, 3, {0: None, 1: None, 2: 105.0}),  # None: nothing fits
    ],
)
def test_the_least_stale_result_that_no_staler_one_beats_by_more_than_a_hundredth(
    steps: dict[int, float], staleness: int, fresher: dict[int, float | None]
) -> None:
    found = planner._least_stale([result_of(*each) for each in steps.items()])
    assert (found.plan.staleness, found.fresher) == (staleness, fresher)
    assert found.evaluations == 10 * len(steps), "of all"
    stalers = [step_s for k, step_s in steps.items() if k > staleness]
    assert all(steps[staleness] <= 1.01 * step_s for step_s in stalers)


def test_the_rationale_says_what_it_is_worth(chosen: tuple[PlanningTask, ExecutionPlan]) -> None:
    _, plan = chosen
    assert plan.rationale
    worth = {one.feature: one.without_s for one in plan.rationale.worth if one.of == "rollouts"}
    assert [*worth] == [f"by weights {plan.staleness} updates old, not {k}" for k in range(plan.staleness)]
    for without_s in worth.values():
        assert without_s is not None
        assert plan.predicted_step_s
        assert without_s > plan.predicted_step_s * (1 + WORTH_STALENESS)


@pytest.mark.slow
def test_rollouts_stay_fresh_where_older_weights_gain_nothing() -> None:
    result = search_for(open_task(SHORT), BUDGET)
    assert result.plan.staleness == 0
    assert result.fresher == {}
    assert "actor_rollout" not in result.plan.models


def test_all_share_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four searches of 400 s and 9,000 evaluations, of which each takes 10 s: the later ones share what is left."""
    now_s, budgets = 0.0, list[SearchBudget]()

    def quick(task: PlanningTask, budget: SearchBudget, watch: Watch) -> SearchResult:
        nonlocal now_s
        now_s += 10.0
        budgets.append(budget)
        return result_of(task.staleness, 1.0)

    monkeypatch.setattr(planner, "search_plan", quick)
    monkeypatch.setattr(planner, "check_plan", lambda *_: None)
    monkeypatch.setattr(planner, "time", SimpleNamespace(perf_counter=lambda: now_s))
    task = open_task(SLOW_DECODING)
    search_for(task, SearchBudget(seconds=400, evaluations=9001))
    assert [budget.seconds for budget in budgets] == [400 / 4, 390 / 3, 380 / 2, 370 / 1]
    assert {budget.evaluations for budget in budgets} == {9001 // 4}
    assert len(task.more_stale) == 3


def test_rollouts_stay_fresh_where_memory_has_no_room_for_a_copy() -> None:
    cluster = cpu_cluster(2, memory=58_500_000)  # the smallest plans found have 57 and 60 million bytes
    found = search_for(open_task(SLOW_DECODING, cluster, staleness_up_to=1), BUDGET)
    assert found.plan.staleness == 0
    with pytest.raises(UserError, match="no plan fits into memory"):
        search_for(open_task(SLOW_DECODING, cluster, staleness=1), BUDGET)


def test_a_model_that_only_stale_rollouts_have_waits_in_host_memory() -> None:
    request = PlanRequest(offload=("actor_rollout",), measured=UNMEASURED, staleness_up_to=1)
    found = search_for(task_of(ResolvedExperiment(SHORT), cpu_cluster(2), request), SearchBudget(evaluations=200))
    assert (found.plan.staleness, found.plan.offload) == (1, ("actor_rollout",))
    assert found.fresher == {0: None}


def test_requests() -> None:
    request = request_of("experiments/ppo.py", "--staleness-up-to", "2", "--staleness", "1")
    assert request.plan.stalenesses == (0, 1, 2)
    assert request.fields == ("--staleness", "1"), "the experiment's own"
    assert PlanRequest().stalenesses == (0,)
    assert PlanRequest(staleness=3, staleness_up_to=5).stalenesses == (3,), "of a run that goes on"
    with pytest.raises(UserError, match="--staleness-up-to 65 is not from 0 to 64"):
        PlanRequest(staleness_up_to=65)
    with pytest.raises(UserError, match=r"--staleness-up-to 1 is for the search.*beside --rule"):
        PlanRequest(staleness_up_to=1, rule="colocate", devices=DevicesRequest(num_workers=2))
