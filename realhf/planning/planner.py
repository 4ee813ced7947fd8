"""From an experiment and a cluster to a plan: searched, or read and predicted."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from realhf.api.experiment import AutoSettings, auto_settings, follows_of, models_of
from realhf.api.generation import DECODE_GRAPHS
from realhf.architecture.model import DType
from realhf.base.errors import UserError
from realhf.dataflow.graph import GENERATE, DataflowGraph, ModelFunctionCallDef
from realhf.dataflow.offload import check_offload
from realhf.dataflow.plan import ExecutionPlan, check_plan, load_plan
from realhf.planning.cluster import Cluster
from realhf.planning.clusters import cluster_of
from realhf.planning.explain.explanation import explain
from realhf.planning.explain.remedies import find_remedies, smallest_peak_bytes
from realhf.planning.model.timings import Costs, load_costs
from realhf.planning.options import all_options
from realhf.planning.predict import Prediction, predict, predict_in_best_order
from realhf.planning.problem.builder import build_problem
from realhf.planning.problem.tables import Problem
from realhf.planning.request import PlanRequest, SearchBudget
from realhf.planning.search import SearchResult, search_plan
from realhf.planning.task import PlanningTask, with_staleness
from realhf.planning.watching import Watch, unwatched
from realhf.planning.what_if import WhatIf, keys_without_producer
from realhf.planning.workload import Workload


class Planner:
    """Everything that planning an experiment on a cluster needs, put together once.

    Raises:
        UserError: the experiment or the cluster is not valid, or a profile cannot be read.
    """

    def __init__(
        self,
        experiment: Any,
        cluster: Cluster,
        profiles: Path | None = None,
        what_if: WhatIf | None = None,
        offload: tuple[str, ...] = (),
        call_factors: Mapping[str, float] | None = None,
        saves: bool = False,
    ):
        """`saves`: checkpoints are written on the way, and not at the end alone."""
        self.experiment, self.cluster = experiment, cluster
        self.what_if = (what_if or WhatIf()).with_defaults()
        settings: AutoSettings = auto_settings(experiment)
        stale, follows = self.what_if.staleness, follows_of(experiment)
        kept = max((follow.staleness for follow in follows.values()), default=0)
        self.settings = replace(
            settings,
            batch_size=self.what_if.batch_size or settings.batch_size,
            # Generation that runs ahead of training needs that many more steps open.
            max_steps_in_flight=max(settings.max_steps_in_flight, kept + 1, stale + 2 if stale else 1),
        )
        calls = self.what_if.apply(experiment.rpcs)
        keys = keys_without_producer(calls) if self.what_if.needs_no_data else experiment.dataset.keys
        graph = DataflowGraph(calls, keys, follows)
        self.graph = with_staleness(graph, self.what_if.staleness)
        check_offload(offload, self.graph)
        self.offload = offload
        self.dtype: DType = self.what_if.dtype or _common_dtype(experiment)
        self.workload = workload_of(self.graph, self._lengths(), self.what_if.new_tokens)
        costs = load_costs(
            self.graph.models,
            dtype=self.dtype,
            hardware=cluster.hardware,
            root=profiles,
            features=replace(self.what_if.engine(), copies_checkpoints=saves),
            of_models={
                name: replace(self.what_if.engine(setup), copies_checkpoints=saves)
                for name, setup in models_of(experiment).items()
            },
        )
        self.costs: Costs = replace(costs, call_factors=call_factors or {})

    @property
    def task(self) -> PlanningTask:
        return PlanningTask(
            graph=self.graph,
            batch_size=self.settings.batch_size,
            workload=self.workload,
            cluster=self.cluster,
            costs=self.costs,
            max_steps_in_flight=self.settings.max_steps_in_flight,
            dtype=self.dtype,
            offload=self.offload,
        )

    def search(self, budget: SearchBudget | None = None, watch: Watch = unwatched) -> SearchResult:
        """The cheapest plan found; a budget without a number of plans has that of `@auto`.

        Raises:
            UserError: no plan is legal, or none fits; the text names the smallest changes that would help.
        """
        budget = budget or SearchBudget()
        evaluations = self.settings.search_evaluations if budget.evaluations is None else budget.evaluations
        try:
            own = replace(budget, evaluations=evaluations)
            return search_plan(self.task, own, self.experiment.seed, watch)
        except UserError as error:
            smallest = smallest_peak_bytes(self.task)
            if smallest is None or smallest <= self.cluster.device_memory_bytes:
                raise  # memory is not what was wrong
            watch("what would be enough", "")
            raise UserError(f"{error}; {find_remedies(self.task)}") from None

    def problem(self) -> Problem:
        """The tables of all legal options: what `search` solves."""
        return build_problem(self.task, all_options(self.task))

    def predict(self, plan: ExecutionPlan) -> Prediction:
        """What a given plan would take; the plan that comes back has the predictions filled in."""
        return predict(self.task, plan)

    def predict_in_best_order(self, plan: ExecutionPlan) -> Prediction:
        """The prediction of a plan's calls in the fastest order for this experiment, whatever its own order."""
        in_flight = self.settings.max_steps_in_flight
        unordered = msgspec.structs.replace(plan, order=(), max_steps_in_flight=in_flight, predicted_step_s=None)
        return predict_in_best_order(self.task, unordered)

    def _lengths(self) -> dict[str, tuple[float, int]]:
        """Mean and largest number of tokens of every key of the data set."""
        if not self.what_if.needs_no_data:
            lengths: dict[str, tuple[float, int]] = self.experiment.dataset.lengths()
            return lengths
        tokens = self.what_if.prompt_tokens
        assert tokens is not None, "with_defaults gives them"
        return {key: (float(tokens), tokens) for key in self.graph.dataset_keys}


def plan_for(experiment: Any, request: PlanRequest, watch: Watch = unwatched) -> tuple[ExecutionPlan, Cluster]:
    """The plan that is asked for, given or the best one found, with predictions and reasons; and its cluster.

    Raises:
        UserError: the devices, the given plan or the experiment are not valid, or no plan fits.
    """
    given, result = load_plan(request.plan) if request.plan else None, None
    cluster = cluster_of(request.devices, given.num_devices if given else None)
    if given:
        # Before anything is predicted: the errors of a plan for something else are the clearer ones.
        settings = auto_settings(experiment)
        graph = DataflowGraph(experiment.rpcs, experiment.dataset.keys, follows_of(experiment))
        check_plan(given, graph, settings.batch_size)
    planner = Planner(
        experiment, cluster, offload=request.offload, call_factors=request.call_factors, saves=request.saves
    )
    if given:
        prediction = planner.predict(given)
    else:
        result = planner.search(request.budget, watch)
        prediction = planner.predict(result.plan)
    check_cache_room(prediction.plan, planner)
    rationale = explain(planner.task, prediction, result)
    return msgspec.structs.replace(prediction.plan, rationale=rationale), cluster


def check_cache_room(plan: ExecutionPlan, planner: Planner) -> None:
    """Raises UserError where a generate call was given less room for keys and values than one sequence needs."""
    for name, call in plan.calls.items():
        lengths, model = planner.workload.of(name), planner.graph.calls[name]
        page = planner.costs.features_of(model.model_name).page_tokens(model.config, planner.dtype)
        least = call.pp * math.ceil(lengths.max_tokens / page) * page
        if lengths.kv_cache_tokens is not None and lengths.kv_cache_tokens < least:
            raise UserError(
                f"{name}: kv_cache_tokens={lengths.kv_cache_tokens} is not room for one sequence of "
                f"{lengths.max_tokens} tokens, in pages of {page}, in each of pp={call.pp} parts of the batch; set it "
                f"to at least {least}, or leave it out"
            )


def workload_of(graph: DataflowGraph, lengths: dict[str, tuple[float, int]], new_tokens: int | None = None) -> Workload:
    """How many tokens each call reads and writes, from the data set's lengths and the limits of generation.

    `new_tokens` takes the place of those limits.
    """
    generate = [call for call in graph.calls.values() if call.interface_type is GENERATE]
    rollout = _generation(generate[0], lengths, new_tokens) if generate else None
    calls = {}
    for call in graph.calls.values():
        if call.interface_type is GENERATE:
            calls[call.name] = _generation(call, lengths, new_tokens)
        elif call.interface_impl.sequence_keys or rollout is None:
            calls[call.name] = _reading(call, lengths, rollout)
    base = rollout or next(iter(calls.values()))
    return Workload(
        prompt_tokens=base.prompt_tokens,
        new_tokens=base.new_tokens,
        max_prompt_tokens=base.max_prompt_tokens,
        max_new_tokens=base.max_new_tokens,
        calls=calls,
    )


def _generation(call: ModelFunctionCallDef, lengths: dict[str, tuple[float, int]], new_tokens: int | None) -> Workload:
    mean, longest = lengths[call.input_data[0]]
    new_tokens = new_tokens or getattr(call.interface_impl, "max_new_tokens", None)
    if not isinstance(new_tokens, int):
        raise UserError(
            f"{call.name}: {type(call.interface_impl).__name__} has no max_new_tokens, so that the planner does not "
            "know how long it generates; add a field or property of that name"
        )
    return Workload(
        prompt_tokens=mean,
        new_tokens=new_tokens,
        max_prompt_tokens=longest,
        max_new_tokens=new_tokens,
        kv_cache_tokens=getattr(call.interface_impl, "kv_cache_tokens", None),
        decode_graphs=getattr(call.interface_impl, "decode_graphs", DECODE_GRAPHS),
    )


def _reading(call: ModelFunctionCallDef, lengths: dict[str, tuple[float, int]], rollout: Workload | None) -> Workload:
    """The sum over the sequences that the call reads for one sample; what was generated counts as a rollout."""
    generated = (rollout.tokens, rollout.max_tokens) if rollout else (0.0, 0)
    keys = call.interface_impl.sequence_keys or call.input_data[:1]
    sizes = [lengths.get(key, generated) for key in keys]
    return Workload(
        prompt_tokens=sum(mean for mean, _ in sizes), max_prompt_tokens=sum(longest for _, longest in sizes)
    )


def _common_dtype(experiment: Any) -> DType:
    dtypes = {setup.dtype for setup in models_of(experiment).values()}
    if len(dtypes) > 1:
        raise UserError(f"the models have several dtypes ({', '.join(sorted(dtypes))}); give all of them one")
    return dtypes.pop()
