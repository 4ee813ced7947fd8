"""A planning task: the arguments that everything about one graph on one cluster shares."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from realhf.architecture.model import DType
from realhf.base.errors import UserError
from realhf.dataflow.graph import GENERATE, DataflowGraph
from realhf.dataflow.plan import CallPlan, ExecutionPlan
from realhf.planning.cluster import Cluster
from realhf.planning.model.cost import CallCost
from realhf.planning.model.sharding import Sharding
from realhf.planning.model.timings import Costs
from realhf.planning.options import Option
from realhf.planning.order import possible_orders, steps_to_simulate
from realhf.planning.predict import Prediction, predict
from realhf.planning.problem.builder import build_problem
from realhf.planning.problem.inputs import homes
from realhf.planning.problem.native import native_problem, reallocation_table
from realhf.planning.problem.tables import Problem
from realhf.planning.workload import Workload


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

    @property
    def tokens_per_step(self) -> float:
        """Tokens of the rollouts of a step, prompts and responses (of the sequences, where nothing is generated)."""
        return self.batch_size * self.workload.tokens

    def cost_of(self, call: str) -> CallCost:
        return CallCost(
            call=self.graph.calls[call],
            batch_size=self.batch_size,
            workload=self.workload,
            cluster=self.cluster,
            costs=self.costs,
            dtype=self.dtype,
            shares_devices=len(self.graph.calls) > 1,
        )

    def shardings(self, plan: ExecutionPlan) -> dict[str, Sharding]:
        """By name the trainings of a plan that are predicted with operators sharded over dp."""
        home_of, found = homes(self.graph), {}
        for name, call in plan.calls.items():
            sharding = self.cost_of(name).sharding(call.layout.strategy, call.micro_batches)
            if sharding is not None and home_of[name] == name:
                found[name] = sharding
        return found

    def problem(self, options: Mapping[str, Sequence[Option]], offload: Sequence[str] | None = None) -> Problem:
        """The tables of these options; with a plan's `offload` in the place of the task's, where it is given."""
        return build_problem(
            self.graph,
            options,
            batch_size=self.batch_size,
            workload=self.workload,
            cluster=self.cluster,
            costs=self.costs,
            max_steps_in_flight=self.max_steps_in_flight,
            dtype=self.dtype,
            reallocations=reallocation_table,
            offload=self.offload if offload is None else offload,
        )

    def predict(self, plan: ExecutionPlan) -> Prediction:
        """As `realhf.planning.predict.predict`."""
        return predict(
            plan,
            self.graph,
            batch_size=self.batch_size,
            workload=self.workload,
            cluster=self.cluster,
            costs=self.costs,
            dtype=self.dtype,
        )

    def plan(self, calls: Mapping[str, CallPlan], preset: str) -> ExecutionPlan:
        """A plan without an order."""
        return ExecutionPlan(
            num_devices=self.cluster.num_devices,
            devices_per_node=self.cluster.devices_per_node,
            calls={name: calls[name] for name in self.graph.calls},
            max_steps_in_flight=self.max_steps_in_flight,
            models=self.graph.models,
            notes={"preset": preset, "hardware": self.cluster.hardware.name},
        )

    def predict_in_best_order(self, plan: ExecutionPlan) -> Prediction:
        """The prediction of the plan in the fastest of the orders that a simulation suggests."""
        options = {name: [Option(call.layout, call.micro_batches)] for name, call in plan.calls.items()}
        native = native_problem(self.problem(options, plan.offload))
        names = self.graph.nodes
        trace = native.trace([0] * len(options), steps_to_simulate(self.max_steps_in_flight))
        starts = [(names[node], step, start) for node, step, start, _ in trace if node < len(names)]
        orders = possible_orders(starts, plan, self.graph, self.batch_size)
        predictions = [self.predict(msgspec.structs.replace(plan, order=order)) for order in orders]
        return min(predictions, key=lambda prediction: prediction.step_s)


def with_staleness(graph: DataflowGraph, staleness: int) -> DataflowGraph:
    """The graph in which generation of step t uses the weights after step t - 1 - `staleness`.

    0 is on-policy training. The other readers of trained weights, a critic's inference, stay as
    they are. For planning: that a run keeps the older weights for generation is not checked here.

    Raises:
        UserError: `staleness` is negative.
    """
    if staleness < 0:
        raise UserError(f"--staleness {staleness} must be at least 0")
    if staleness == 0:
        return graph
    stale = copy.copy(graph)
    stale.edges = [
        replace(edge, steps_back=edge.steps_back + staleness)
        if edge.kind == "version"
        and edge.steps_back
        and edge.child in graph.calls
        and graph.calls[edge.child].interface_type is GENERATE
        else edge
        for edge in graph.edges
    ]
    return stale
