"""A planning task: a graph, its samples, the cluster and its costs. All of planning is functions of it."""

import copy
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from realhf.architecture.model import DType
from realhf.dataflow.graph import DataflowGraph, ModelFunctionCallDef
from realhf.dataflow.plan import CallPlan, ExecutionPlan
from realhf.geometry.layout import DeviceMesh
from realhf.planning.model.call import CallModel, features_during
from realhf.planning.model.cluster import Cluster
from realhf.planning.model.mode_choice import sharded_text
from realhf.planning.model.timings import Costs
from realhf.planning.model.workload import Workload
from realhf.planning.request import ChangesChoice, MoveChoice

# Which ways to run a call in one (dp, tp, pp) are searched: as the experiment has it set up; also how it computes; also
# chunks of pipelines, optimizer states in host memory, modes of operators, and smaller KV caches.
Breadth = Literal["plain", "computation", "all"]
# Above so many devices there are ten thousands of layouts: not all of that is searched on every mesh.
MOST_DEVICES_FOR_ALL = 64


@dataclass(frozen=True, kw_only=True)
class PlanningTask:
    """The models of `offload` wait in host memory; with `may_offload` a search may choose others.

    `open_choices`: by model what a plan may choose of its computation (`realhf.api.computation`). `mixed`: the models
    whose operators may have modes of their own. `breadth`: of the ways to run a call those that are searched (None: as
    many as clusters of this size allow). `near`: the only meshes that are searched (none: all that there are).
    `staleness`: that of its plans, for which copies of trained models generate (`realhf.api.resolved`). `more_stale`:
    the same task with more of it: a search may choose one of them. `seed` and `evaluations`: the experiment's, for a
    search whose budget names no number of plans (None: one that grows with the problem). `moved_by`: how
    parameters move (auto: as is faster). `send_changes`: whether only what changed of them does. `like`: a task of the
    same calls; what either computes of them, both know.
    """

    graph: DataflowGraph
    batch_size: int
    workload: Workload
    cluster: Cluster
    costs: Costs
    max_steps_in_flight: int
    dtype: DType
    offload: tuple[str, ...] = ()
    may_offload: bool = False
    open_choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    mixed: frozenset[str] = frozenset()
    breadth: Breadth | None = None
    near: tuple[DeviceMesh, ...] = ()
    staleness: int = 0
    more_stale: "tuple[PlanningTask, ...]" = ()
    seed: int = 0
    evaluations: int | None = None
    moved_by: MoveChoice = "auto"
    send_changes: ChangesChoice = "auto"
    like: InitVar["PlanningTask | None"] = None
    _like: "PlanningTask | None" = field(init=False, repr=False, compare=False)

    def __post_init__(self, like: "PlanningTask | None") -> None:
        object.__setattr__(self, "_like", like and (like._like or like))

    def varied(
        self,
        *,
        offload: tuple[str, ...] | None = None,
        max_steps_in_flight: int | None = None,
        breadth: Breadth | None = None,
        near: tuple[DeviceMesh, ...] | None = None,
    ) -> "PlanningTask":
        """The task with these in place of its own, and without `more_stale`. Its calls cost the same: what either has
        computed of them, both know."""
        return replace(
            self,
            offload=self.offload if offload is None else offload,
            max_steps_in_flight=max_steps_in_flight or self.max_steps_in_flight,
            breadth=breadth or self.breadth,
            near=self.near if near is None else near,
            more_stale=(),
            like=self,
        )

    def of(self, plan: ExecutionPlan) -> "PlanningTask":
        """The task, of this and `more_stale`, that a plan is for; without the others."""
        return next(task for task in (self, *self.more_stale) if task.staleness == plan.staleness).varied()

    @property
    def searched(self) -> Breadth:
        """The breadth of a search."""
        widest: Breadth = "all" if self.cluster.num_devices <= MOST_DEVICES_FOR_ALL else "computation"
        return self.breadth or widest

    @cached_property
    def homes(self) -> dict[str, str]:
        """For every call, the call in whose layout its model's parameters live (`ExecutionPlan.home`)."""
        empty = ExecutionPlan(num_devices=1, calls={})
        return {name: empty.home(self.graph, call.model_name) for name, call in self.graph.model_calls.items()}

    @cached_property
    def known(self) -> dict[Any, Any]:
        """What has been computed of options, for who computes it (`realhf.planning.problem.option_rows`,
        `realhf.planning.dominance`)."""
        return self._like.known if self._like else {}

    @property
    def tokens_per_step(self) -> float:
        """Tokens of the rollouts of a step, prompts and responses (of the sequences, where nothing is generated)."""
        return self.batch_size * self.workload.tokens

    @cached_property
    def call_models(self) -> dict[str, CallModel]:
        """By the name of a call what knows its seconds and bytes. Raises UserError for mini-batches of unequal size."""
        if self._like:
            return self._like.call_models
        return {name: self._call_model(call) for name, call in self.graph.model_calls.items()}

    def _call_model(self, call: ModelFunctionCallDef) -> CallModel:
        lengths = self.workload.of(call.name)
        features = features_during(call, lengths, self.costs.features_of(call.model_name))
        crowding = self.cluster.hardware.crowding(self.cluster.num_devices)
        return CallModel(
            call=call,
            samples=call.mini_batch_size(self.batch_size),
            lengths=lengths,
            dtype=self.dtype,
            features=features,
            timings=self.costs.timings[call.config].under(features),
            cluster=self.cluster,
            hardware=self.costs.hardware,
            versions=self.graph.versions_kept(call.model_name),
            factor=crowding * self.costs.call_factors.get(call.name, 1.0),
            shares_devices=len(self.graph.model_calls) > 1,
            seen=self.costs.seen.get(call.config, ()),
            error=self.costs.call_error(call.config),
        )

    def modes(self, plan: ExecutionPlan) -> dict[str, str]:
        """By name the calls of a plan in whose homes operators have modes of their own, and these in words."""
        rules = {name: call.compute.data_parallel for name, call in plan.calls.items()}
        return {
            name: sharded_text(each, self.graph.model_calls[name].config, plan.calls[name].strategy)
            for name, each in rules.items()
            if isinstance(each, tuple)
        }

    def plan(self, calls: Mapping[str, CallPlan], **notes: str | float) -> ExecutionPlan:
        """A plan of these calls, without an order."""
        return ExecutionPlan(
            num_devices=self.cluster.num_devices,
            devices_per_node=self.cluster.devices_per_node,
            calls={name: calls[name] for name in self.graph.model_calls},
            max_steps_in_flight=self.max_steps_in_flight,
            offload=self.offload,
            staleness=self.staleness,
            models=self.graph.models,
            notes={"hardware": self.cluster.hardware.name, **notes},
        )


def with_staleness(graph: DataflowGraph, staleness: int) -> DataflowGraph:
    """The graph in which generation of step t uses the weights after step t - 1 - `staleness` (0: on-policy training);
    other readers of trained weights stay as they are."""
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
