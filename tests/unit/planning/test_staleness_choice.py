"""The search chooses how old the weights of rollouts are: no older than a shorter step is worth."""

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.ppo import PPOExperiment
from realhf.base.errors import UserError
from realhf.dataflow.plan import ExecutionPlan
from realhf.planning import planner
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


def open_task(
    experiment: PPOExperiment, stalenesses: tuple[int, ...] = (0, 1, 2, 3), cluster: Cluster | None = None
) -> PlanningTask:
    return task_of(experiment, cluster or cpu_cluster(2), measured=UNMEASURED, stalenesses=stalenesses)


@pytest.fixture(scope="module")
def chosen() -> tuple[PlanningTask, ExecutionPlan]:
    task = open_task(SLOW_DECODING)
    return task, explain(describe(task, search_for(SLOW_DECODING, task, BUDGET)))


def test_the_least_staleness_of_the_shortest_step(chosen: tuple[PlanningTask, ExecutionPlan]) -> None:
    """The oracle: each staleness searched by itself."""
    task, plan = chosen
    each = [open_task(SLOW_DECODING, (k,)) for k in range(4)]
    steps = [search_plan(one, SearchBudget(evaluations=2250), 0).prediction.step_s for one in each]
    enough = min(steps) * (1 + WORTH_STALENESS)
    assert plan.staleness == next(k for k, step_s in enumerate(steps) if step_s <= enough) > 0
    assert steps[0] > 1.1 * steps[plan.staleness]
    assert plan.predicted_step_s == pytest.approx(steps[plan.staleness])
    assert plan.models.keys() == {"actor", "actor_rollout", "reward", "reference", "critic"}
    alone = task.of(plan)
    assert (alone.staleness, alone.staler) == (plan.staleness, ())
    assert predict(alone, plan).step_s == pytest.approx(plan.predicted_step_s)


def test_the_rationale_says_what_it_is_worth(chosen: tuple[PlanningTask, ExecutionPlan]) -> None:
    _, plan = chosen
    assert plan.rationale
    worth = {one.feature: one.without_s for one in plan.rationale.worth if one.of == "rollouts"}
    assert [*worth] == [f"by weights {plan.staleness} updates old, not {k}" for k in range(plan.staleness)]
    for without_s in worth.values():
        assert without_s is not None
        assert plan.predicted_step_s
        assert without_s > plan.predicted_step_s * (1 + WORTH_STALENESS)


def test_rollouts_stay_fresh_where_older_weights_gain_nothing() -> None:
    result = search_for(SHORT, open_task(SHORT), BUDGET)
    assert result.plan.staleness == 0
    assert result.fresher == {}
    assert "actor_rollout" not in result.plan.models


def test_all_share_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < search_for(SLOW_DECODING, open_task(SLOW_DECODING), BUDGET).evaluations <= 9000
    seconds, few = list[float | None](), SearchBudget(evaluations=50)

    def quick(task: PlanningTask, budget: SearchBudget, seed: int, watch: Watch) -> SearchResult:
        seconds.append(budget.seconds)
        return search_plan(task, few, seed, watch)

    monkeypatch.setattr(planner, "search_plan", quick)
    task = open_task(SLOW_DECODING)
    search_for(SLOW_DECODING, task, SearchBudget(seconds=400))
    shares = [400 / (len(seconds) - number) for number in range(len(seconds))]
    assert len(seconds) == 1 + len(task.staler)
    assert seconds == pytest.approx(shares, rel=0.1), "each has its part of what is left, which is nearly all"


def test_rollouts_stay_fresh_where_memory_has_no_room_for_a_copy() -> None:
    cluster = cpu_cluster(2, memory=58_500_000)  # the smallest plans found have 57 and 60 million bytes
    found = search_for(SLOW_DECODING, open_task(SLOW_DECODING, (0, 1), cluster), BUDGET)
    assert found.plan.staleness == 0
    with pytest.raises(UserError, match="no plan fits into memory"):
        search_for(SLOW_DECODING, open_task(SLOW_DECODING, (1,), cluster), BUDGET)


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
