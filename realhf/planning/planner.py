"""From an experiment and a request to a plan: searched, or given and predicted."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from realhf.api.backends import NATIVE
from realhf.api.computation import check_given
from realhf.api.experiment import KeyLengths, ModelSetup
from realhf.api.resolved import ResolvedExperiment
from realhf.architecture.decoding import PAGE_TOKENS
from realhf.architecture.model import DType
from realhf.base.errors import UserError
from realhf.cpu.in_order import check_in_order
from realhf.dataflow.graph import DataflowGraph
from realhf.dataflow.offload import check_offload
from realhf.dataflow.plan import ExecutionPlan
from realhf.dataflow.plan_checks import check_plan
from realhf.dataflow.pools import check_devices
from realhf.geometry.reproducible import lacks_gpu_kernels
from realhf.machine.host import threads_given
from realhf.planning.clusters import cluster_of, clusters_of
from realhf.planning.explain.comparison import describe, explain
from realhf.planning.explain.remedies import find_remedies, smallest_peak_bytes
from realhf.planning.model.cluster import Cluster
from realhf.planning.model.hardware import Hardware
from realhf.planning.model.timings import load_costs
from realhf.planning.model.workload import workload_of
from realhf.planning.presets import rule_plan
from realhf.planning.request import SECONDS, PlanRequest, SearchBudget, Watch, unwatched
from realhf.planning.search import NothingFitsError, SearchResult, search_plan
from realhf.planning.task import PlanningTask, with_staleness
from realhf.planning.ways import least_room
from realhf.planning.what_if import NO_STALENESS, WhatIf, WhatIfRequest, keys_without_producer

# Staler rollouts must make a step at least this much faster. Smaller gains are within the search's error, and stale
# weights slow learning.
WORTH_STALENESS = 0.01


def plan_for(
    experiment: ResolvedExperiment, request: PlanRequest, watch: Watch = unwatched
) -> tuple[ExecutionPlan, Cluster]:
    """The plan that is asked for, given or the best one found, with predictions and reasons; and its cluster.

    Raises:
        UserError: the devices, the given plan or the experiment are not valid, or no plan fits.
    """
    devices = replace(request.devices, threads=experiment.threads)
    cluster = cluster_of(devices, request.given.num_devices if request.given else None)
    check_hardware(experiment, cluster.hardware, is_here=request.devices.place == "here")
    task = task_of(experiment, cluster, request)
    found = describe(task, given_plan(experiment, task, request) or search_for(task, request.budget, watch))
    check_cache_room(found.plan, found.task)
    return explain(found), cluster


def tasks_of(experiment: ResolvedExperiment, request: PlanRequest, asked: WhatIfRequest) -> dict[str, PlanningTask]:
    """The tasks of all clusters, or of all values of staleness, that are asked for, by names.

    Raises:
        UserError: as `task_of`, or there are several of both.
    """
    num_devices = request.given.num_devices if request.given else None
    devices = replace(request.devices, threads=experiment.threads)
    clusters, cases = clusters_of(devices, asked.clusters, num_devices), asked.cases(experiment.calls)
    if len(clusters) > 1 and len(cases) > 1:
        raise UserError(
            "several clusters or values of --staleness are compared by themselves: give several of one kind"
        )
    if request.staleness_up_to and asked.stalenesses != NO_STALENESS:
        raise UserError(
            f"--staleness {asked.stalenesses} and --staleness-up-to {request.staleness_up_to}: the one is a what-if, "
            "the other has the search choose; give one of them"
        )
    for cluster in clusters.values():  # cores are counted on this machine alone
        check_hardware(experiment, cluster.hardware, is_here=cluster.hardware.host_cores is not None)
    return {
        name if len(cases) == 1 else f"staleness {case.staleness}": task_of(experiment, cluster, request, case)
        for name, cluster in clusters.items()
        for case in cases
    }


def check_hardware(experiment: ResolvedExperiment, hardware: Hardware, *, is_here: bool) -> None:
    """Raises UserError where workers on this hardware would refuse the experiment. `is_here`: it is this machine."""
    if experiment.reproducible != "layout":
        return
    if not hardware.is_gpu:
        check_in_order(threads_given() or hardware.threads, is_here=is_here)
        return
    for name, model in experiment.graph.models.items():
        if problem := lacks_gpu_kernels(model):
            raise UserError(f"model {name!r} under reproducible='layout' on {hardware.name}: {problem}")


def task_of(
    experiment: ResolvedExperiment, cluster: Cluster, request: PlanRequest, what_if: WhatIf | None = None
) -> PlanningTask:
    """The planning of an experiment on a cluster, whatever devices the request asks for.

    The task has the first staleness that the plan may have; tasks of the others are in its `more_stale`.

    Raises:
        UserError: the experiment is not valid, a pool has devices beyond the cluster, `offload` names other models, or
            a profile cannot be read.
    """
    what_if, measured, offload = (what_if or WhatIf()).with_defaults(), request.measured, request.offload
    settings, tokens = experiment.settings, what_if.prompt_tokens
    experiment = _as_asked(experiment, what_if)
    stale = {staleness: experiment.stale(staleness) for staleness in request.stalenesses}
    setups = stale[max(stale)].setups
    graphs = {staleness: with_staleness(each.graph, what_if.staleness) for staleness, each in stale.items()}
    graph = graphs[max(stale)]  # it has all models, as `setups` has
    check_offload(offload or (), graph)
    check_devices(graph.pools.values(), cluster.num_devices)
    batch_size = what_if.batch_size or settings.batch_size
    graph.rows_per_step(batch_size)
    dtype = what_if.dtype or _common_dtype(setups)
    costs = load_costs(
        graph.models,
        dtype=dtype,
        hardware=cluster.hardware,
        root=measured.profiles,
        ignores_runs=measured.ignores_runs,
        features=what_if.engine(saves=request.saves),
        of_models={name: what_if.engine(setup, saves=request.saves) for name, setup in setups.items()},
    )
    keys = graph.dataset_keys
    lengths = experiment.dataset.lengths() if tokens is None else dict.fromkeys(keys, KeyLengths.constant(tokens))
    task = partial(
        PlanningTask,
        batch_size=batch_size,
        workload=workload_of(graph, lengths, what_if.new_tokens, what_if.responses),
        cluster=cluster,
        costs=replace(costs, call_factors=measured.call_factors, changed_shares=measured.changed_shares),
        dtype=dtype,
        offload=offload or (),
        may_offload=offload is None,
        open_choices={name: what_if.open_choices(setup) for name, setup in setups.items()},
        mixed=frozenset(name for name, setup in setups.items() if setup.backend == NATIVE),
        seed=experiment.seed,
        evaluations=settings.search_evaluations,
        moved_by=request.moved_by,
        send_changes=request.send_changes,
    )
    first, *more_stale = (
        task(
            graph=each,
            staleness=staleness,
            max_steps_in_flight=_steps_in_flight(each, settings.max_steps_in_flight, what_if),
        )
        for staleness, each in graphs.items()
    )
    return replace(first, more_stale=tuple(more_stale))


def _as_asked(experiment: ResolvedExperiment, what_if: WhatIf) -> ResolvedExperiment:
    """The experiment with the architectures of a what-if, and with the keys of a data set that is not read."""
    if what_if.reads_data:
        return experiment
    calls = what_if.apply(experiment.calls)
    keys = experiment.dataset.keys if what_if.prompt_tokens is None else keys_without_producer(calls)
    return replace(experiment, what_if=(calls, keys))


def _steps_in_flight(graph: DataflowGraph, most: int, what_if: WhatIf) -> int:
    """Generation that runs ahead of training needs that many more steps open."""
    kept = max((follow.staleness for follow in graph.follows.values()), default=0)
    return max(most, kept + 1, what_if.staleness + 2 if what_if.staleness else 1)


def given_plan(experiment: ResolvedExperiment, task: PlanningTask, request: PlanRequest) -> ExecutionPlan | None:
    """The plan that a request gives for an experiment's task, checked, or names by its rule; None: it asks for a
    search. Raises UserError if the plan cannot run, or the rule has none that can."""
    if request.rule:
        return rule_plan(request.rule, task).plan
    if request.given:
        check_given(request.given, experiment, task.graph, task.batch_size, task.cluster.num_devices)
    return request.given


def search_for(task: PlanningTask, budget: SearchBudget | None = None, watch: Watch = unwatched) -> SearchResult:
    """The cheapest plan found for a task, checked. A budget without a number of plans has that of the experiment.

    Where the task leaves the staleness of rollouts to the search, each staleness has its share of the budget, and the
    plan has the least one with which a step is as short as with any (`WORTH_STALENESS`).

    Raises:
        UserError: no plan is legal, or none fits; the text names the smallest changes that would help.
    """
    budget = budget or SearchBudget()
    if budget.evaluations is None:
        budget = replace(budget, evaluations=task.evaluations)
    begun, results, errors = time.perf_counter(), list[SearchResult](), list[UserError]()
    tasks = [task.varied(), *task.more_stale]
    for number, each in enumerate(tasks):
        try:
            share = _share(budget, begun, len(tasks), len(tasks) - number)
            results.append(search_plan(each, share, watch))
        except UserError as error:
            errors.append(error)
    if results:
        best = _least_stale(results)
        check_plan(best.plan, task.of(best.plan).graph, task.batch_size)
        return best
    smallest = smallest_peak_bytes(task)
    if smallest is None or smallest <= task.cluster.device_memory_bytes:
        raise errors[0]  # memory is not what was wrong
    watch("what would be enough", "")
    refusal = errors[0].knowing(smallest) if isinstance(errors[0], NothingFitsError) else errors[0]
    raise UserError(f"{refusal}; {find_remedies(task)}")


def _share(budget: SearchBudget, begun: float, searches: int, left: int) -> SearchBudget:
    """The budget of the next of several searches. `left` searches remain; the first began at `begun`."""
    evaluations, seconds = budget.evaluations, budget.seconds
    if seconds is not None:
        seconds = max((seconds - (time.perf_counter() - begun)) / left, SECONDS[0])
    return SearchBudget(evaluations=evaluations and max(evaluations // searches, 1), seconds=seconds)


def _least_stale(results: Sequence[SearchResult]) -> SearchResult:
    """The least stale result that no staler one beats by more than `WORTH_STALENESS`; `fresher` has the steps of less
    staleness. Results are in ascending staleness."""
    shortest_s = min(result.prediction.step_s for result in results)
    best = next(result for result in results if result.prediction.step_s <= shortest_s * (1 + WORTH_STALENESS))
    steps = {result.plan.staleness: result.prediction.step_s for result in results}
    fresher = {staleness: steps.get(staleness) for staleness in range(best.plan.staleness)}
    return replace(best, fresher=fresher, evaluations=sum(result.evaluations for result in results))


def check_cache_room(plan: ExecutionPlan, task: PlanningTask) -> None:
    """Raises UserError where a generate call was given less room for keys and values than one sequence needs."""
    for name, call in plan.calls.items():
        lengths, given = task.workload.of(name), call.compute.kv_cache_tokens
        given, least = lengths.kv_cache_tokens if given is None else given, least_room(lengths, call.pp)
        if given is not None and given < least:
            raise UserError(
                f"{name}: kv_cache_tokens={given} is not room for one sequence of "
                f"{lengths.max_tokens} tokens, in pages of {PAGE_TOKENS}, in each of pp={call.pp} parts of the batch; "
                f"set it to at least {least}, or leave it out"
            )


def _common_dtype(setups: Mapping[str, ModelSetup]) -> DType:
    dtypes = {setup.dtype for setup in setups.values()}
    if len(dtypes) > 1:
        raise UserError(f"the models have several dtypes ({', '.join(sorted(dtypes))}); give all of them one")
    return dtypes.pop()
