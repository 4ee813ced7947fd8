"""A planning task: a graph, its samples, the cluster and its costs. All of planning is functions of it."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from realhf.architecture.model import DType
from realhf.base.errors import UserError
from realhf.dataflow.graph import DataflowGraph, ModelFunctionCallDef
from realhf.dataflow.plan import CallPlan, ExecutionPlan
from realhf.planning.model.call import CallModel, features_during
from realhf.planning.model.cluster import Cluster
from realhf.planning.model.sharding import Sharding
from realhf.planning.model.timings import Costs
from realhf.planning.model.workload import Workload


@dataclass(frozen=True, kw_only=True)
class PlanningTask:
    graph: DataflowGraph
    batch_size: int
    workload: Workload
    cluster: Cluster
    costs: Costs
    max_steps_in_flight: int
    dtype: DType
    offload: tuple[str, ...] = ()

    @cached_property
    def homes(self) -> dict[str, str]:
        """For every call, the call in whose layout its model's parameters live (`ExecutionPlan.home`)."""
        empty = ExecutionPlan(num_devices=1, calls={})
        return {name: empty.home(self.graph, call.model_name) for name, call in self.graph.model_calls.items()}

    @property
    def tokens_per_step(self) -> float:
        """Tokens of the rollouts of a step, prompts and responses (of the sequences, where nothing is generated)."""
        return self.batch_size * self.workload.tokens

    @cached_property
    def call_models(self) -> dict[str, CallModel]:
        """By the name of a call what knows its seconds and bytes. Raises UserError for mini-batches of unequal size."""
        return {name: self._call_model(call) for name, call in self.graph.model_calls.items()}

    def _call_model(self, call: ModelFunctionCallDef) -> CallModel:
        lengths = self.workload.of(call.name)
        features = features_during(call, lengths, self.costs.features_of(call.model_name))
        return CallModel(
            call=call,
            samples=call.mini_batch_size(self.batch_size),
            lengths=lengths,
            dtype=self.dtype,
            features=features,
            timings=self.costs.of(call.config, features),
            cluster=self.cluster,
            hardware=self.costs.hardware,
            versions=self.graph.versions_kept(call.model_name),
            factor=self.costs.call_factors.get(call.name, 1.0),
            shares_devices=len(self.graph.model_calls) > 1,
        )

    def shardings(self, plan: ExecutionPlan) -> dict[str, Sharding]:
        """By name the trainings of a plan that are predicted with operators sharded over dp."""
        homes = {name: call for name, call in plan.calls.items() if self.homes[name] == name}
        found = {n: self.call_models[n].sharding(c.layout.strategy, c.micro_batches) for n, c in homes.items()}
        return {name: sharding for name, sharding in found.items() if sharding is not None}

    def plan(self, calls: Mapping[str, CallPlan], **notes: str | float) -> ExecutionPlan:
        """A plan of these calls, without an order."""
        return ExecutionPlan(
            num_devices=self.cluster.num_devices,
            devices_per_node=self.cluster.devices_per_node,
            calls={name: calls[name] for name in self.graph.model_calls},
            max_steps_in_flight=self.max_steps_in_flight,
            offload=self.offload,
            models=self.graph.models,
            notes={"hardware": self.cluster.hardware.name, **notes},
        )


def with_staleness(graph: DataflowGraph, staleness: int) -> DataflowGraph:
    """The graph in which generation of step t uses the weights after step t - 1 - `staleness` (0: on-policy training);
    other readers of trained weights stay as they are. Raises UserError if `staleness` is negative."""
    if staleness < 0:
        raise UserError(f"--staleness {staleness} must be at least 0")
    if staleness == 0:
        return graph
    stale = copy.copy(graph)
    generating = {name for name, call in graph.model_calls.items() if call.generates}
    stale.edges = [
        replace(edge, steps_back=edge.steps_back + staleness)
        if edge.kind == "version" and edge.steps_back and edge.child in generating
        else edge
        for edge in graph.edges
    ]
    return stale
