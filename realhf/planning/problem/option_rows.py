"""The options of a call as rows of a planning problem: what each takes, and what it needs on its devices."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import product
from typing import TypeVar

from msgspec.structs import replace

from realhf.dataflow.graph import ModelFunctionCallDef
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.planning.model.call import CallModel
from realhf.planning.model.communicators import CommunicatorLabels, of_all_devices
from realhf.planning.model.memory import PlacedModel
from realhf.planning.model.reallocation import contains_home, grouped
from realhf.planning.options import Option
from realhf.planning.problem.tables import OptionRow
from realhf.planning.task import PlanningTask
from realhf.realloc.plan.planner import DEFAULT_BUCKET_BYTES

K = TypeVar("K")
Numbered = tuple[list[Layout], list[int]]  # distinct layouts, and for every option the number of its own


@dataclass(frozen=True)
class Numbering:
    """Of a task and options of its calls. groups: see `build_problem`."""

    task: PlanningTask
    options: Mapping[str, Sequence[Option]]
    groups: bool

    @cached_property
    def layouts(self) -> dict[str, Numbered]:
        return {name: _layouts(self.options[name]) for name in self.task.graph.model_calls}

    def parents(self, node: str) -> list[tuple[str, int]]:
        """What a node of the graph waits for in the graph."""
        return [(edge.parent, edge.steps_back) for edge in self.task.graph.parents(node)]

    def home_call(self, model: str) -> ModelFunctionCallDef:
        """The call in whose layout a model's parameters live."""
        return self.task.graph.model_calls[self.task.homes[self.task.graph.calls_of(model)[0].name]]


def _layouts(options: Sequence[Option]) -> Numbered:
    """Options of one layout usually follow one another, and share it: few have to be compared."""
    numbers: dict[Layout, int] = {}
    of_options: list[int] = []
    last: Layout | None = None
    for option in options:
        if option.layout is not last:
            last = option.layout
            number = numbers.setdefault(last, len(numbers))
        of_options.append(number)
    return list(numbers), of_options


def distinct(numbered: Numbered, key: Callable[[Layout], K]) -> tuple[list[K], list[int]]:
    """The distinct keys of the layouts, and for every option the number of its own."""
    layouts, of_options = numbered
    numbers: dict[K, int] = {}
    of_layout = [numbers.setdefault(key(layout), len(numbers)) for layout in layouts]
    return list(numbers), [of_layout[number] for number in of_options]


class OptionRows:
    """Seconds and bytes of the options of every call."""

    def __init__(self, numbers: Numbering):
        self._numbers, self._task = numbers, numbers.task
        common = of_all_devices(self._task.cluster.num_devices, moves=bool(self._task.graph.follows))
        self._labels = CommunicatorLabels(common)

    def rows(self, call: ModelFunctionCallDef) -> list[OptionRow]:
        """Where the mesh lies changes nothing: what is known of a strategy holds for all meshes of its size."""
        model = self._task.call_models[call.name]
        loaded_bytes = self._loaded_bytes(model) if call.model_name in self._task.offload else None
        row_of = cache(partial(self._row, model, loaded_bytes))
        layouts, numbers = self._numbers.layouts[call.name]
        places = [((lay.mesh.first, lay.mesh.size), self._communicators(model, lay)) for lay in layouts]
        rows = []
        for option, number in zip(self._numbers.options[call.name], numbers, strict=True):
            devices, communicators = places[number]
            rows.append(replace(row_of(*option.shape), devices=devices, communicators=communicators))
        return rows

    def spared(self, call: ModelFunctionCallDef) -> Iterator[tuple[str, str, float]]:
        """See `CallTable.spared`: the home's parameters, and the two buckets that fill the copy.

        None where the home is loaded for each call, or keeps shards of its own choice, which has another label.
        """
        numbers, task, home = self._numbers, self._task, self._numbers.home_call(call.model_name)
        if home is call or call.trains or call.model_name in task.offload:
            return
        model = task.call_models[call.name]
        homes, copies = (
            {layout.strategy: None for layout in numbers.layouts[name][0]} for name in (home.name, call.name)
        )
        for kept, copied in product(homes, copies):
            if kept.size != copied.size or kept == copied:
                continue
            mesh = DeviceMesh(0, kept.size)  # wherever it lies
            source, target = Layout(mesh, kept), Layout(mesh, copied)
            groups = grouped(source, target, call.config.num_layers, task.cluster) if numbers.groups else None
            if contains_home(call.config, source, groups or target):
                at_home = model.placed(kept)
                spared = at_home.static_bytes(trained=False) + 2 * DEFAULT_BUCKET_BYTES
                yield _home_label(at_home), str(copied), float(spared)

    def _row(
        self, model: CallModel, loaded_bytes: float | None, strategy: ParallelStrategy, micro_batches: int
    ) -> OptionRow:
        """The row of an option, on devices to be filled in.

        loaded_bytes: at home for a call that is not the home, where the model waits in host memory; else None.
        """
        call, is_home, work = model.call, self._is_home(model), model.work(strategy, micro_batches)
        time_s, label, copied = model.seconds(strategy, micro_batches), str(strategy), 0.0
        static = work.kept_cache_bytes()
        dynamic = work.dynamic_bytes() - static
        sharding = model.sharding(strategy, micro_batches) if is_home else None
        if sharding:
            # No call finds whole parameters in such a home: a label of its own makes each take a copy, and the time to
            # gather what it is made of is added here, once a copy.
            time_s += (len(self._task.graph.calls_of(call.model_name)) - 1) * sharding.regather_s
            label, static = f"{strategy} sharded", float(sharding.static_bytes)
            dynamic += sharding.gather_bytes
        elif is_home:
            label, static = _home_label(work.placed), static + model.static_bytes(strategy)
            dynamic += 0 if call.trains else work.gathered_bytes()
        elif call.trains:
            # The optimizer's states stay at home, so that every training of a model has one layout.
            copied = 2.0 * self._task.cluster.device_memory_bytes
        else:
            copied = float(work.placed.copy_bytes())
        if loaded_bytes is not None:
            static, dynamic = 0.0, dynamic + (static + (0.0 if is_home else loaded_bytes))
        return OptionRow(
            devices=(0, strategy.size),
            strategy=label,
            micro_batches=micro_batches,
            time_s=time_s,
            static_bytes=static,
            dynamic_bytes=dynamic,
            copy_bytes=copied,
        )

    def _is_home(self, model: CallModel) -> bool:
        return self._task.homes[model.call.name] == model.call.name

    def _communicators(self, model: CallModel, layout: Layout) -> tuple[int, ...]:
        if model.hardware.communicator_bytes == 0:
            return ()
        return self._labels.of(model.communicators(layout, at_home=self._is_home(model)))

    def _loaded_bytes(self, model: CallModel) -> float:
        """The most that is loaded at home for a call that is not the home, under the homes that fit into memory."""
        home = self._task.call_models[self._task.homes[model.call.name]]
        strategies = {layout.strategy for layout in self._numbers.layouts[home.call.name][0]}
        limit = self._task.cluster.device_memory_bytes
        fitting = [strategy for strategy in strategies if home.static_bytes(strategy) <= limit]
        return float(max(model.static_bytes(strategy) for strategy in fitting or strategies))


def _home_label(home: PlacedModel) -> str:
    return f"{home.strategy} sharded" if home.is_divided else str(home.strategy)
