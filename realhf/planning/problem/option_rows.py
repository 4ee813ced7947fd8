"""The options of a call as rows of a planning problem: what each takes, and what it needs on its devices."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from math import inf
from typing import TypeVar

from msgspec.structs import replace

from realhf.architecture.compute import DataParallel
from realhf.architecture.model import DTYPE_BYTES
from realhf.dataflow.graph import ModelFunctionCallDef
from realhf.dataflow.plan import CallCompute
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.geometry.micro_dp import contains_home
from realhf.geometry.shards import Placement
from realhf.planning.model.call import CallModel
from realhf.planning.model.communicators import CommunicatorLabels, Key, of_all_devices
from realhf.planning.model.memory import PlacedModel
from realhf.planning.model.reallocation import Reallocation, grouped
from realhf.planning.options import Option
from realhf.planning.problem.tables import OptionRow
from realhf.planning.task import PlanningTask
from realhf.realloc.plan.planner import DEFAULT_BUCKET_BYTES

K = TypeVar("K")
Numbered = tuple[list[K], list[int]]  # distinct values, and for every option the number of its value


@dataclass(frozen=True)
class Numbering:
    """Of a task and options of its calls. groups, copies, broadcasts, changes: see `build_problem`."""

    task: PlanningTask
    options: Mapping[str, Sequence[Option]]
    groups: bool
    copies: Mapping[str, str] = field(default_factory=dict)
    broadcasts: Collection[str] = ()
    changes: Collection[str] = ()

    @cached_property
    def kept(self) -> set[str]:
        """The calls whose copy is kept for others, and those that take it over: the home lends it nothing."""
        over = {call for call, of in self.copies.items() if self.options[call][0].layout == self.options[of][0].layout}
        return {*self.copies.values(), *over}

    @cached_property
    def layouts(self) -> dict[str, Numbered[Layout]]:
        return {name: _layouts(self.options[name]) for name in self.task.graph.model_calls}

    def homes(self, model: str) -> Numbered[Placement]:
        """Where a model's parameters lie under each option of the call that is its home."""
        call = self.home_call(model)
        features = self.task.call_models[call.name].features
        set_up: DataParallel = "fsdp" if features.divides_parameters else "zero1"
        numbers: dict[tuple[int, DataParallel], int] = {}
        (layouts, of_options), rows = self.layouts[call.name], list[int]()
        for option, number in zip(self.options[call.name], of_options, strict=True):
            how = option.compute.data_parallel or set_up
            if isinstance(how, tuple):  # a device lacks no more than if all operators were sharded
                how = "fsdp" if any("sharded" in modes for _, modes in how) else "zero1"
            rows.append(numbers.setdefault((number, how), len(numbers)))
        return [Placement(layouts[number], how) for number, how in numbers], rows

    def sources(self, call: str) -> Numbered[Placement]:
        """Where the parameters lie that others take from a call: in its model's home, or in its copy."""
        if self.task.homes[call] == call:
            return self.homes(self.task.graph.model_calls[call].model_name)
        layouts, rows = self.layouts[call]
        return [Placement(layout) for layout in layouts], rows

    def parents(self, node: str) -> list[tuple[str, int]]:
        """The predecessors of a node in the graph."""
        return [(edge.parent, edge.steps_back) for edge in self.task.graph.parents(node)]

    def move(self, target: str, *, forwarding: bool = True) -> Reallocation:
        """The move of the parameters of a call's model. A search counts with the measured share of them that changes,
        where a plan may send it alone (`realhf.planning.carriers`)."""
        task, call = self.task, self.task.graph.model_calls[target]
        links = task.costs.timings[call.config].links
        share = task.costs.changed_shares.get(call.model_name, 1.0)
        if self.groups and forwarding and task.send_changes != "off" and not links.is_gpu:
            links = links.sending(share)
        return Reallocation(call.config, DTYPE_BYTES[task.dtype], task.cluster, links, forwarding)

    def calls_of_move(self, name: str) -> tuple[str, str]:
        """From the home or the copy of one call to another: the parameters of call `name`, or of a model that follows
        another in the node of this name."""
        if node := self.task.graph.follows.get(name):
            return self.home_call(node.source).name, self.home_call(node.target).name
        return self.copies.get(name, self.task.homes[name]), name

    def ends(self, source: str, target: str) -> tuple[Placement, Layout]:
        """Of a move between calls that have one option each."""
        ((placement,), _), ((layout,), _) = self.sources(source), self.layouts[target]
        return placement, layout

    def home_call(self, model: str) -> ModelFunctionCallDef:
        """The call in whose layout a model's parameters live."""
        [home] = {self.task.homes[call.name] for call in self.task.graph.calls_of(model)}
        return self.task.graph.model_calls[home]


def _layouts(options: Sequence[Option]) -> Numbered[Layout]:
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


def distinct(numbered: Numbered[Layout], key: Callable[[Layout], K]) -> Numbered[K]:
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
        is_loaded = call.model_name in self._task.offload
        loaded_bytes = self._loaded_bytes(call) if is_loaded else 0.0
        rows = []
        for option, communicators in zip(self._numbers.options[call.name], self._communicators(call), strict=True):
            row, mesh = row_of(self._task, call, *option.shape, option.compute), option.layout.mesh
            if is_loaded:
                row = replace(row, static_bytes=0.0, dynamic_bytes=row.dynamic_bytes + row.static_bytes + loaded_bytes)
            rows.append(replace(row, devices=(mesh.first, mesh.size), communicators=communicators))
        return rows

    def spared(self, call: ModelFunctionCallDef) -> Iterator[tuple[str, str, float]]:
        """See `CallTable.spared`: the home's parameters, and the two buckets that fill the copy.

        None where the home is loaded for each call, or keeps shards of its own choice, which has another label; none of
        a copy that is kept for other calls.
        """
        numbers, task, home = self._numbers, self._task, self._numbers.home_call(call.model_name)
        if home is call or call.trains or call.model_name in task.offload or call.name in numbers.kept:
            return
        model = task.call_models[call.name]
        homes = dict.fromkeys(
            (option.layout.strategy, option.compute.data_parallel) for option in numbers.options[home.name]
        )
        found: dict[tuple[str, str], float] = {}
        copies: dict[int, dict[ParallelStrategy, None]] = {}  # by their number of devices
        for layout in numbers.layouts[call.name][0]:
            copies.setdefault(layout.mesh.size, {})[layout.strategy] = None
        pairs = ((home, copied) for home in homes for copied in copies.get(home[0].size, ()))
        for (kept, data_parallel), copied in pairs:
            if kept == copied:
                continue
            mesh = DeviceMesh(0, kept.size)  # wherever it lies
            source, target = Layout(mesh, kept), Layout(mesh, copied)
            groups = grouped(source, target, call.config.num_layers, task.cluster) if numbers.groups else None
            if contains_home(call.config.num_layers, source, groups or target):
                at_home = model.under(CallCompute(data_parallel=data_parallel)).placed(kept)
                key = (_home_label(task, home, at_home), str(copied))
                found[key] = min(at_home.static_bytes(trained=False) + 2 * DEFAULT_BUCKET_BYTES, found.get(key, inf))
        yield from ((kept, copied, spared) for (kept, copied), spared in found.items())

    def in_place_bytes(self, call: ModelFunctionCallDef) -> float | None:
        """See `CallTable.in_place_bytes`: one bucket, where a search may have copies filled in place, or the plan does.

        Two in a row are half as large then (`realhf.worker.parameter_moves`).
        """
        options = self._numbers.options[call.name]
        return float(DEFAULT_BUCKET_BYTES) if self._numbers.groups or options[0].compute.in_place else None

    def _communicators(self, call: ModelFunctionCallDef) -> list[tuple[int, ...]]:
        """Of each option."""
        model, is_home = self._task.call_models[call.name], self._task.homes[call.name] == call.name
        options = self._numbers.options[call.name]
        if model.hardware.communicator_bytes == 0:
            return [()] * len(options)

        @cache
        def of(layout: Layout, compute: CallCompute) -> tuple[int, ...]:
            keys = [*model.under(compute).communicators(layout, at_home=is_home), *self._of_broadcasts(call)]
            return self._labels.of(keys)

        return [of(option.layout, option.compute) for option in options]

    def _of_broadcasts(self, call: ModelFunctionCallDef) -> Iterator[Key]:
        """The process groups of the moves from and to a call: as many as the device in most of them has."""
        for name in self._numbers.broadcasts:
            calls = self._numbers.calls_of_move(name)
            if call.name in calls:
                plan = self._numbers.move(calls[1]).by_broadcasts(*self._numbers.ends(*calls))
                of_devices = Counter(device for group in plan.groups for device in group)
                for number in range(max(of_devices.values(), default=0)):
                    yield f"broadcasts of {name}", (), number

    def _loaded_bytes(self, call: ModelFunctionCallDef) -> float:
        """The most that is loaded at home for a call that is not the home, under the homes that fit into memory."""
        if self._task.homes[call.name] == call.name:
            return 0.0
        models = self._task.call_models
        model, home = models[call.name], models[self._task.homes[call.name]]
        forms = {(option.layout.strategy, option.compute) for option in self._numbers.options[home.call.name]}
        limit = self._task.cluster.device_memory_bytes
        fitting = [form for form in forms if home.under(form[1]).static_bytes(form[0]) <= limit]
        # What divides the parameters at home divides them for the call.
        divided = [(s, CallCompute(data_parallel=c.data_parallel, prefetch=c.prefetch)) for s, c in fitting or forms]
        return float(max(model.under(compute).static_bytes(strategy) for strategy, compute in divided))


def row_of(
    task: PlanningTask, call: ModelFunctionCallDef, strategy: ParallelStrategy, micro_batches: int, compute: CallCompute
) -> OptionRow:
    """The row of an option of a call whose model does not wait in host memory, on devices and with communicators to be
    filled in. The task keeps it."""
    key = (call.name, strategy, micro_batches, compute)
    known: dict[object, OptionRow] = task.known
    if key not in known:
        known[key] = _row_of(task, task.call_models[call.name].under(compute), strategy, micro_batches)
    return known[key]


def seconds_of(task: PlanningTask, model: CallModel, strategy: ParallelStrategy, micro_batches: int) -> float:
    """Seconds of a call in an option, with what it gathers where the model's home is divided."""
    seconds = model.seconds(strategy, micro_batches)
    if task.homes[model.call.name] != model.call.name:
        return seconds
    gathered_s = sum(other.gathering_s(strategy, 1) for other in _readers(task, model, strategy))
    return seconds + model.gathering_s(strategy, micro_batches) + gathered_s


def _row_of(task: PlanningTask, model: CallModel, strategy: ParallelStrategy, micro_batches: int) -> OptionRow:
    call, work = model.call, model.work(strategy, micro_batches)
    label, copied = str(strategy), 0.0
    static = work.kept_cache_bytes()
    dynamic = work.dynamic_bytes() - static
    if task.homes[call.name] == call.name:
        readers = _readers(task, model, strategy)
        label, static = _home_label(task, call, work.placed), static + model.static_bytes(strategy)
        dynamic += 0 if call.trains else work.gathered_bytes()
        static += max((other.work(strategy, 1).gathered_bytes() for other in readers), default=0)
    else:
        # The optimizer's states stay at home, so that every training of a model has one layout.
        copied = 2.0 * task.cluster.device_memory_bytes if call.trains else float(work.placed.copy_bytes())
    return OptionRow(
        devices=(0, strategy.size),
        strategy=label,
        micro_batches=micro_batches,
        time_s=seconds_of(task, model, strategy, micro_batches),
        static_bytes=static,
        dynamic_bytes=dynamic,
        copy_bytes=copied,
    )


def _readers(task: PlanningTask, home: CallModel, strategy: ParallelStrategy) -> list[CallModel]:
    """The other calls of a model that gather in its home what they use, where that is sharded: inferences, where no
    call generates. What this takes, at most, is counted as the home's."""
    if not home.placed(strategy).is_divided:
        return []
    calls = [other for other in task.graph.calls_of(home.call.model_name) if other.name != home.call.name]
    if any(other.generates for other in calls):
        return []
    features = home.features
    how: DataParallel = features.modes or ("fsdp" if features.fully_sharded else "zero1")
    of_home = CallCompute(data_parallel=how, prefetch=features.prefetch)
    return [task.call_models[other.name].under(of_home) for other in calls if other.uses_model and not other.trains]


def _home_label(task: PlanningTask, home: ModelFunctionCallDef, placed: PlacedModel) -> str:
    """A generation would gather all of a sharded home: a label of its own makes it, and all calls beside it, take a
    copy."""
    if not placed.is_divided:
        return str(placed.strategy)
    generates = any(other.generates for other in task.graph.calls_of(home.model_name) if other.name != home.name)
    return f"{placed.strategy} sharded" if generates else str(placed.strategy)
