"""The options of a call as rows of a planning problem: what each takes, and what it needs on its devices."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

from realhf.dataflow.graph import ModelFunctionCallDef
from realhf.geometry.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.planning.model.communicators import CommunicatorLabels, axes_used, of_all_devices
from realhf.planning.model.cost import CallCost
from realhf.planning.model.grouping import grouped, spared_bytes
from realhf.planning.model.memory import copy_bytes, dynamic_bytes, gathered_for_call, kept_cache_bytes, static_bytes
from realhf.planning.options import Option
from realhf.planning.problem.inputs import ProblemInputs
from realhf.planning.problem.tables import OptionRow
from realhf.realloc.plan.planner import DEFAULT_BUCKET_BYTES


@dataclass(frozen=True)
class _Needs:
    """What is known of a strategy with a number of micro-batches."""

    label: str
    time_s: float
    static_bytes: float
    dynamic_bytes: float


@dataclass(frozen=True)
class _StrategyRow:
    label: str
    static_bytes: float
    copy_bytes: float
    by_micro_batches: dict[int, _Needs] = field(default_factory=dict)


class OptionRows:
    """Seconds and bytes of the options of every call."""

    def __init__(self, inputs: ProblemInputs):
        self._inputs = inputs
        common = of_all_devices(inputs.task.cluster.num_devices, moves=bool(inputs.task.graph.follows))
        self._labels = CommunicatorLabels(common)

    def rows(self, call: ModelFunctionCallDef) -> list[OptionRow]:
        """Where the mesh lies changes nothing: what is known of a strategy holds for all meshes of its size."""
        inputs = self._inputs
        is_home = inputs.task.homes[call.name] == call.name
        cost = inputs.task.cost_of(call.name)
        known: dict[ParallelStrategy, _StrategyRow] = {}
        layouts, numbers = inputs.layouts[call.name]
        by_layout = []
        for layout in layouts:
            if layout.strategy not in known:
                known[layout.strategy] = self._strategy_row(call, layout.strategy, is_home)
            devices = (layout.mesh.first, layout.mesh.size)
            by_layout.append((devices, self._communicators(call, layout), known[layout.strategy]))
        waits = call.model_name in inputs.task.offload
        home_bytes = 0.0 if is_home or not waits else self._loaded_bytes(call)
        rows = []
        for option, number in zip(inputs.options[call.name], numbers, strict=True):
            devices, communicators, row = by_layout[number]
            if option.micro_batches not in row.by_micro_batches:
                row.by_micro_batches[option.micro_batches] = self._needs(call, option, row, cost)
            needs = row.by_micro_batches[option.micro_batches]
            rows.append(
                OptionRow(
                    devices=devices,
                    strategy=needs.label,
                    micro_batches=option.micro_batches,
                    time_s=needs.time_s,
                    static_bytes=0.0 if waits else needs.static_bytes,
                    dynamic_bytes=needs.dynamic_bytes + (needs.static_bytes + home_bytes if waits else 0.0),
                    copy_bytes=row.copy_bytes,
                    communicators=communicators,
                )
            )
        return rows

    def _communicators(self, call: ModelFunctionCallDef, layout: Layout) -> tuple[int, ...]:
        inputs = self._inputs
        if inputs.task.costs.hardware.communicator_bytes == 0:
            return ()
        is_home = inputs.task.homes[call.name] == call.name
        gathers = is_home and inputs.task.costs.features_of(call.model_name).fully_sharded
        return self._labels.of(layout, axes_used(call, layout.strategy, gathers_parameters=gathers))

    def _needs(self, call: ModelFunctionCallDef, option: Option, row: _StrategyRow, cost: CallCost) -> _Needs:
        inputs = self._inputs
        strategy, micro_batches = option.layout.strategy, option.micro_batches
        seconds = cost.seconds(strategy, micro_batches)
        features = inputs.task.costs.features_of(call.model_name)
        dynamic = dynamic_bytes(call, option, inputs.task.batch_size, inputs.task.workload, inputs.task.dtype, features)
        kept = kept_cache_bytes(call, option, inputs.task.batch_size, inputs.task.workload, inputs.task.dtype, features)
        dynamic -= kept
        is_home = inputs.task.homes[call.name] == call.name
        if is_home:
            dynamic += gathered_for_call(call, strategy, inputs.task.dtype, features)
        sharding = cost.sharding(strategy, micro_batches) if is_home else None
        if sharding is None:
            label = self._home_label(call, strategy) if is_home else row.label
            return _Needs(label, seconds, row.static_bytes + kept, dynamic)
        # No call finds whole parameters in such a home: a label of its own makes each take a copy, and the time to
        # gather what it is made of is added here, once a copy.
        copies = len(inputs.task.graph.calls_of(call.model_name)) - 1
        seconds += copies * sharding.regather_s
        label = f"{row.label} sharded"
        return _Needs(label, seconds, float(sharding.static_bytes), dynamic + sharding.gather_bytes)

    def _home_label(self, call: ModelFunctionCallDef, strategy: ParallelStrategy) -> str:
        is_sharded = self._inputs.task.costs.features_of(call.model_name).fully_sharded and strategy.dp > 1
        return f"{strategy} sharded" if is_sharded else str(strategy)

    def spared(self, call: ModelFunctionCallDef) -> Iterator[tuple[str, str, float]]:
        """See `CallTable.spared`: the home's parameters, and the two buckets that fill the copy.

        None where the home is loaded for each call, or keeps shards of its own choice, which has another label.
        """
        inputs = self._inputs
        home, features = inputs.home_call(call.model_name), inputs.task.costs.features_of(call.model_name)
        if home is call or call.trains or call.model_name in inputs.task.offload:
            return
        homes, copies = (
            {layout.strategy: None for layout in inputs.layouts[name][0]} for name in (home.name, call.name)
        )
        for kept, copied in product(homes, copies):
            if kept.size != copied.size or kept == copied:
                continue
            source, target = (
                Layout(DeviceMesh(0, kept.size), degrees) for degrees in (kept, copied)
            )  # wherever they lie
            groups = grouped(source, target, call.config.num_layers, inputs.task.cluster) if inputs.groups else None
            spared = spared_bytes(call.config, source, groups or target, inputs.task.dtype, features)
            if spared:
                yield self._home_label(home, kept), str(copied), float(spared + 2 * DEFAULT_BUCKET_BYTES)

    def _strategy_row(self, call: ModelFunctionCallDef, strategy: ParallelStrategy, is_home: bool) -> _StrategyRow:
        inputs = self._inputs
        if is_home:
            static = inputs.at_home(static_bytes, call, strategy, trained=call.trains)
            return _StrategyRow(str(strategy), float(static), 0.0)
        if call.trains:
            # The optimizer's states stay at home, so that every training of a model has one layout.
            return _StrategyRow(str(strategy), 0.0, 2.0 * inputs.task.cluster.device_memory_bytes)
        return _StrategyRow(str(strategy), 0.0, float(copy_bytes(call.config, strategy, inputs.task.dtype)))

    def _loaded_bytes(self, call: ModelFunctionCallDef) -> float:
        """The most that is loaded at home for a call that is not the home, under the homes that fit into memory."""
        inputs = self._inputs
        home = inputs.home_call(call.model_name)
        strategies = {layout.strategy for layout in inputs.layouts[home.name][0]}
        limit = inputs.task.cluster.device_memory_bytes
        fitting = [s for s in strategies if self._strategy_row(home, s, is_home=True).static_bytes <= limit]
        sizes = (
            inputs.at_home(static_bytes, home, strategy, trained=call.trains) for strategy in fitting or strategies
        )
        return float(max(sizes))
