"""From an experiment and a request to a task, a search and a plan: what is passed on, to whom, and what is refused."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from experiments.ppo import PPOExperiment
from realhf.api.backends import NATIVE
from realhf.api.experiment import KeyLengths, ModelSetup
from realhf.api.resolved import ResolvedExperiment
from realhf.base.errors import UserError
from realhf.dataflow.graph import DataflowGraph
from realhf.dataflow.plan import CallCompute, CallPlan, ExecutionPlan
from realhf.planning import planner
from realhf.planning.model.features import ENGINE
from realhf.planning.model.workload import Workload
from realhf.planning.planner import given_plan, plan_for, search_for, task_of, tasks_of
from realhf.planning.request import DevicesRequest, Measured, PlanRequest, SearchBudget, unwatched
from realhf.planning.search import NothingFitsError
from realhf.planning.task import PlanningTask
from realhf.planning.what_if import WhatIf, WhatIfRequest
from tests.unit.planning.graphs import cpu_cluster, ppo, settings
from tests.unit.planning.graphs import task_of as task_of_graph

TASK = task_of_graph(ppo(), **settings(ppo(), cpu_cluster(2)))
EXPERIMENT = ResolvedExperiment(PPOExperiment(batch_size=8, evaluate=False))
PLAN = ExecutionPlan(num_devices=3, calls={"actor_generate": CallPlan(devices=(0, 1))}, staleness=2)
MEASURED = Measured(profiles=Path("nowhere"), call_factors={"actor_generate": 2.0}, ignores_runs=True)


def request_of(given: ExecutionPlan | None = None, **fields: Any) -> PlanRequest:
    """One that gives this plan, which is not read from a file."""
    request = PlanRequest(**fields)
    request.__dict__["given"] = given
    return request


# --- a request


@pytest.mark.parametrize("given", [None, PLAN])
def test_the_plan_of_a_request(given: ExecutionPlan | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the devices of a given plan, or those that are asked for; checked and explained."""
    request = request_of(given, budget=SearchBudget(evaluations=5))
    experiment: Any = SimpleNamespace(threads=7)
    cluster = SimpleNamespace(hardware="hardware")

    def cluster_of(devices: Any, num_devices: int | None) -> Any:
        assert devices == replace(request.devices, threads=7)
        assert num_devices == (3 if given else None)
        return cluster

    def task(*words: Any) -> Any:
        assert words == (experiment, cluster, request)
        return TASK

    def search(*words: Any) -> str:
        assert words == (TASK, request.budget, unwatched)
        return "searched"

    found = SimpleNamespace(plan="plan", task="task")
    checked: list[Any] = []
    monkeypatch.setattr(planner, "cluster_of", cluster_of)
    monkeypatch.setattr(planner, "check_hardware", lambda *words, is_here: checked.append((*words, is_here)))
    monkeypatch.setattr(planner, "task_of", task)
    monkeypatch.setattr(planner, "given_plan", lambda *words: given if words == (experiment, TASK, request) else 0)
    monkeypatch.setattr(planner, "search_for", search)
    monkeypatch.setattr(planner, "describe", lambda *words: found if words == (TASK, given or "searched") else None)
    monkeypatch.setattr(planner, "check_cache_room", lambda *words: checked.append(words))
    monkeypatch.setattr(planner, "explain", lambda of: "explained" if of is found else None)
    assert plan_for(experiment, request) == ("explained", cluster)
    assert checked == [(experiment, "hardware", False), ("plan", "task")]


def test_a_plan_by_its_rule_or_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read from a file is checked."""

    def rule(name: str, task: Any) -> Any:
        assert (name, task) == ("split", TASK)
        return SimpleNamespace(plan="by rule")

    checked: list[Any] = []
    monkeypatch.setattr(planner, "rule_plan", rule)
    monkeypatch.setattr(planner, "check_given", lambda *words: checked.append(words))
    assert given_plan(EXPERIMENT, TASK, request_of(rule="split")) == "by rule"
    assert given_plan(EXPERIMENT, TASK, request_of()) is None
    assert not checked
    assert given_plan(EXPERIMENT, TASK, request_of(PLAN)) is PLAN
    assert checked == [(PLAN, EXPERIMENT, TASK.graph, TASK.batch_size, 2)]


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What tasks are made of."""
    asked: list[Any] = []

    def task(*words: Any) -> str:
        asked.append(words)
        return f"task {len(asked)}"

    monkeypatch.setattr(planner, "task_of", task)

    class Named(str):
        hardware = SimpleNamespace(host_cores=None)

    def clusters(devices: DevicesRequest, names: str | None, num_devices: int | None) -> dict[str, str]:
        return {name: Named(f"{name} {devices.nodes} {num_devices}") for name in (names or "one").split(",")}

    monkeypatch.setattr(planner, "clusters_of", clusters)
    return asked


def test_tasks_of_clusters(cases: list[Any]) -> None:
    experiment = ResolvedExperiment(SimpleNamespace(rpcs=list(ppo().calls.values())))
    request = request_of(PLAN, devices=DevicesRequest(nodes=2))
    found = tasks_of(experiment, request, WhatIfRequest(clusters="a,b", stalenesses="1"))
    assert found == {"a": "task 1", "b": "task 2"}
    assert cases == [(experiment, f"{name} 2 3", request, WhatIf(staleness=1)) for name in "ab"]


def test_tasks_of_stalenesses(cases: list[Any]) -> None:
    experiment = ResolvedExperiment(SimpleNamespace(rpcs=list(ppo().calls.values())))
    found = tasks_of(experiment, request_of(), WhatIfRequest(stalenesses="1,0"))
    assert found == {"staleness 0": "task 1", "staleness 1": "task 2"}
    assert [each[-1].staleness for each in cases] == [0, 1]
    assert cases[0][1] == "one 1 None"


def test_what_is_not_compared_at_once(cases: list[Any]) -> None:
    experiment = ResolvedExperiment(SimpleNamespace(rpcs=list(ppo().calls.values())))
    with pytest.raises(UserError, match="several clusters or values of --staleness are compared by themselves"):
        tasks_of(experiment, request_of(), WhatIfRequest(clusters="a,b", stalenesses="0,1"))
    with pytest.raises(UserError, match="--staleness 1 and --staleness-up-to 2: the one is a what-if"):
        tasks_of(experiment, request_of(staleness_up_to=2), WhatIfRequest(stalenesses="1"))
    assert len(tasks_of(experiment, request_of(staleness_up_to=2), WhatIfRequest())) == 1


# --- a task


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What costs are asked for; they are those of TASK."""
    asked: list[Any] = []

    def load(models: Any, **words: Any) -> Any:
        asked.append((list(models), words))
        return TASK.costs

    monkeypatch.setattr(planner, "load_costs", load)
    return asked


def test_the_task_of_an_experiment(costs: list[Any]) -> None:
    cluster = cpu_cluster(2)
    task = task_of(EXPERIMENT, cluster, PlanRequest(measured=MEASURED, offload=("reward",), saves=True))
    [(models, words)] = costs
    assert models == ["actor", "reward", "reference", "critic"]
    engine = replace(ENGINE, copies_checkpoints=True)
    assert {name: words[name] for name in ("dtype", "hardware", "root", "ignores_runs", "features")} == {
        "dtype": "float32", "hardware": cluster.hardware, "root": Path("nowhere"), "ignores_runs": True,
        "features": engine,
    }  # fmt: skip
    assert set(words["of_models"]) == set(models)
    assert all(features.copies_checkpoints for features in words["of_models"].values())
    assert words["of_models"]["actor"].fp32_gradients == engine.fp32_gradients
    assert (task.batch_size, task.max_steps_in_flight, task.dtype) == (8, 2, "float32")
    assert (task.offload, task.may_offload, task.cluster) == (("reward",), False, cluster)
    assert task.costs == replace(TASK.costs, call_factors={"actor_generate": 2.0})
    assert (task.staleness, task.more_stale, task.mixed) == (0, (), frozenset(models))
    assert (task.seed, task.evaluations) == (EXPERIMENT.seed, EXPERIMENT.settings.search_evaluations)
    assert set(task.open_choices) == set(models)
    assert "recomputation" in task.open_choices["actor"]
    assert (task.workload.prompt_tokens, task.workload.new_tokens) == (EXPERIMENT.dataset.lengths()["prompt"].mean, 9)
    free = task_of(EXPERIMENT, cluster, PlanRequest())
    assert (free.offload, free.may_offload) == ((), True)
    assert [words["features"].copies_checkpoints for _, words in costs[1:]] == [False]
    assert (costs[1][1]["root"], costs[1][1]["ignores_runs"]) == (None, False)


def test_the_task_of_what_would_be(costs: list[Any], tmp_path: Path) -> None:
    """Prompts of a given length need no data set: what no call makes has it."""
    lengths = tmp_path / "lengths"
    lengths.write_text("2\n4\n")
    what_if = WhatIf(
        prompt_tokens=5, new_tokens=7, response_lengths=lengths, batch_size=16, dtype="bfloat16", staleness=1,
        features=("no-zero1", "no-recomputation"),
    )  # fmt: skip
    task = task_of(EXPERIMENT, cpu_cluster(2), PlanRequest(), what_if)
    [(_, words)] = costs
    assert (words["dtype"], task.dtype, task.batch_size, task.max_steps_in_flight) == ("bfloat16", "bfloat16", 16, 3)
    assert (task.workload.prompt_tokens, task.workload.new_tokens, task.workload.max_new_tokens) == (5, 3, 7)
    assert not any(features.zero1 for features in (words["features"], *words["of_models"].values()))
    assert "recomputation" not in task.open_choices["actor"]
    assert [edge.steps_back for edge in task.graph.edges if edge.child == "actor_generate"] == [2]


@pytest.mark.parametrize(
    ("what_if", "keys", "tokens"),
    [(WhatIf(), ("prompt", "label"), 6.0), (WhatIf(prompt_tokens=5), ("prompt",), 5.0)],
)
def test_keys_and_lengths_are_of_the_data_set_or_those_that_a_request_needs(
    what_if: WhatIf, keys: tuple[str, ...], tokens: float, costs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = {"prompt": KeyLengths.constant(6), "label": KeyLengths.constant(1)}
    dataset = SimpleNamespace(keys=("prompt", "label"), lengths=lambda: lengths)
    monkeypatch.setattr(PPOExperiment, "dataset", dataset)
    task = task_of(ResolvedExperiment(EXPERIMENT.source), cpu_cluster(2), PlanRequest(), what_if)
    assert task.workload.prompt_tokens == tokens
    assert task.graph.dataset_keys == keys


def test_larger_models_have_the_settings_of_published_measurements(costs: list[Any]) -> None:
    task = task_of(EXPERIMENT, cpu_cluster(2), PlanRequest(), WhatIf(model_types={"actor": "llama7b"}))
    assert (task.workload.prompt_tokens, task.workload.new_tokens, task.dtype) == (1024, 1024, "bfloat16")
    assert task.graph.models["actor"].hidden_size == 4096


def test_the_staleness_of_a_task_may_be_open(costs: list[Any]) -> None:
    """The task is of the first, and the others are in `more_stale`, each with the steps in flight that it needs."""
    task = task_of(EXPERIMENT, cpu_cluster(2), PlanRequest(staleness_up_to=2))
    tasks = [task, *task.more_stale]
    assert [each.staleness for each in tasks] == [0, 1, 2]
    assert [each.max_steps_in_flight for each in tasks] == [2, 2, 3]
    assert ["actor_rollout" in each.graph.models for each in tasks] == [False, True, True]
    assert [each.more_stale for each in task.more_stale] == [(), ()]
    assert "actor_rollout" in costs[0][0]
    assert "actor_rollout" in costs[0][1]["of_models"]


def test_only_models_of_this_engine_have_modes_by_operator(costs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    setups = EXPERIMENT.setups | {"critic": replace(EXPERIMENT.setups["critic"], backend="megatron")}
    monkeypatch.setattr(PPOExperiment, "models", setups)
    assert (setups["actor"].backend, NATIVE) == ("native", "native")
    task = task_of(ResolvedExperiment(EXPERIMENT.source), cpu_cluster(2), PlanRequest())
    assert task.mixed == {"actor", "reward", "reference"}


def test_what_a_task_cannot_be(costs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="'nobody' is no model"):
        task_of(EXPERIMENT, cpu_cluster(2), PlanRequest(offload=("nobody",)))

    def rows(graph: DataflowGraph, batch_size: int) -> int:
        raise UserError(f"no rows of {batch_size}")

    with monkeypatch.context() as patch:
        patch.setattr(DataflowGraph, "rows_per_step", rows)
        with pytest.raises(UserError, match="no rows of 7"):
            task_of(EXPERIMENT, cpu_cluster(2), PlanRequest(), WhatIf(batch_size=7))
    asked: list[Any] = []
    monkeypatch.setattr(planner, "check_devices", lambda pools, devices: asked.append((list(pools), devices)))
    task_of(EXPERIMENT, cpu_cluster(2, num_nodes=2), PlanRequest())
    assert asked == [([], 4)]
    setups = EXPERIMENT.setups | {"reward": ModelSetup(dtype="bfloat16")}
    monkeypatch.setattr(PPOExperiment, "models", setups)
    with pytest.raises(UserError, match=r"several dtypes \(bfloat16, float32\); give all of them one"):
        task_of(ResolvedExperiment(EXPERIMENT.source), cpu_cluster(2), PlanRequest())


@pytest.mark.parametrize(
    ("most", "kept", "staleness", "steps"),
    [(2, [], 0, 2), (1, [], 0, 1), (1, [3], 0, 4), (5, [3, 1], 0, 5), (1, [], 1, 3), (1, [], 2, 4), (1, [5], 2, 6)],
)
def test_generation_that_runs_ahead_needs_as_many_steps_more(
    most: int, kept: Sequence[int], staleness: int, steps: int
) -> None:
    graph: Any = SimpleNamespace(follows={str(k): SimpleNamespace(staleness=k) for k in kept})
    assert planner._steps_in_flight(graph, most, WhatIf(staleness=staleness)) == steps


# --- a search


OPEN = replace(TASK, seed=9, evaluations=70)


@pytest.mark.parametrize(
    ("budget", "evaluations", "seconds"),
    [(None, 70, None), (SearchBudget(evaluations=3), 3, None), (SearchBudget(seconds=5), 70, 5.0)],
)
def test_a_search_has_the_budget_of_the_experiment_where_no_other_is_given(
    budget: SearchBudget | None, evaluations: int, seconds: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    checked: list[Any] = []
    best = SimpleNamespace(plan=SimpleNamespace(staleness=0))
    monkeypatch.setattr(planner, "time", SimpleNamespace(perf_counter=lambda: 4.0))
    monkeypatch.setattr(planner, "search_plan", lambda *words: asked.append(words) or "result")
    monkeypatch.setattr(planner, "_least_stale", lambda results: best if results == ["result"] else None)
    monkeypatch.setattr(planner, "check_plan", lambda *words: checked.append(words))
    assert search_for(OPEN, budget) is best
    share = SearchBudget(evaluations=evaluations, seconds=seconds)
    assert asked == [(OPEN.varied(), share, unwatched)]
    assert checked == [(best.plan, OPEN.graph, OPEN.batch_size)], "what was found is checked once"


def failing(
    monkeypatch: pytest.MonkeyPatch, errors: Sequence[UserError], smallest: float | None
) -> tuple[str, list[tuple[str, str]]]:
    """The refusal where the searches end with these errors, and a plan of so many bytes is the smallest."""
    said: list[tuple[str, str]] = []
    left = iter(errors)

    def search(*_: Any) -> Any:
        raise next(left)

    task = replace(TASK, more_stale=(replace(TASK, staleness=1),) * (len(errors) - 1))
    monkeypatch.setattr(planner, "search_plan", search)
    monkeypatch.setattr(planner, "smallest_peak_bytes", lambda of: smallest if of is task else 0)
    monkeypatch.setattr(planner, "find_remedies", lambda of: "remedies" if of is task else "")
    with pytest.raises(UserError) as error:
        search_for(task, None, lambda *words: said.append(words))
    return str(error.value), said


def test_where_nothing_fits_the_smallest_changes_that_help_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = TASK.cluster.device_memory_bytes
    fits_not = NothingFitsError(9.0 * limit, TASK.cluster, ())
    known = f"{fits_not.knowing(2.0 * limit)}; remedies"
    said = [("what would be enough", "")]
    assert failing(monkeypatch, [fits_not, UserError("other")], 2.0 * limit) == (known, said)
    assert failing(monkeypatch, [UserError("first"), fits_not], limit + 1.0) == ("first; remedies", said)


@pytest.mark.parametrize("smallest", [None, 1.0, float(TASK.cluster.device_memory_bytes)])
def test_where_memory_is_not_what_was_wrong_the_first_error_is_told(
    smallest: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert failing(monkeypatch, [UserError("first"), UserError("second")], smallest) == ("first", [])


def test_one_staleness_that_has_a_plan_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    stale = replace(TASK, staleness=1)

    def search(task: PlanningTask, *_: Any) -> Any:
        if task.staleness == 0:
            raise UserError("none")
        return task

    best = SimpleNamespace(plan=SimpleNamespace(staleness=1))
    monkeypatch.setattr(planner, "search_plan", search)
    monkeypatch.setattr(planner, "_least_stale", lambda results: best if results == [stale] else None)
    monkeypatch.setattr(planner, "check_plan", lambda *words: None)
    assert search_for(replace(TASK, more_stale=(stale,))) is best


@pytest.mark.parametrize(
    ("evaluations", "seconds", "left", "expected"),
    [
        (10, None, 3, (3, None)),
        (2, None, 1, (1, None)),
        (None, 9.0, 2, (None, 3.0)),  # 6 s are left
        (None, 3.005, 1, (None, 0.01)),
        (None, None, 2, (None, None)),
    ],
)
def test_the_share_of_the_next_search(
    evaluations: int | None, seconds: float | None, left: int, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "time", SimpleNamespace(perf_counter=lambda: 8.0))
    share = planner._share(SearchBudget(evaluations=evaluations, seconds=seconds), 5.0, 3, left)
    assert (share.evaluations, share.seconds) == pytest.approx(expected)


# --- room for keys and values


@pytest.mark.parametrize(
    ("pp", "room", "least"), [(1, 32, None), (1, 31, 32), (2, 64, None), (2, 63, 64), (1, None, 0)]
)
@pytest.mark.parametrize("by_plan", [False, True])
def test_the_cache_has_room_for_one_sequence(pp: int, room: int | None, least: int | None, by_plan: bool) -> None:
    """Of 17 tokens, in pages of 16, in each part of the batch."""
    lengths = Workload(prompt_tokens=8, new_tokens=9, kv_cache_tokens=None if by_plan else room)
    task = replace(TASK, workload=Workload(prompt_tokens=8, calls={"actor_generate": lengths}))
    compute = CallCompute(kv_cache_tokens=room if by_plan else None)
    plan = structs.replace(PLAN, calls={"actor_generate": CallPlan(devices=(0, pp), pp=pp, compute=compute)})
    if not least:
        planner.check_cache_room(plan, task)
        return
    with pytest.raises(UserError) as error:
        planner.check_cache_room(plan, task)
    assert str(error.value) == (
        f"actor_generate: kv_cache_tokens={room} is not room for one sequence of 17 tokens, in pages of 16, in each of "
        f"pp={pp} parts of the batch; set it to at least {least}, or leave it out"
    )
