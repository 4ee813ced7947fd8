"""From an experiment and a request to a plan: searched, or given and predicted."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from realhf.api.experiment import auto_settings, follows_of, models_of, pools_of
from realhf.architecture.model import DType
from realhf.base.errors import UserError
from realhf.dataflow.graph import DataflowGraph
from realhf.dataflow.offload import check_offload
from realhf.dataflow.plan import ExecutionPlan
from realhf.dataflow.pools import check_devices
from realhf.planning.clusters import cluster_of, clusters_of
from realhf.planning.explain.comparison import describe, explain
from realhf.planning.explain.remedies import find_remedies, smallest_peak_bytes
from realhf.planning.model.cluster import Cluster
from realhf.planning.model.timings import load_costs
from realhf.planning.model.workload import workload_of
from realhf.planning.request import PlanRequest, SearchBudget, Watch, unwatched
from realhf.planning.search import SearchResult, search_plan
from realhf.planning.task import PlanningTask, with_staleness
from realhf.planning.what_if import WhatIf, WhatIfRequest, keys_without_producer


def plan_for(experiment: Any, request: PlanRequest, watch: Watch = unwatched) -> tuple[ExecutionPlan, Cluster]:
    """The plan that is asked for, given or the best one found, with predictions and reasons; and its cluster.

    Raises:
        UserError: the devices, the given plan or the experiment are not valid, or no plan fits.
    """
    cluster = cluster_of(request.devices, request.given.num_devices if request.given else None)
    task = task_of(experiment, cluster, offload=request.offload, call_factors=request.call_factors, saves=request.saves)
    found = describe(task, request.given or search_for(experiment, task, request.budget, watch))
    check_cache_room(found.plan, task)
    return explain(found), cluster


def tasks_of(experiment: Any, request: PlanRequest, asked: WhatIfRequest) -> dict[str, PlanningTask]:
    """The tasks of all clusters, or of all values of staleness, that are asked for, by names.

    Raises:
        UserError: as `task_of`, or there are several of both.
    """
    num_devices = request.given.num_devices if request.given else None
    clusters, cases = clusters_of(request.devices, asked.clusters, num_devices), asked.cases(experiment.rpcs)
    if len(clusters) > 1 and len(cases) > 1:
        raise UserError(
            "several clusters or values of --staleness are compared by themselves: give several of one kind"
        )
    return {
        name if len(cases) == 1 else f"staleness {case.staleness}": task_of(
            experiment, cluster, what_if=case, offload=request.offload
        )
        for name, cluster in clusters.items()
        for case in cases
    }


def task_of(
    experiment: Any,
    cluster: Cluster,
    *,
    what_if: WhatIf | None = None,
    offload: tuple[str, ...] = (),
    call_factors: Mapping[str, float] | None = None,
    saves: bool = False,
    profiles: Path | None = None,
) -> PlanningTask:
    """The planning of an experiment on a cluster, its costs from `profiles` (None: the folder of all of them).

    `offload`, `call_factors` and `saves` are those of `PlanRequest`.

    Raises:
        UserError: the experiment is not valid, a pool has devices beyond the cluster, `offload` names other models, or
            a profile cannot be read.
    """
    what_if = (what_if or WhatIf()).with_defaults()
    settings, stale, follows = auto_settings(experiment), what_if.staleness, follows_of(experiment)
    kept = max((follow.staleness for follow in follows.values()), default=0)
    calls = what_if.apply(experiment.rpcs)
    tokens = what_if.prompt_tokens
    keys = experiment.dataset.keys if tokens is None else keys_without_producer(calls)
    graph = with_staleness(DataflowGraph(calls, keys, follows, pools_of(experiment)), stale)
    check_offload(offload, graph)
    check_devices(graph.pools.values(), cluster.num_devices)
    batch_size = what_if.batch_size or settings.batch_size
    graph.rows_per_step(batch_size)
    dtype = what_if.dtype or _common_dtype(experiment)
    costs = load_costs(
        graph.models,
        dtype=dtype,
        hardware=cluster.hardware,
        root=profiles,
        features=what_if.engine(saves=saves),
        of_models={name: what_if.engine(setup, saves=saves) for name, setup in models_of(experiment).items()},
    )
    lengths = experiment.dataset.lengths() if tokens is None else dict.fromkeys(keys, (float(tokens), tokens))
    return PlanningTask(
        graph=graph,
        batch_size=batch_size,
        workload=workload_of(graph, lengths, what_if.new_tokens),
        cluster=cluster,
        costs=replace(costs, call_factors=call_factors or {}),
        # Generation that runs ahead of training needs that many more steps open.
        max_steps_in_flight=max(settings.max_steps_in_flight, kept + 1, stale + 2 if stale else 1),
        dtype=dtype,
        offload=offload,
    )


def search_for(
    experiment: Any, task: PlanningTask, budget: SearchBudget | None = None, watch: Watch = unwatched
) -> SearchResult:
    """The cheapest plan found for an experiment's task. A budget without a number of plans has that of `@auto`.

    Raises:
        UserError: no plan is legal, or none fits; the text names the smallest changes that would help.
    """
    budget = budget or SearchBudget()
    if budget.evaluations is None:
        budget = replace(budget, evaluations=auto_settings(experiment).search_evaluations)
    try:
        return search_plan(task, budget, experiment.seed, watch)
    except UserError as error:
        smallest = smallest_peak_bytes(task)
        if smallest is None or smallest <= task.cluster.device_memory_bytes:
            raise  # memory is not what was wrong
        watch("what would be enough", "")
        raise UserError(f"{error}; {find_remedies(task)}") from None


def check_cache_room(plan: ExecutionPlan, task: PlanningTask) -> None:
    """Raises UserError where a generate call was given less room for keys and values than one sequence needs."""
    for name, call in plan.calls.items():
        lengths, model = task.workload.of(name), task.graph.model_calls[name]
        page = task.costs.features_of(model.model_name).page_tokens(model.config, task.dtype)
        least = call.pp * math.ceil(lengths.max_tokens / page) * page
        if lengths.kv_cache_tokens is not None and lengths.kv_cache_tokens < least:
            raise UserError(
                f"{name}: kv_cache_tokens={lengths.kv_cache_tokens} is not room for one sequence of "
                f"{lengths.max_tokens} tokens, in pages of {page}, in each of pp={call.pp} parts of the batch; set it "
                f"to at least {least}, or leave it out"
            )


def _common_dtype(experiment: Any) -> DType:
    dtypes = {setup.dtype for setup in models_of(experiment).values()}
    if len(dtypes) > 1:
        raise UserError(f"the models have several dtypes ({', '.join(sorted(dtypes))}); give all of them one")
    return dtypes.pop()
