"""What the tables of a planning problem are made from, and what is known of every call before they are."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from realhf.architecture.model import DType
from realhf.dataflow.graph import DataflowGraph, ModelFunctionCallDef
from realhf.dataflow.plan import ExecutionPlan
from realhf.geometry.layout import Layout, ParallelStrategy
from realhf.planning.cluster import Cluster
from realhf.planning.model.timings import Costs
from realhf.planning.options import Option
from realhf.planning.workload import Workload

K = TypeVar("K")
Numbered = tuple[list[Layout], list[int]]  # distinct layouts, and for every option the number of its own


def homes(graph: DataflowGraph) -> dict[str, str]:
    """For every call, the call in whose layout its model's parameters live (`ExecutionPlan.home`)."""
    empty = ExecutionPlan(num_devices=1, calls={})
    return {name: empty.home(graph, call.model_name) for name, call in graph.calls.items()}


@dataclass(frozen=True, kw_only=True)
class ProblemInputs:
    """The arguments of `realhf.planning.problem.builder.build_problem`.

    `homes` has for every call the name of its model's home; `number` those of the graph's own nodes, which come first;
    `layouts` of a call are the distinct ones among its options.
    """

    graph: DataflowGraph
    options: Mapping[str, Sequence[Option]]
    batch_size: int
    workload: Workload
    cluster: Cluster
    costs: Costs
    dtype: DType
    offload: frozenset[str]
    groups: bool

    @cached_property
    def homes(self) -> dict[str, str]:
        return homes(self.graph)

    @cached_property
    def number(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.graph.nodes)}

    @cached_property
    def layouts(self) -> dict[str, Numbered]:
        return {name: _layouts(self.options[name]) for name in self.graph.calls}

    def home_call(self, model: str) -> ModelFunctionCallDef:
        """The call in whose layout a model's parameters live."""
        return self.graph.calls[self.homes[self.graph.calls_of(model)[0].name]]

    def at_home(
        self, bytes_of: Callable[..., int], call: ModelFunctionCallDef, strategy: ParallelStrategy, *, trained: bool
    ) -> int:
        """`static_bytes` or `offloaded_bytes` of the home of the call's model."""
        model = call.model_name
        features, versions = self.costs.features_of(model), self.graph.versions_kept(model)
        return bytes_of(call.config, strategy, self.dtype, trained=trained, features=features, versions=versions)


def _layouts(options: Sequence[Option]) -> Numbered:
    """Options of one layout usually follow one another, and share it: few have to be compared."""
    numbers: dict[Layout, int] = {}
    places: list[int] = []
    last: Layout | None = None
    for option in options:
        if option.layout is not last:
            last = option.layout
            number = numbers.setdefault(last, len(numbers))
        places.append(number)
    return list(numbers), places


def distinct(numbered: Numbered, key: Callable[[Layout], K]) -> tuple[list[K], list[int]]:
    """The distinct keys of the layouts, and for every option the number of its own."""
    layouts, places = numbered
    numbers: dict[K, int] = {}
    of_layout = [numbers.setdefault(key(layout), len(numbers)) for layout in layouts]
    return list(numbers), [of_layout[place] for place in places]
